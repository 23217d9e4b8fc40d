"""One pipeline stage: consecutive blocks, the activations that cross into and out of it, and recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from autopar.model.graph import OpGraph
from autopar.plan import Plan
from autopar.runtime.lower import lower_block, on_device
from autopar.runtime.statistics import running_statistics, unchanged
from autopar.runtime.topology import Topology
from autopar.sharding.placement import local_shape
from autopar.sharding.resolve import ResolvedBlock

BATCH = "batch_"  # before the names of batch inputs, which could otherwise be those of a schedule's own arguments
AUTOCAST = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}  # precision of a plan -> dtype that operators compute in


class Stage(nn.Module):
    """Runs its blocks in order.

    Attributes:
        stateful: the model has buffers that its forward pass changes (running statistics).
        receives, sends: names of the activations that enter and leave; skips that only pass through are in both.
            The last stage sends the loss.
    """

    def __init__(
        self,
        blocks: list[nn.Module],
        resolved: list[ResolvedBlock],
        recompute: Sequence[str],
        receives: list[str],
        sends: list[str],
        precision: torch.dtype | None = None,
        stateful: bool = False,
    ) -> None:
        super().__init__()
        self.precision, self.stateful = precision, stateful
        self.blocks = nn.ModuleList(blocks)
        self.resolved, self.recompute = resolved, recompute
        self.receives, self.sends = receives, sends

    def forward(self, *activations: torch.Tensor, **batch: torch.Tensor) -> Any:
        """One micro-batch. Autocast spans it alone: its cache of narrowed weights must not outlive FSDP's shards."""
        device = next(iter(batch.values())).device.type
        with torch.autocast(device, self.precision or torch.bfloat16, enabled=self.precision is not None):
            return self._forward(activations, {key.removeprefix(BATCH): value for key, value in batch.items()})

    def _forward(self, activations: tuple[torch.Tensor, ...], batch: dict[str, torch.Tensor]) -> Any:
        values: dict[str, torch.Tensor] = {**batch, **dict(zip(self.receives, activations, strict=True))}
        for block, resolved, recompute in zip(self.blocks, self.resolved, self.recompute, strict=True):
            inputs = [values[name] for name in resolved.block.inputs]
            if recompute == "full" and torch.is_grad_enabled():
                results = self._recomputed(block, inputs)
            else:
                results = block(*inputs)
            values.update(zip(resolved.block.outputs, results, strict=True))
        sent = tuple(
            _Own.apply(values[n]) if n in self.receives or values[n]._is_view() else values[n] for n in self.sends
        )
        return sent[0] if len(sent) == 1 else sent

    def _recomputed(self, block: nn.Module, inputs: list[torch.Tensor]) -> Any:
        if not self.stateful:
            return checkpoint(block, *inputs, use_reentrant=False)
        contexts = lambda: (nullcontext(), unchanged(block))  # noqa: E731  of the forward pass, of the second one
        return checkpoint(block, *inputs, use_reentrant=False, context_fn=contexts)


class _Own(torch.autograd.Function):
    """The same memory under a tensor of its own: schedules that split the backward pass detach a stage's results in
    place, which autograd allows neither for views nor for what another stage sent."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0]


def crossing(graph: OpGraph, cuts: list[int]) -> list[list[str]]:
    """For each stage, the activations that enter it: made before, read in it or after. One more entry: the loss."""
    made_at = {name: i for i, block in enumerate(graph.blocks) for name in block.outputs}
    last_read = dict.fromkeys(made_at, -1)
    for i, block in enumerate(graph.blocks):
        for name in block.inputs:
            if name in last_read:
                last_read[name] = i
    entering = [[n for n, i in made_at.items() if i < cut <= last_read[n]] for cut in cuts]
    return [*entering, [graph.loss]]


def build_stage(
    graph: OpGraph,
    plan: Plan,
    resolved: dict[str, ResolvedBlock],
    index: int,
    topology: Topology,
    tensors: dict[str, torch.Tensor],
) -> Stage:
    """Lowers the blocks of one stage (counted along the chain, virtual ones included)."""
    mine = plan.stage_blocks()[index]
    names = [b.name for b in graph.blocks]
    enter = crossing(graph, [names.index(s) for s in plan.stages])
    parts = [resolved[block.name] for block in mine]
    modules: list[nn.Module] = []
    for part in parts:
        module = lower_block(graph, part, topology, tensors)
        if plan.compile != "none":
            module.compile(backend=plan.compile)
        modules.append(module)
    recompute, precision = [block.recompute for block in mine], AUTOCAST[plan.precision]
    stateful = any(running_statistics(graph))
    return Stage(modules, parts, recompute, enter[index], enter[index + 1], precision, stateful)


def boundary_examples(
    graph: OpGraph,
    resolved: dict[str, ResolvedBlock],
    names: list[str],
    dtypes: dict[str, torch.dtype],
    device: torch.device,
) -> tuple[torch.Tensor, ...]:
    """Empty local tensors like the named activations, as a stage receives or sends them.

    Args:
        dtypes: from :func:`activation_dtypes`.
    """
    examples = []
    for name in names:
        maker = next(r for r in resolved.values() if name in r.block.outputs)
        placed = maker.output_placements[maker.block.outputs.index(name)]
        node = graph.nodes[name]
        shape = local_shape(node.meta.shape, [(p, maker.sizes[a]) for a, p in placed.items()])
        examples.append(torch.empty(shape, dtype=dtypes[name], device=device, requires_grad=node.requires_grad))
    return tuple(examples)


def activation_dtypes(graph: OpGraph, precision: torch.dtype | None, device: torch.device) -> dict[str, torch.dtype]:
    """The dtype that each operator's first result has when the model runs.

    Args:
        precision: autocast dtype, or None for the captured dtypes.
    """
    captured = {n.name: n.meta.dtype for n in graph.nodes.values() if n.outputs}
    if precision is None:
        return captured
    found: dict[str, torch.dtype] = {}
    with FakeTensorMode(), torch.device(device), torch.autocast(device.type, precision):
        empty = {n.name: torch.empty(n.meta.shape, dtype=n.meta.dtype) for n in graph.nodes.values() if n.outputs}

        def run(node: fx.Node) -> Any:
            if node.op != "call_function":
                return empty[node.name]
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n.name])
            return node.target(*args, **on_device(kwargs, device))  # type: ignore[operator]

        values: dict[str, Any] = {}
        for node in graph.fx_graph.nodes:
            if node.op != "output":
                values[node.name] = run(node)
                if isinstance(values[node.name], torch.Tensor):
                    found[node.name] = values[node.name].dtype
    return {**captured, **found}
