"""Every number of a captured graph against torch itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autopar.errors import CaptureError
from autopar.model.capture import capture
from autopar.model.graph import OpGraph
from autopar.model.spec import TrainingJob, load
from autopar.model.summary import flops_by_kind
from tests.model.against_torch import (
    check_flops,
    check_gradients,
    check_parameters,
    check_saved,
    check_saved_under_autocast,
    in_bf16,
    run_graph,
)

ZOO = Path(__file__).parents[2] / "autopar/zoo"
MODELS = ["gpt", "gpt_tied", "mlp", "moe", "seq2seq", "vit"]


@pytest.fixture(scope="module", params=MODELS)
def job(request: pytest.FixtureRequest) -> TrainingJob:
    return load(str(ZOO / f"{request.param}.py"))


@pytest.fixture(scope="module")
def graph(job: TrainingJob) -> OpGraph:
    return capture(job, 4)


def test_parameters_equal_the_state_dict(job: TrainingJob, graph: OpGraph) -> None:
    check_parameters(job, graph)
    assert graph.parameter_count == sum(p.numel() for p in job.build_model().parameters())


def test_flops_equal_torchs_counter(job: TrainingJob, graph: OpGraph) -> None:
    check_flops(job, graph)


def test_saved_activations_equal_what_autograd_keeps(job: TrainingJob, graph: OpGraph) -> None:
    check_saved(job, graph)


def test_saved_activations_under_autocast_equal_what_autograd_keeps(job: TrainingJob) -> None:
    check_saved_under_autocast(job, 4, reads_dtypes=False)


def test_saved_activations_of_bf16_parameters_equal_what_autograd_keeps(job: TrainingJob) -> None:
    narrow = in_bf16(job)
    check_saved(narrow, capture(narrow, 4))


def test_the_graph_computes_the_models_loss_and_gradients(job: TrainingJob, graph: OpGraph) -> None:
    check_gradients(job, graph)


def test_blocks_form_a_chain_over_all_operators(graph: OpGraph) -> None:
    covered = [name for block in graph.blocks for name in block.nodes]
    assert covered == [n.name for n in graph.of_kind("op")]
    made: set[str] = set()
    for block in graph.blocks:
        for name in block.inputs:
            assert name in made or graph.nodes[name].kind == "input"
        made |= set(block.outputs)
        assert len(set(block.labels)) == len(block.labels)
    assert graph.loss in graph.blocks[-1].outputs


def test_blocks_of_a_kind_are_aligned(graph: OpGraph) -> None:
    for blocks in graph.block_kinds().values():
        for block in blocks:
            assert block.labels == blocks[0].labels
            ops = [graph.nodes[n].op for n in block.nodes]
            assert ops == [graph.nodes[n].op for n in blocks[0].nodes]


def test_flops_are_split_into_matrix_and_attention(graph: OpGraph) -> None:
    kinds = flops_by_kind(graph)
    assert sum(kinds[k]["forward"] for k in ("matrix", "attention")) == graph.forward_flops
    assert sum(kinds[k]["backward"] for k in ("matrix", "attention")) == graph.backward_flops
    attends = any("scaled_dot_product" in n.op for n in graph.of_kind("op"))
    assert (kinds["attention"]["forward"] > 0) == attends
    assert kinds["other"]["forward"] > 0


def test_gpt_layers_are_one_kind() -> None:
    kinds = capture(load(str(ZOO / "gpt.py")), 2).block_kinds()
    assert {k: len(v) for k, v in kinds.items()} == {"embed": 1, "blocks": 4, "head": 1}


def test_the_fingerprint_is_the_models_not_the_batchs(job: TrainingJob, graph: OpGraph) -> None:
    assert capture(job, 2).fingerprint == graph.fingerprint
    assert capture(job, 2).forward_flops * 2 == graph.forward_flops


def write(folder: Path, text: str) -> TrainingJob:
    (folder / "model.py").write_text("import torch\nfrom torch import nn\nimport torch.nn.functional as F\n" + text)
    return load(str(folder / "model.py"))


TIED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.body = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head.weight = self.tokens.weight
        self.register_buffer("scale", torch.ones(8))
    def forward(self, ids, labels):
        x = self.tokens(ids) * self.scale
        mask = (ids > 2)[..., None].float()
        skip = x
        for layer in self.body:
            x = x + layer(x) * mask
        return F.cross_entropy(self.head(x + skip).flatten(0, 1), labels.flatten())
def build_model():
    return Model()
def example_batch(n):
    ids = torch.arange(n * 4).reshape(n, 4) % 16
    return {"ids": ids, "labels": ids}
"""


def test_tied_weights_skips_masks_and_aliased_inputs(tmp_path: Path) -> None:
    job = write(tmp_path, TIED)
    graph = capture(job, 2)
    assert graph.tied == {"tokens.weight": ("head.weight",)}
    assert [n.op for n in graph.of_kind("parameter")].count("tokens.weight") == 1
    layers = [b for b in graph.blocks if b.name.startswith("body.")]
    assert len(layers) == 3
    assert any(graph.nodes[n].requires_grad for n in graph.blocks[-1].inputs)  # the skip arrives at the head
    assert all(b.prelude for b in layers[:2])  # the mask is recomputed, not sent
    module = job.loss_module()
    batch = job.flatten_batch(job.example_batch(2))
    model = module.model
    torch.testing.assert_close(run_graph(graph, model, batch), module(**batch))
    assert {n.op for n in graph.of_kind("input")} == {"ids", "labels"}


