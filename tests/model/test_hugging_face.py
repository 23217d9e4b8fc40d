"""Small Hugging Face configurations: the graph against the eager model and against what torch counts itself."""

from __future__ import annotations

import pytest

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
)
from tests.model.hugging_face import SMALL, write_config

pytest.importorskip("transformers")
READS_DTYPES = {"qwen3", "qwen3_moe", "t5", "gpt_oss", "mamba", "deepseek_v3"}


@pytest.fixture(scope="module", params=sorted(SMALL))
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainingJob:
    return load(write_config(tmp_path_factory.mktemp(request.param), request.param, SMALL[request.param]))


@pytest.fixture(scope="module")
def graph(job: TrainingJob) -> OpGraph:
    return capture(job, 2)


def test_parameters_equal_the_models(job: TrainingJob, graph: OpGraph) -> None:
    check_parameters(job, graph)


def test_flops_equal_torchs_counter(job: TrainingJob, graph: OpGraph) -> None:
    check_flops(job, graph)


def test_saved_activations_equal_what_autograd_keeps(job: TrainingJob, graph: OpGraph) -> None:
    check_saved(job, graph)


def test_saved_activations_under_autocast_equal_what_autograd_keeps(job: TrainingJob) -> None:
    check_saved_under_autocast(job, 2, reads_dtypes=job.name in READS_DTYPES)


def test_saved_activations_of_bf16_parameters_equal_what_autograd_keeps(job: TrainingJob) -> None:
    narrow = in_bf16(job)
    check_saved(narrow, capture(narrow, 2))


def test_the_graph_computes_the_models_loss_and_gradients(job: TrainingJob, graph: OpGraph) -> None:
    check_gradients(job, graph)
