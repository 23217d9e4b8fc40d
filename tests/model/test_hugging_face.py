"""Small Hugging Face configurations: the graph against the eager model and against what torch counts itself."""

from __future__ import annotations

import pytest

from autopar.model.capture import capture
from autopar.model.graph import OpGraph
from autopar.model.spec import TrainingJob, load
from tests.model.against_torch import check_flops, check_gradients, check_parameters, check_saved
from tests.model.hugging_face import SMALL, write_config

pytest.importorskip("transformers")


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


def test_the_graph_computes_the_models_loss_and_gradients(job: TrainingJob, graph: OpGraph) -> None:
    check_gradients(job, graph)
