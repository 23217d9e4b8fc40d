"""Measuring tasks: every shape that the search can ask for, each callable, with the result that the graph expects."""

import pickle

import pytest
import torch
from torch.utils import _pytree as pytree

from autopar.cost.compute import ComputeModel
from autopar.hardware import Device
from autopar.model.capture import capture
from autopar.model.graph import OpGraph, TensorMeta
from autopar.model.spec import load
from autopar.profiler.common import common_tasks
from autopar.profiler.operators import Bound, engine_call_time, measure
from autopar.profiler.tasks import OperatorTask, tasks_of
from autopar.sharding.placement import local_shape
from autopar.sharding.rules import strategies

CPU = torch.device("cpu")
DEVICE = Device.load("cpu-local")


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return capture(load("autopar/zoo/gpt.py"), 2)


@pytest.fixture(scope="module")
def tasks(graph: OpGraph) -> list[OperatorTask]:
    return tasks_of([graph], [2, 4], DEVICE)


def test_distinct_and_ordered(tasks: list[OperatorTask]) -> None:
    keys = [(task.signature, task.attributes) for task in tasks]
    assert len(set(keys)) == len(keys)
    assert [t.importance for t in tasks] == sorted((t.importance for t in tasks), reverse=True)


def test_every_shape_of_every_strategy_is_covered(graph: OpGraph, tasks: list[OperatorTask]) -> None:
    known = {task.signature for task in tasks}
    linears = [n for n in graph.of_kind("op") if n.op == "aten.linear.default"]
    assert linears
    for node in linears:
        for size in (2, 4):
            for strategy in strategies(graph, node, size):
                inputs = tuple(
                    TensorMeta(local_shape(graph.nodes[name].meta.shape, [(placement, size)]), torch.float32)
                    for name, placement in zip(node.inputs, strategy.inputs, strict=True)
                )
                output = TensorMeta(local_shape(node.meta.shape, [(strategy.output, size)]), torch.float32)
                assert (node.op, inputs, (output,)) in known


def test_flops_follow_the_local_shapes(tasks: list[OperatorTask]) -> None:
    for task in tasks:
        if task.op == "aten.linear.default":
            x, weight = task.inputs[:2]
            assert task.forward_flops == pytest.approx(2 * x.numel * weight.shape[0])


def test_results_have_the_expected_shapes(tasks: list[OperatorTask]) -> None:
    for task in [*tasks, *common_tasks()[:20]]:
        result = [t for t in pytree.tree_leaves(Bound(task, CPU).forward()) if isinstance(t, torch.Tensor)]
        assert [tuple(t.shape) for t in result[: len(task.outputs)]] == [m.shape for m in task.outputs], task.op


def test_tasks_travel_between_processes(tasks: list[OperatorTask]) -> None:
    assert pickle.loads(pickle.dumps(tasks)) == tasks


def test_measured_times_are_found_again(tasks: list[OperatorTask]) -> None:
    from dataclasses import replace

    from autopar.hardware.profiles import MeasuredOperators

    engine = engine_call_time(CPU)
    chosen = [tasks[0], next(t for t in tasks if "embedding" in t.op), next(t for t in tasks if "gelu" in t.op)]
    measured = [measure(task, CPU, 0.01, engine) for task in chosen]
    model = ComputeModel(replace(DEVICE, measured=MeasuredOperators(tuple(measured))))
    for task, result in zip(chosen, measured, strict=True):
        assert result.forward_s > 0
        assert result.backward_s is not None
        assert result.samples >= 3
        assert model.operator_time(task.op, task.inputs, task.outputs, task.forward_flops) == result.forward_s


def test_operator_without_gradient_has_no_backward(tasks: list[OperatorTask]) -> None:
    without = [t for t in tasks if not any(fill.needs_grad for fill in t.operands)]
    for task in without[:3]:
        assert measure(task, CPU, 0.001).backward_s is None