def test_data_dependent_control_flow_is_refused_with_its_line(tmp_path: Path) -> None:
    job = write(
        tmp_path,
        "class M(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a = nn.Linear(4, 1)\n"
        "    def forward(self, x):\n"
        "        return self.a(x).mean() if x.sum() > 0 else x.mean()\n"
        "def build_model():\n    return M()\n"
        "def example_batch(n):\n    return {'x': torch.ones(n, 4)}\n",
    )
    with pytest.raises(CaptureError, match="line 9"):
        capture(job, 2)


MOVED = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4, dtype=torch.float64))
    def forward(self, x):
        return (self.a(x) * self.table.to(x.device, x.dtype)).mean()
def build_model():
    return M()
def example_batch(n):
    return {"x": torch.ones(n, 4)}
"""


def test_a_move_to_the_inputs_device_runs_on_another_device_than_the_trace(tmp_path: Path) -> None:
    job = write(tmp_path, MOVED)
    graph = capture(job, 2)
    module = job.loss_module()
    batch = job.flatten_batch(job.example_batch(2))
    torch.testing.assert_close(run_graph(graph, module.model, batch), module(**batch))


CHANGED = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
    def forward(self, x):
        y = self.a(x)
        y.mul_(2).add_(1)
        z = torch.zeros_like(y)
        z[:, :2] = y[:, 2:]
        return (y * z).mean()
def build_model():
    return M()
def example_batch(n):
    return {"x": torch.arange(n * 4.0).reshape(n, 4)}
"""


def test_changes_in_place_and_through_views_become_functional(tmp_path: Path) -> None:
    job = write(tmp_path, CHANGED)
    graph = capture(job, 2)
    assert not [n.op for n in graph.of_kind("op") if n.op.split(".")[1].endswith("_")]
    module = job.loss_module()
    batch = job.flatten_batch(job.example_batch(2))
    expected = module(**batch)
    (want,) = torch.autograd.grad(expected, [module.model.a.weight])
    got = run_graph(graph, module.model, batch)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(got, [module.model.a.weight])[0], want)


CHANGING = """
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
    def forward(self, x):
        {change}
        return self.a(x)
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
    def forward(self, x):
        return self.inner(x).mean()
def build_model():
    return M()
def example_batch(n):
    return {{"x": torch.ones(n, 4)}}
"""


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("self.seen.add_(x.mean(0))", "buffer 'inner.seen'"),
        ("self.seen[1:] = x[0, 1:]", "buffer 'inner.seen'"),
        ("x.mul_(2)", "input 'x'"),
        ("x[:, 0].zero_()", "input 'x'"),
        ("with torch.no_grad(): self.a.weight.mul_(0.9)", "parameter 'inner.a.weight'"),
    ],
)
def test_a_lasting_change_in_forward_is_refused_with_its_module_and_line(
    tmp_path: Path, change: str, what: str
) -> None:
    job = write(tmp_path, CHANGING.format(change=change))
    with pytest.raises(CaptureError) as caught:
        capture(job, 2)
    assert f"changes the {what}" in str(caught.value)
    assert "'inner'" in str(caught.value)
    assert "model.py:11" in str(caught.value)


REGIONS = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        y = self.a(x)
        with torch.no_grad():
            z = self.b(y) * 2
            with torch.enable_grad():
                scale = z.square().sum()
        with torch.autocast("cpu", enabled=False):
            y = y.float() * 3
        return (y / scale + z).mean()
def build_model():
    return M()
def example_batch(n):
    return {"x": torch.arange(n * 4.0).reshape(n, 4)}
"""


def test_regions_without_gradients_or_autocast_are_part_of_the_graph(tmp_path: Path) -> None:
    job = write(tmp_path, REGIONS)
    graph = capture(job, 2)
    assert [n.op.split(".")[1] for n in graph.of_kind("op") if n.forward_flops] == ["linear", "linear"]
    check_flops(job, graph)
    check_saved(job, graph)
    check_gradients(job, graph)


def test_a_model_that_switches_autocast_on_is_refused_with_its_line(tmp_path: Path) -> None:
    job = write(tmp_path, REGIONS.replace("enabled=False", "dtype=torch.bfloat16"))
    with pytest.raises(CaptureError, match=r"switches autocast on.*model.py:16.*--precision"):
        capture(job, 2)


def test_a_buffer_that_forward_replaces_is_refused(tmp_path: Path) -> None:
    job = write(tmp_path, CHANGING.format(change="self.seen = self.seen + x.mean(0)"))
    with pytest.raises(CaptureError, match=r"changes the buffer 'inner.seen'"):
        capture(job, 2)
