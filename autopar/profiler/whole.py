"""Runs a whole captured graph, so that what operators cost together can be compared with what they cost alone."""

from __future__ import annotations

import copy
import time

import torch
from torch import fx, nn

from autopar.hardware.profiles import MeasuredGraph
from autopar.model.graph import OpGraph
from autopar.model.spec import TrainingJob
from autopar.profiler.operators import MIN_SAMPLES, clock, undisturbed

LARGEST_BYTES = 2**30  # of parameters; larger models are left to the operators alone
MAX_SAMPLES = 100


def runnable(job: TrainingJob, graph: OpGraph, device: torch.device) -> nn.Module:
    """The graph as a module that runs on a device, with the model's own fresh weights and buffers."""
    root = job.build_model().to(device)
    for name, value in graph.constants.items():
        constant = torch.zeros_like(value, device=device) if value.is_meta else value.to(device)
        root.register_buffer(name, constant, persistent=False)
    local = copy.deepcopy(graph.fx_graph)
    for node in local.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": device}
    return fx.GraphModule(root, local)


def measure_graph(job: TrainingJob, graph: OpGraph, device: torch.device, window_s: float) -> MeasuredGraph:
    """Forward and backward time of one micro-batch, gradients set anew; lower quartiles.

    Args:
        job: the model.
        graph: its capture at some micro-batch size.
        device: where to run.
        window_s: time to spend; at least three samples are taken.
    """
    module = runnable(job, graph, device)
    batch = {name: value.to(device) for name, value in job.flatten_batch(job.example_batch(graph.batch_size)).items()}
    forward: list[float] = []
    backward: list[float] = []
    end = time.perf_counter() + window_s
    while len(forward) <= MIN_SAMPLES or (time.perf_counter() < end and len(forward) < MAX_SAMPLES):
        module.zero_grad(set_to_none=True)
        begun = clock(device)
        loss = module(**batch)
        middle = clock(device)
        loss.backward()
        forward.append(middle - begun)
        backward.append(clock(device) - middle)
    return MeasuredGraph(
        micro_batch=graph.batch_size,
        operators=sum(1 for node in graph.of_kind("op") if node.outputs),
        forward_s=undisturbed(forward[1:]),  # the first warms up
        backward_s=undisturbed(backward[1:]),
    )
