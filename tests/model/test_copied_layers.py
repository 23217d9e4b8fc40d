"""Layers copied instead of traced: the graph equals the full trace, and unlike layers are not copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopar.model.capture import capture
from autopar.model.graph import OpGraph
from autopar.model.recording import Recording
from autopar.model.repeats import Repeat, find_repeats, longer_name
from autopar.model.spec import TrainingJob, default_optimizer, load
from autopar.model.store import VARIABLE
from tests.model.hugging_face import SMALL, write_config

DEEP: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 9},
    "gemma3_text": {"num_hidden_layers": 27, "layer_types": None},
    "gpt_oss": {"num_hidden_layers": 12, "layer_types": None},
    "deepseek_v3": {"num_hidden_layers": 11, "first_k_dense_replace": 2},
    "t5": {"num_layers": 8, "num_decoder_layers": 9},
    "mpt": {"n_layers": 8},
    "mixtral": {"num_hidden_layers": 8},
    "whisper": {"encoder_layers": 8, "decoder_layers": 8},
    "mamba": {"num_hidden_layers": 8},
}


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")


class Layer(nn.Module):
    def __init__(self, scale: float = 1.0, width: int = 8, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.scale, self.norm, self.linear = scale, nn.LayerNorm(width), nn.Linear(width, width)
        if weight is not None:
            self.linear.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * torch.tanh(self.linear(self.norm(x)))


class Stack(nn.Module):
    """Layers one after the other; ``skip`` adds the first one's result before the last."""

    def __init__(self, layers: list[nn.Module], skip: bool = False) -> None:
        super().__init__()
        self.layers, self.skip, self.head = nn.ModuleList(layers), skip, nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first = None
        for layer in self.layers:
            x = layer(x)
            first = x if first is None else first
        return nn.functional.cross_entropy(self.head(x + first if self.skip else x), labels)


class EveryResult(Stack):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen = []
        for layer in self.layers:
            x = layer(x)
            seen.append(x)
        return nn.functional.cross_entropy(self.head(torch.stack(seen).mean(0)), labels)


class Counted(Stack):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for i in range(10):
            x = self.layers[i](x)
        return nn.functional.cross_entropy(self.head(x), labels)


def frozen(layers: list[nn.Module]) -> list[nn.Module]:
    for layer in layers:
        layer.requires_grad_(False)
    return layers


def many(count: int, **options: Any) -> list[nn.Module]:
    return [Layer(**options) for _ in range(count)]


def shared() -> list[nn.Module]:
    weight = nn.Parameter(torch.empty(8, 8))
    return many(10, weight=weight)


def tied_pairs() -> list[nn.Module]:
    layers: list[nn.Module] = []
    for _ in range(6):
        weight = nn.Parameter(torch.empty(8, 8))
        layers.extend(many(2, weight=weight))
    return layers


PROGRAMS: dict[str, tuple[Any, int]] = {  # how it is built, how many layers are left to copies
    "alike": (lambda: Stack(many(10)), 6),
    "first_result_read_at_the_end": (lambda: Stack(many(10), skip=True), 6),
    "every_result_read_at_the_end": (lambda: EveryResult(many(10)), 0),
    "two_runs": (lambda: Stack(many(8) + many(9, scale=2.0)), 11),
    "frozen_half": (lambda: Stack(frozen(many(8)) + many(9)), 10),
    "two_kinds_in_turn": (lambda: Stack([Layer(1.0 + i % 2) for i in range(14)]), 8),
    "all_unlike": (lambda: Stack([Layer(1.0 + i) for i in range(10)]), 0),
    "one_shared_matrix": (lambda: Stack(shared()), 6),
    "tied_in_pairs": (lambda: Stack(tied_pairs()), 0),
    "called_by_number": (lambda: Counted(many(10)), 0),
    "list_in_a_short_list": (lambda: Stack([nn.Sequential(*many(10)), Layer()]), 6),
}


def job_of(build: Any) -> TrainingJob:
    return TrainingJob(
        source="test",
        name="test",
        build_model=build,
        example_batch=lambda n: {"x": torch.zeros(n, 8), "labels": torch.zeros(n, dtype=torch.long)},
        compute_loss=lambda output, batch: output,
        build_optimizer=default_optimizer,
    )


def assert_equal(copied: OpGraph, traced: OpGraph) -> None:
    assert copied.nodes == traced.nodes
    assert list(copied.nodes) == list(traced.nodes)
    assert copied.blocks == traced.blocks
    assert str(copied.fx_graph) == str(traced.fx_graph)
    assert (copied.fingerprint, copied.tied, copied.loss) == (traced.fingerprint, traced.tied, traced.loss)
    assert copied.constants.keys() == traced.constants.keys()
    assert all(torch.equal(value, traced.constants[name]) for name, value in copied.constants.items())


def copies(job: TrainingJob) -> int:
    with torch.device("meta"):
        module, batch = job.loss_module(), job.flatten_batch(job.example_batch(2))
    recording = Recording.of(module.to("meta"), batch)
    return sum(repeat.gone for repeat in find_repeats(module, batch, recording))


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_the_graph_equals_the_full_trace(name: str) -> None:
    build, expected = PROGRAMS[name]
    job = job_of(build)
    assert_equal(capture(job, 2), capture(job, 2, afresh=True))
    if name == "called_by_number":
        with pytest.raises(IndexError):  # capture then traces every layer
            copies(job)
    else:
        assert copies(job) == expected


@pytest.mark.parametrize("name", sorted(DEEP))
def test_hugging_face_graphs_equal_the_full_trace(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {k: v for k, v in {**SMALL[name], **DEEP[name]}.items() if v is not None}
    job = load(write_config(tmp_path, name, config))
    assert copies(job) > 0
    assert_equal(capture(job, 2), capture(job, 2, afresh=True))


def test_members_behind_two_gaps_of_a_list_are_named_as_in_the_whole_model() -> None:
    repeats = [Repeat("layers", 0, 1, 5), Repeat("layers", 8, 2, 3)]  # 1..5 and 10..15 left out
    names = [f"layers.{i}.weight" for i in (0, 1, 2, 3, 4, 5)]
    assert [int(longer_name(n, repeats).split(".")[1]) for n in names] == [0, 6, 7, 8, 9, 16]
    assert longer_name("layers_norm.1.weight", repeats) == "layers_norm.1.weight"
