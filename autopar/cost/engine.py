"""Engine: the one place where operators, redistributions and blocks are priced; everything is cached by value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from autopar.cost.block import (
    BlockCost,
    boundary_bytes,
    collectives_of,
    saved_of,
    saved_outputs_of,
    workspace_of,
)
from autopar.cost.communication import CommunicationModel
from autopar.cost.compute import ComputeModel
from autopar.cost.fusion import chains
from autopar.cost.operators import PRODUCTS, SDPA, attributes_of, base_name
from autopar.cost.selective import after_last_saved, again
from autopar.cost.trainer import AUTOPAR, Trainer, whole_heads
from autopar.errors import PlanError
from autopar.hardware.cluster import Cluster
from autopar.hardware.topology import Group, group_of
from autopar.model.graph import Block, OpGraph, OpNode, TensorMeta
from autopar.plan import Layout, Mesh
from autopar.sharding.placement import R, local_shape
from autopar.sharding.redistribute import Conversion
from autopar.sharding.resolve import OUTPUT, ResolvedBlock, Step, axis_sizes, resolve
from autopar.sharding.rules import strategies
from autopar.sharding.strategy import Strategy

if TYPE_CHECKING:
    from autopar.cost.estimate import Estimate
    from autopar.plan import Plan

Seconds = tuple[float, float]  # forward, backward


class Engine:
    """Prices one model on one cluster in one precision.

    Args:
        graph_at: gives the captured model at a micro-batch size; in this precision, if the trainer uses autocast.
        cluster: with or without measured profiles.
        precision: ``fp32``, ``bf16``, ``fp16`` or ``fp8``.
        trainer: the program that runs the plan; unset, autopar's own runtime.
    """

    def __init__(
        self,
        graph_at: Callable[[int], OpGraph],
        cluster: Cluster,
        precision: str = "fp32",
        trainer: Trainer = AUTOPAR,
    ) -> None:
        self._graph_at, self.cluster, self.precision, self.trainer = graph_at, cluster, precision, trainer
        added = trainer.gradient_bytes if trainer.accumulates else None
        self.compute = ComputeModel(cluster.device, trainer.kernels, added)
        self.communication = CommunicationModel(cluster)
        self._graphs: dict[int, OpGraph] = {}
        self._operators: dict[tuple[int, str, tuple[tuple[str, int, Strategy], ...], int], Seconds] = {}
        self._blocks: dict[tuple[int, str, str, Mesh], BlockCost] = {}
        self._groups: dict[tuple[Mesh, str], Group] = {}
        self._bounds: dict[tuple[int, tuple[tuple[str, int], ...]], float] = {}

    def graph(self, micro_batch: int) -> OpGraph:
        """The model at a micro-batch size; captured once each."""
        if micro_batch not in self._graphs:
            self._graphs[micro_batch] = self._graph_at(micro_batch)
        return self._graphs[micro_batch]

    def group(self, mesh: Mesh, axis: str) -> Group:
        """The process group of an axis (``dp``: both data axes; ``dp_cp``: context too; ``world``: all)."""
        key = (mesh, axis)
        if key not in self._groups:
            axes = {
                "world": ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
                "dp_cp": ("dp_replicate", "dp_shard", "cp"),
            }.get(axis, (axis,))
            self._groups[key] = group_of(self.cluster, mesh, axes)
        return self._groups[key]

    # --- operators and redistributions ----------------------------------------------------------------------------

    def operator_cost(self, graph: OpGraph, node: OpNode, chosen: dict[str, Strategy], mesh: Mesh) -> Seconds:
        """Seconds of one operator on its local shards, forward and backward, without the collectives inside it."""
        sizes = axis_sizes(mesh)
        active = tuple((a, sizes[a], s) for a, s in chosen.items() if sizes.get(a, 1) > 1 and not s.is_replicated)
        spread = mesh.cp if self.trainer.local_sequence and SDPA in node.op else 1
        key = (graph.batch_size, node.name, active, spread)
        if key not in self._operators:
            self._operators[key] = self._time_operator(graph, node, active, spread)
        return self._operators[key]

    def _time_operator(
        self, graph: OpGraph, node: OpNode, active: tuple[tuple[str, int, Strategy], ...], spread: int
    ) -> Seconds:
        if not node.outputs:
            return 0.0, 0.0
        split = math.prod(size for _, size, _ in active)
        ins = []
        forward = backward = 0.0
        for i, name in enumerate(node.inputs):
            meta = graph.nodes[name].meta
            if len(graph.nodes[name].outputs) == 1:
                meta = TensorMeta(local_shape(meta.shape, [(s.inputs[i], n) for _, n, s in active]), meta.dtype)
            if node.reads and node.reads[i].dtype != meta.dtype:
                turned = TensorMeta(meta.shape, node.reads[i].dtype)
                seconds = self.compute.memory_time(meta.nbytes + turned.nbytes, "copy")
                forward += seconds
                backward += seconds if graph.nodes[name].requires_grad else 0.0
                meta = turned
            ins.append(meta)
        outs = [TensorMeta(local_shape(m.shape, [(s.output, n) for _, n, s in active]), m.dtype) for m in node.outputs]
        precision = self._precision_of(ins)
        if spread > 1:
            ins, outs = whole_heads(ins, spread), whole_heads(outs, spread)
        attributes = attributes_of(graph.fx_node(node.name))
        price = self.compute.operator_time
        forward += price(node.op, ins, outs, node.forward_flops / split, "forward", precision, attributes)
        if not node.requires_grad:
            return forward, 0.0
        backward += price(node.op, ins, outs, node.backward_flops / split, "backward", precision, attributes)
        return forward, backward

    def _precision_of(self, operands: Sequence[TensorMeta]) -> str:
        """What an operator computes in: under autocast its operands say so."""
        wide = any(m.dtype.is_floating_point and m.dtype.itemsize > 2 for m in operands)
        return "fp32" if self.trainer.autocast and wide else self.precision

    def internal_cost(self, strategy: Strategy, axis: str, mesh: Mesh) -> Seconds:
        """Seconds of the collectives that an operator makes inside itself."""
        times = {"forward": 0.0, "backward": 0.0}
        for one in strategy.internal:
            nbytes = math.prod(one.shape) * one.itemsize
            times[one.direction] += self.communication.collective_time(one.kind, nbytes, self.group(mesh, axis))
        return times["forward"], times["backward"]

    def conversion_cost(self, step: Step, itemsize: int, mesh: Mesh) -> Seconds:
        """Seconds of one redistribution forward and backward: its collectives and the copies around them."""
        nbytes = math.prod(step.shape) * itemsize
        return self._move_time(step.conversion, "forward", nbytes, step.axis, mesh), self._move_time(
            step.conversion, "backward", nbytes, step.axis, mesh
        )

    def _move_time(self, conversion: Conversion, direction: str, nbytes: int, axis: str, mesh: Mesh) -> float:
        kind = conversion.forward if direction == "forward" else conversion.backward
        if kind:
            packed = (
                0.0 if not self.trainer.packs else self.compute.memory_time(2 * nbytes, "copy")
            )  # shards are packed or unpacked around the wire
            return self.communication.collective_time(kind, nbytes, self.group(mesh, axis)) + packed
        sliced = (direction == "forward" and conversion.src == R and conversion.dst.is_shard) or (
            direction == "backward" and conversion.requires_grad and conversion.dst == R and conversion.src.is_shard
        )
        if sliced and not (direction == "backward" and conversion.grad_partial):
            return self.compute.memory_time(2 * nbytes / getattr(mesh, axis), "copy")
        return 0.0

    # --- blocks -----------------------------------------------------------------------------------------------------

    def block_cost(self, graph: OpGraph, block: Block, layout: Layout, mesh: Mesh) -> BlockCost:
        """The cost of a block; blocks of one kind under one layout are priced once.

        Raises:
            PlanError: the layout is not possible for the block.
        """
        key = (graph.batch_size, block.kind, layout.model_dump_json(), mesh)
        if key not in self._blocks:
            self._blocks[key] = self._price_block(graph, resolve(graph, block, layout, mesh), mesh)
        return self._blocks[key]

    def _price_block(self, graph: OpGraph, resolved: ResolvedBlock, mesh: Mesh) -> BlockCost:
        forward = backward = 0.0
        communication: dict[tuple[str, str], float] = {}

        def add(axis: str, cost: Seconds) -> None:
            for direction, seconds in zip(("forward", "backward"), cost, strict=True):
                communication[axis, direction] = communication.get((axis, direction), 0.0) + seconds

        fused = chains(graph, resolved) if self.trainer.fused_pointwise else []
        inside = frozenset(name for chain in fused for name in chain.nodes)
        unneeded = after_last_saved(graph, resolved) if self.trainer.early_stop else frozenset()
        skipped = 0.0
        unsent: dict[str, float] = {}
        for chain in fused:
            if unneeded.issuperset(chain.nodes):
                skipped += self.compute.memory_time(chain.forward_bytes)
            forward += self.compute.memory_time(chain.forward_bytes)
            backward += self.compute.memory_time(chain.backward_bytes) if chain.backward_bytes else 0.0
        remade = again(graph, resolved)
        recompute_s = 0.0
        for name, chosen in resolved.strategies.items():
            f, b = self.operator_cost(graph, graph.nodes[name], chosen, mesh)
            recompute_s += f * remade.get(name, 0.0)
            if "cross_entropy" in graph.nodes[name].op and self.trainer.metric_bytes:
                forward += self._metrics(graph, resolved, name)
            if name not in inside:
                forward, backward = forward + f, backward + b
                skipped += f if name in unneeded else 0.0
            for way, seconds in self._exchanges(graph, resolved, name, mesh):
                communication[way, "forward"] = communication.get((way, "forward"), 0.0) + seconds
                communication[way, "backward"] = communication.get((way, "backward"), 0.0) + seconds
            for axis, strategy in chosen.items():
                if strategy.internal:
                    add(axis, self.internal_cost(strategy, axis, mesh))
        for edge in resolved.edges:
            unused = all(name in unneeded or name == OUTPUT for name, _ in edge.consumers)
            for step in edge.steps:
                cost = self.conversion_cost(step, graph.nodes[edge.producer].meta.dtype.itemsize, mesh)
                add(step.axis, cost)
                if unused and self.trainer.early_stop:
                    unsent[step.axis] = unsent.get(step.axis, 0.0) + cost[0]
        norms = self.trainer.fused_norms
        stored, narrow = self.trainer.regathers, self.precision == "fp8" and self.trainer.keeps_fp8
        kept = saved_of(graph, resolved, fused=inside, fused_norms=norms, regathers=stored, narrow_products=narrow)
        less = saved_of(
            graph, resolved, frozenset(n for n, part in remade.items() if part == 1.0), inside, norms, stored
        )
        block = resolved.block
        of_inputs = {name: sum(n for (s, _), n in kept.items() if s == f"{name}.0") for name in block.inputs}
        ins, outs = boundary_bytes(graph, resolved)
        elements, frozen = self._parameters(graph, resolved)
        return BlockCost(
            forward_s=forward,
            backward_s=backward,
            communication_s=communication,
            saved_bytes=sum(kept.values()) - sum(of_inputs.values()),
            saved_input_bytes=tuple(of_inputs[name] for name in block.inputs),
            input_bytes=ins,
            output_bytes=outs,
            saved_outputs=saved_outputs_of(graph, resolved, kept),
            parameter_elements=elements,
            frozen_bytes=frozen,
            step_reduction_bytes=self._step_reductions(graph, resolved),
            workspace_bytes=workspace_of(graph, resolved),
            collectives=collectives_of(graph, resolved),
            weight_s=self._weight_time(graph, resolved, mesh),
            recompute_s=recompute_s,
            recompute_bytes=sum(kept.values()) - sum(less.values()),
            expert=self._experts(graph, resolved),
            weights=self._weights(graph, resolved, elements),
            replay_s=forward - skipped,
            replay_communication_s={
                axis: seconds - unsent.get(axis, 0.0)
                for (axis, way), seconds in communication.items()
                if way == "forward"
            },
        )

    def _exchanges(self, graph: OpGraph, resolved: ResolvedBlock, name: str, mesh: Mesh) -> list[tuple[str, float]]:
        """Context- and expert-parallel collectives around one operator, for graphs that hold one shard."""
        node = graph.nodes[name]
        found: list[tuple[str, float]] = []
        if mesh.cp > 1 and self.trainer.local_sequence and SDPA in node.op:
            group = self.group(mesh, "cp")
            sizes = []
            for i, operand in enumerate(node.inputs[:3]):
                chosen = resolved.strategies[name]
                split = [(s.inputs[i], resolved.sizes[a]) for a, s in chosen.items()]
                meta = graph.nodes[operand].meta
                sizes.append(math.prod(local_shape(meta.shape, split)) * meta.dtype.itemsize * mesh.cp)
            if self.trainer.local_sequence == "ring":
                # keys and values travel while attention computes on those at hand
                beside = self.operator_cost(graph, node, resolved.strategies[name], mesh)[0]
                passing = self.communication.collective_time("all_gather", sizes[1] + sizes[2], group)
                found.append(("cp", max(passing / mesh.cp, passing - beside)))
            else:
                sizes.append(sizes[0])  # the result is as large as the queries
                found.extend(("cp", self.communication.collective_time("all_to_all", n, group)) for n in sizes)
        if mesh.ep > 1 and "_grouped_mm" in node.op:
            nbytes = node.meta.numel // node.meta.shape[-1] * node.meta.dtype.itemsize
            inner, outer = graph.nodes[node.inputs[0]].meta.shape[-1], node.meta.shape[-1]
            hidden = resolved.block.outputs and graph.nodes[resolved.block.outputs[0]].meta.shape[-1]
            if hidden in (inner, outer):  # tokens arrive at the first product and leave after the last
                whole = nbytes * hidden * mesh.ep
                found.append(("ep", self.communication.collective_time("all_to_all", whole, self.group(mesh, "ep"))))
        return found

    def _metrics(self, graph: OpGraph, resolved: ResolvedBlock, name: str) -> float:
        split = [(s.inputs[0], resolved.sizes[a]) for a, s in resolved.strategies[name].items()]
        logits = math.prod(local_shape(graph.nodes[graph.nodes[name].inputs[0]].meta.shape, split))
        return self.compute.memory_time(logits * self.trainer.metric_bytes, "cross_entropy")

    def _weights(self, graph: OpGraph, resolved: ResolvedBlock, elements: tuple[int, ...]) -> tuple[int, ...]:
        """Matrices that products of a repeated block read; the head's result is freed before other gradients are."""
        block, found = resolved.block, []
        products = [graph.nodes[n] for n in block.nodes if base_name(graph.nodes[n].op) in PRODUCTS]
        read = {operand for node in products for operand in node.inputs}
        for name, count in zip(block.parameters, elements, strict=True):
            shape = graph.nodes[name].meta.shape
            if name in read and len(shape) >= 2 and graph.loss not in block.nodes:
                found.append(count // (shape[0] if len(shape) == 3 else 1))
        return tuple(found)

    def _experts(self, graph: OpGraph, resolved: ResolvedBlock) -> tuple[bool, ...]:
        fed = {
            operand
            for name in resolved.block.nodes
            if "_grouped_mm" in graph.nodes[name].op
            for operand in graph.nodes[name].inputs
        }
        return tuple(name in fed for name in resolved.block.parameters)

    def _weight_time(self, graph: OpGraph, resolved: ResolvedBlock, mesh: Mesh) -> float:
        """Seconds of backward that give gradients of parameters: half of a product (both its products have the same
        FLOPs), all of an operator whose other operands carry no gradient (an embedding)."""
        total = 0.0
        for name, chosen in resolved.strategies.items():
            node = graph.nodes[name]
            carriers = [graph.nodes[i].kind for i in node.inputs if graph.nodes[i].requires_grad]
            if "parameter" not in carriers:
                continue
            if set(carriers) == {"parameter"}:
                total += self.operator_cost(graph, node, chosen, mesh)[1]
            elif base_name(node.op) in PRODUCTS:
                total += self.operator_cost(graph, node, chosen, mesh)[1] / 2
        return total

    def _parameters(self, graph: OpGraph, resolved: ResolvedBlock) -> tuple[tuple[int, ...], int]:
        elements, frozen = [], 0
        for name in resolved.block.parameters:
            node = graph.nodes[name]
            placed = resolved.parameter_placements[name].items()
            local = math.prod(local_shape(node.meta.shape, [(p, resolved.sizes[a]) for a, p in placed]))
            elements.append(local if node.requires_grad else 0)
            frozen += 0 if node.requires_grad else local * node.meta.dtype.itemsize
        return tuple(elements), frozen

    def _step_reductions(self, graph: OpGraph, resolved: ResolvedBlock) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, axis in resolved.step_reductions:
            placed = resolved.parameter_placements[name].items()
            shape = local_shape(graph.nodes[name].meta.shape, [(p, resolved.sizes[a]) for a, p in placed])
            found[axis] = found.get(axis, 0) + 4 * math.prod(shape)
        return found

    # --- whole plans --------------------------------------------------------------------------------------------------

    def estimate(self, plan: Plan) -> Estimate:
        """Predicts step time and memory of a plan; the same plan always gives the same numbers.

        Raises:
            PlanError: the plan does not go with the model.
        """
        from autopar.cost.estimate import estimate_plan

        return estimate_plan(self, plan)

    def lower_bound(self, mesh: Mesh, micro_batch: int, micro_batches: int) -> float:
        """Seconds that no plan of this mesh and micro-batch can beat: the compute of the cheapest strategies, spread
        evenly over the stages, without any communication, bubble or optimizer."""
        key = (micro_batch, tuple(axis_sizes(mesh).items()))
        if key not in self._bounds:
            graph = self.graph(micro_batch)
            self._bounds[key] = sum(self._cheapest(graph, node, mesh) for node in graph.of_kind("op"))
        return self._bounds[key] * micro_batches / mesh.pp

    def _cheapest(self, graph: OpGraph, node: OpNode, mesh: Mesh) -> float:
        sizes = axis_sizes(mesh)
        if len(sizes) > 1:  # any combination over the axes is at best a split over their product, if that is legal
            return self._cheapest_product(graph, node, mesh)
        axis = next(iter(sizes), "tp")
        options = strategies(graph, node, sizes.get(axis, 1))
        return min(sum(self.operator_cost(graph, node, {axis: s}, mesh)) for s in options)

    def _cheapest_product(self, graph: OpGraph, node: OpNode, mesh: Mesh) -> float:
        sizes = axis_sizes(mesh)
        best = math.inf
        combinations: list[dict[str, Strategy]] = [{}]
        for axis, size in sizes.items():
            combinations = [{**c, axis: s} for c in combinations for s in strategies(graph, node, size)]
        for chosen in combinations:
            try:
                best = min(best, sum(self.operator_cost(graph, node, chosen, mesh)))
            except PlanError:  # the axes together split a dimension too far
                continue
        return best
