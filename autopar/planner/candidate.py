"""One candidate of the outer search, all the way: layouts, stage cuts, schedules and recomputation, priced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autopar.cost.engine import Engine
from autopar.cost.estimate import Estimate
from autopar.cost.memory import FP32, OPTIMIZER_STATES, Part
from autopar.model.graph import OpGraph
from autopar.model.spec import TrainingJob
from autopar.plan import BlockPlan, ClusterRef, Layout, Mesh, ModelRef, Plan
from autopar.planner.chain import Chain, ChainSolver, State
from autopar.planner.inter import BlockLoad, Cut, cuts
from autopar.planner.memory_policy import recompute_to_fit, with_recompute
from autopar.planner.parameters import StepCosts
from autopar.planner.space import Candidate, Pins, schedules_of
from autopar.sharding.placement import local_shape
from autopar.sharding.resolve import axis_sizes

PRICES = (0.01, 0.1, 1.0)  # of memory, as a share of the time per byte that the model takes in all
MOST_CUTS_PRICED = 24


@dataclass(frozen=True)
class Priced:
    """A plan with its estimate."""

    plan: Plan
    estimate: Estimate

    @property
    def seconds(self) -> float:
        return self.estimate.step_time_s

    @property
    def excess_bytes(self) -> int:
        """By how much the worst device exceeds its memory; not positive where it fits."""
        return self.estimate.peak_reserved - self.estimate.memory_limit


class Evaluator:
    """Finds the best plans of candidates of one job on one cluster.

    Args:
        engine: prices everything.
        global_batch: samples per step.
    """

    def __init__(self, engine: Engine, job: TrainingJob, global_batch: int) -> None:
        self.engine, self.job, self.global_batch = engine, job, global_batch
        self._solvers: dict[tuple[Candidate, float, bool], ChainSolver] = {}

    def bound(self, candidate: Candidate) -> float:
        """A quick lower bound on the step time: compute alone, filling and draining the pipeline included."""
        pp, count = candidate.mesh.pp, candidate.micro_batches
        one = self.engine.lower_bound(candidate.mesh, candidate.micro_batch, count) * pp / count
        return one * fill(pp, count)

    def tight_bound(self, candidate: Candidate) -> float:
        """A lower bound with redistributions, optimizer and gradient sums: the best of every block by itself."""
        solver = self._solver(candidate, 0.0, False)
        return max(self.bound(candidate), solver.lower_bound() * candidate.micro_batches / candidate.mesh.pp)

    def plans(self, candidate: Candidate, pins: Pins, cutoff: float) -> Iterator[Priced]:
        """Plans of a candidate, those that do not fit included; memory is priced until one fits.

        Args:
            cutoff: seconds; what cannot be faster need not be looked at.
        """
        plain = list(self._priced(candidate, pins, 0.0, cutoff))
        yield from plain
        if any(p.excess_bytes <= 0 and not _recomputes(p.plan) for p in plain) or not axis_sizes(candidate.mesh):
            return
        smallest = list(self._priced(candidate, pins, PRICES[-1], cutoff))
        yield from smallest
        if any(p.excess_bytes <= 0 for p in (*plain, *smallest)):
            for price in PRICES[:-1]:
                yield from self._priced(candidate, pins, price, cutoff)

    def _priced(self, candidate: Candidate, pins: Pins, price: float, cutoff: float) -> Iterator[Priced]:
        """Plans whose layouts weigh memory at a price, made for one or for two runs of the forward."""
        for recompute in (False, True) if price and "full" in pins.options("recompute") else (False,):
            yield from self._cut_and_schedule(candidate, self._chain(candidate, price, recompute), pins, cutoff)

    # --- layouts --------------------------------------------------------------------------------------------------

    def _solver(self, candidate: Candidate, price: float, recompute: bool) -> ChainSolver:
        key = (candidate, price, recompute)
        if key not in self._solvers:
            graph, mesh = self.engine.graph(candidate.micro_batch), candidate.mesh
            scale = FP32 * graph.parameter_count // mesh.pp // mesh.tp
            in_flight = min(mesh.pp, candidate.micro_batches)
            costs = StepCosts(self.engine, mesh, candidate.micro_batches, scale, in_flight)
            self._solvers[key] = ChainSolver(
                graph, mesh, self.engine, costs, candidate.micro_batches, price * self._unit(graph), recompute
            )
        return self._solvers[key]

    def _unit(self, graph: OpGraph) -> float:
        """Seconds per byte: the model's time over the bytes it keeps, whole."""
        seconds = sum(sum(self._whole(graph, name)) for name in graph.nodes)
        kept = sum(saved.meta.nbytes for node in graph.nodes.values() for saved in node.saved)
        return seconds / (kept + FP32 * (2 + OPTIMIZER_STATES) * graph.parameter_count + 1)

    def _whole(self, graph: OpGraph, name: str) -> tuple[float, float]:
        node = graph.nodes[name]
        return self.engine.operator_cost(graph, node, {}, Mesh()) if node.kind == "op" else (0.0, 0.0)

    def _chain(self, candidate: Candidate, price: float, recompute: bool, cut: Cut = (0,)) -> Chain:
        sends = self._send_seconds(candidate)
        return self._solver(candidate, price, recompute).best({start - 1: sends(start - 1) for start in cut[1:]})

    def _send_seconds(self, candidate: Candidate) -> Callable[[int], Callable[[State], float]]:
        """For a block after which a stage ends: seconds to send its outputs on and their gradients back."""
        graph, mesh = self.engine.graph(candidate.micro_batch), candidate.mesh
        sizes = self._solver(candidate, 0.0, False).sizes
        group = self.engine.group(mesh, "pp")

        def after(index: int) -> Callable[[State], float]:
            def seconds(state: State) -> float:
                total = 0.0
                for name, spec in zip(graph.blocks[index].outputs, state, strict=True):
                    meta = graph.nodes[name].meta
                    shape = local_shape(meta.shape, list(zip(spec, sizes.values(), strict=True)))
                    count = meta.dtype.itemsize
                    for extent in shape:
                        count *= extent
                    total += 2 * self.engine.communication.collective_time("send", count, group)
                return total

            return seconds

        return after

    # --- stages and schedules -------------------------------------------------------------------------------------

    def _cut_and_schedule(self, candidate: Candidate, chain: Chain, pins: Pins, cutoff: float) -> Iterator[Priced]:
        for schedule in schedules_of(candidate, pins):
            for cut in self._cuts(candidate, chain, schedule, pins):
                base = self._plan(candidate, chain, cut, schedule)
                first = self._price(base)
                if "none" in pins.options("recompute"):
                    yield first
                    if first.excess_bytes <= 0 or first.seconds >= cutoff:
                        continue
                if "full" in pins.options("recompute"):
                    yield self._recomputed(base, first, pins)

    def _cuts(self, candidate: Candidate, chain: Chain, schedule: str, pins: Pins) -> list[Cut]:
        if candidate.mesh.pp == 1:
            return [(0,)]
        pp, count = candidate.mesh.pp, candidate.micro_batches
        in_flight = [min(count, pp - s) if schedule == "1f1b" else count for s in range(pp)]
        limit = self.engine.cluster.memory_limit_bytes - self.engine.cluster.device.context_bytes
        limit = int(limit / (1 + self.engine.cluster.device.allocator_overhead_fraction))
        loads = self._loads(candidate, chain)
        found = cuts(loads, pp, count, in_flight, limit, "full" in pins.options("recompute"))
        return found[:MOST_CUTS_PRICED]

    def _loads(self, candidate: Candidate, chain: Chain) -> list[BlockLoad]:
        graph, mesh = self.engine.graph(candidate.micro_batch), candidate.mesh
        per_byte = StepCosts(self.engine, mesh, candidate.micro_batches, FP32 * graph.parameter_count // mesh.pp)
        group = self.engine.group(mesh, "pp")
        loads = []
        for block, layout in zip(graph.blocks, chain.layouts, strict=True):
            cost = self.engine.block_cost(graph, block, layout, mesh)
            elements = sum(cost.parameter_elements)
            once = FP32 * elements * per_byte.seconds_per_byte / candidate.micro_batches
            forward = cost.forward_s + cost.communication("forward")
            backward = cost.backward_s + cost.communication("backward")
            send = sum(2 * self.engine.communication.collective_time("send", n, group) for n in cost.output_bytes)
            held = elements / mesh.dp_shard if mesh.dp_shard > 1 else elements
            loads.append(
                BlockLoad(
                    seconds=forward + backward + once,
                    forward_s=forward,
                    send_s=send,
                    fixed_bytes=FP32 * (2 + OPTIMIZER_STATES) * held + cost.frozen_bytes,
                    saved_bytes=cost.saved_bytes + sum(cost.saved_input_bytes),
                    recomputed_bytes=sum(cost.input_bytes),
                )
            )
        return loads

    def _price(self, plan: Plan) -> Priced:
        return Priced(plan, self.engine.estimate(plan))

    def _recomputed(self, base: Plan, first: Priced, pins: Pins) -> Priced:
        """The cheapest recomputation that fits; all of it where none does, or where it is pinned."""
        everything = with_recompute(base, {b.name for b in base.blocks})
        if "none" not in pins.options("recompute"):
            return self._price(everything)
        graph = self.engine.graph(base.micro_batch)
        index = {b.name: b for b in graph.blocks}

        def part(block: BlockPlan) -> Part:
            own = index[block.name]
            return own, block, self.engine.block_cost(graph, own, base.layouts[block.layout], base.mesh)

        stages = [[part(b) for b in stage] for stage in base.stage_blocks()]
        held = first.estimate.timeline.in_flight
        pp = base.mesh.pp
        ranks = [[(stages[s], held[s]) for s in range(rank, len(stages), pp)] for rank in range(pp)]
        fitting = recompute_to_fit(base, ranks, self.engine.cluster.device, self.engine.cluster.memory_limit_bytes)
        return self._price(fitting or everything)

    # --- plans ----------------------------------------------------------------------------------------------------

    def _plan(self, candidate: Candidate, chain: Chain, cut: Cut, schedule: str) -> Plan:
        graph, cluster = self.engine.graph(candidate.micro_batch), self.engine.cluster
        names, layouts = name_layouts(graph, chain.layouts)
        return Plan(
            model=ModelRef(source=self.job.source, fingerprint=graph.fingerprint, parameters=graph.parameter_count),
            cluster=ClusterRef(name=cluster.name, devices=cluster.devices, source=cluster.source),
            global_batch=self.global_batch,
            mesh=candidate.mesh,
            stages=[graph.blocks[i].name for i in cut],
            blocks=[BlockPlan(name=b.name, layout=n) for b, n in zip(graph.blocks, names, strict=True)],
            layouts=layouts,
            zero_stage=3 if candidate.zero_stage else 0,
            schedule=schedule,  # type: ignore[arg-type]
            micro_batch=candidate.micro_batch,
            micro_batches=candidate.micro_batches,
            precision=self.engine.precision,  # type: ignore[arg-type]
        )


def _recomputes(plan: Plan) -> bool:
    return any(block.recompute != "none" for block in plan.blocks)


def fill(pp: int, micro_batches: int) -> float:
    """Least step time of a pipeline over the time of one micro-batch through all of it.

    Stage s waits for the stages before it on the way in and out and works on every micro-batch:
    ``step >= sum_{i<s} t_i + m t_s``. The stage times that level these give ``1 / (1 - (1 - 1/m)^pp)``.
    """
    return float(1.0 / (1.0 - (1.0 - 1.0 / micro_batches) ** pp))


def name_layouts(graph: OpGraph, chosen: Sequence[Layout]) -> tuple[list[str], dict[str, Layout]]:
    """Names layouts by the kind of block, numbered where a kind has several; equal ones share a name."""
    names: list[str] = []
    layouts: dict[str, Layout] = {}
    for block, layout in zip(graph.blocks, chosen, strict=True):
        number = 1
        name = block.kind
        while name in layouts and layouts[name] != layout:
            number += 1
            name = f"{block.kind}.{number}"
        layouts[name] = layout
        names.append(name)
    return names, layouts
