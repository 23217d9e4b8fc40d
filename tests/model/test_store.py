"""Graphs kept on disk: equal to what was captured, read the second time, never stale."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from autopar.model import capture as capturing
from autopar.model import store
from autopar.model.capture import capture
from autopar.model.graph import OpGraph
from autopar.model.packing import pack, unpack
from autopar.model.spec import load
from tests.model.test_copied_layers import assert_equal

MODEL = """
import os
import torch
from torch import nn
from neighbour import SCALE

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.arange(4.0))
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, int(os.environ.get("WIDTH", "2")))

    def forward(self, x):
        return self.second(torch.relu(self.first(x * torch.tensor(SCALE) + self.shift)) + 0.5)

build_model = Net
example_batch = lambda n: {"x": torch.zeros(n, 4)}
compute_loss = lambda output, batch: output.square().mean()
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    (tmp_path / "neighbour.py").write_text("SCALE = 2.0\n")
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path / "model.py"


def traced(model: Path, monkeypatch: pytest.MonkeyPatch, batch: int = 2, device: str = "cpu") -> tuple[OpGraph, bool]:
    """A capture, and whether it traced."""
    calls: list[None] = []
    original = capturing._export
    monkeypatch.setattr(capturing, "_export", lambda *args: (calls.append(None), original(*args))[1])
    sys.modules.pop("neighbour", None)
    graph = capture(load(str(model)), batch, device)
    monkeypatch.setattr(capturing, "_export", original)
    return graph, bool(calls)


def test_second_capture_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, traced_first = traced(model, monkeypatch)
    second, traced_second = traced(model, monkeypatch)
    assert (traced_first, traced_second) == (True, False)
    assert_equal(first, second)
    assert first.constants.keys() == second.constants.keys() != set()
    assert all(torch.equal(first.constants[name], second.constants[name]) for name in first.constants)
    second.fx_graph.lint()


def test_whole_zoo_packs() -> None:
    for name in ("gpt", "moe", "vit", "mlp"):
        graph = capture(load(str(Path(capturing.__file__).parents[1] / f"zoo/{name}.py")), 2, afresh=True)
        assert_equal(graph, unpack(pack(graph)))


@pytest.mark.parametrize(
    "change",
    [
        ("model.py", "(SCALE) +", "(SCALE) -"),
        ("model.py", "import os", "# a line more\nimport os"),  # the graph names source lines
        ("model.py", "nn.Linear(4, 8)", "nn.Linear(4, 8, bias=False)"),
        ("model.py", "+ 0.5", "+ 0.25"),
        ("neighbour.py", "2.0", "3.0"),
    ],
)
def test_changed_file_is_traced_again(
    model: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str, str]
) -> None:
    traced(model, monkeypatch)
    file = model.parent / change[0]
    file.write_text(file.read_text().replace(*change[1:]))
    graph, again = traced(model, monkeypatch)
    assert again
    assert_equal(graph, capture(load(str(model)), 2, afresh=True))


def test_other_environment_batch_or_device_is_traced(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced(model, monkeypatch)
    assert traced(model, monkeypatch, batch=3)[1]
    assert traced(model, monkeypatch, device="cuda")[1]
    monkeypatch.setenv("WIDTH", "6")
    graph, again = traced(model, monkeypatch)
    assert again
    assert graph.nodes["second_weight"].meta.shape == (6, 8)


def test_other_version_is_traced(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced(model, monkeypatch)
    monkeypatch.setattr(torch, "__version__", "3.0.0")
    assert traced(model, monkeypatch)[1]


def test_damaged_is_traced_and_mended(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced(model, monkeypatch)
    (file,) = (model.parent / "cache/graphs").iterdir()
    file.write_bytes(file.read_bytes()[:-20])
    assert traced(model, monkeypatch)[1]
    assert not traced(model, monkeypatch)[1]


def test_switched_off_or_unwritable(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.VARIABLE, "")
    assert [traced(model, monkeypatch)[1] for _ in range(2)] == [True, True]
    monkeypatch.setenv(store.VARIABLE, str(model / "under-a-file"))
    assert traced(model, monkeypatch)[1]


def test_unused_are_deleted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced(model, monkeypatch)
    (file,) = (model.parent / "cache/graphs").iterdir()
    os.utime(file, (0, 0))
    traced(model, monkeypatch, batch=3)
    assert not file.exists()
