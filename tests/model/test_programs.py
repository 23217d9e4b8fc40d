"""Model files of many kinds: blocks, and every number of the graph against torch itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autopar.model.capture import capture
from autopar.model.graph import OpGraph
from autopar.model.spec import TrainingJob, load
from tests.model.against_torch import (
    check_flops,
    check_gradients,
    check_parameters,
    check_saved,
    check_saved_under_autocast,
    in_bf16,
    run_graph,
)

PROGRAMS = Path(__file__).parent / "programs"
KINDS = {  # block kinds and how many there are of each; a first layer without input gradients is a kind of its own
    "custom": {"layers": 1, "layers_2": 2, "head": 1},
    "lora": {"embed": 1, "layers": 1, "layers_2": 2, "head": 1},
    "lstm": {"head": 1},
    "outputs": {"body": 1, "body_2": 1, "head": 1},
    "recommender": dict.fromkeys(["bottom", "bottom_2", "tables", "tables_2", "tables_3", "top", "top_2", "head"], 1),
    "resnet50": {
        "stem": 1,
        "layer1": 1,
        "layer1_2": 2,
        "layer2": 1,
        "layer2_2": 3,
        "layer3": 1,
        "layer3_2": 5,
        "layer4": 1,
        "layer4_2": 2,
        "head": 1,
    },
    "rotary": {"embed": 1, "layers": 3, "head": 1},
    "unet": dict.fromkeys(
        ["down", "down_2", "down_3", "between", "ups", "up", "ups_2", "up_2", "ups_3", "up_3", "head"], 1
    ),
}


@pytest.fixture(scope="module", params=sorted(KINDS))
def job(request: pytest.FixtureRequest) -> TrainingJob:
    return load(str(PROGRAMS / f"{request.param}.py"))


@pytest.fixture(scope="module")
def graph(job: TrainingJob) -> OpGraph:
    return capture(job, 4)


def test_blocks_are_found_by_structure(job: TrainingJob, graph: OpGraph) -> None:
    assert {kind: len(blocks) for kind, blocks in graph.block_kinds().items()} == KINDS[job.name]


def test_parameters_equal_the_state_dict(job: TrainingJob, graph: OpGraph) -> None:
    check_parameters(job, graph)


def test_flops_equal_torchs_counter(job: TrainingJob, graph: OpGraph) -> None:
    check_flops(job, graph)


def test_saved_activations_equal_what_autograd_keeps(job: TrainingJob, graph: OpGraph) -> None:
    check_saved(job, graph)


def test_saved_activations_under_autocast_equal_what_autograd_keeps(job: TrainingJob) -> None:
    if job.name == "lstm":
        pytest.skip("one operator, whose steps the CPU's autocast casts one by one")
    check_saved_under_autocast(job, 4, reads_dtypes=False)


def test_saved_activations_of_bf16_parameters_equal_what_autograd_keeps(job: TrainingJob) -> None:
    if job.name == "rotary":
        pytest.skip("complex numbers have no bf16")
    narrow = in_bf16(job)
    check_saved(narrow, capture(narrow, 4))


def test_the_graph_computes_the_models_loss_and_gradients(job: TrainingJob, graph: OpGraph) -> None:
    check_gradients(job, graph)


def test_skips_of_a_u_net_cross_all_blocks_between() -> None:
    graph = capture(load(str(PROGRAMS / "unet.py")), 2)
    blocks = {block.name: block for block in graph.blocks}
    for down, up in (("down.0", "ups.2"), ("down.1", "ups.1"), ("down.2", "ups.0")):
        assert set(blocks[down].outputs) & set(blocks[up].inputs)


@pytest.mark.parametrize("mixed", [False, True])  # True: with a change that torch's own functionalization rewrites
def test_running_the_graph_updates_batch_norm_statistics_as_the_model_does(tmp_path: Path, mixed: bool) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class M(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)\n"
        "    def forward(self, x):\n"
        "        y = self.norm(self.conv(x))\n"
        + ("        y.transpose(1, 2).mul_(2)\n" if mixed else "")
        + "        return y.square().mean()\n"
        "def build_model():\n    return M()\n"
        "def example_batch(n):\n    return {'x': torch.linspace(-1, 1, n * 192).reshape(n, 3, 8, 8)}\n"
    )
    job = load(str(tmp_path / "model.py"))
    graph = capture(job, 2)
    module = job.loss_module()
    twin = job.loss_module()
    twin.load_state_dict(module.state_dict())
    batch = job.flatten_batch(job.example_batch(2))
    for _ in range(2):
        torch.testing.assert_close(run_graph(graph, twin.model, batch), module(**batch))
    assert int(module.model.norm.num_batches_tracked) == 2
    torch.testing.assert_close(dict(twin.named_buffers()), dict(module.named_buffers()))
