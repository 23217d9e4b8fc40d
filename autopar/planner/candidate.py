"""One candidate of the outer search, all the way: layouts, stage cuts, schedules and recomputation, priced."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from autopar.cost.engine import Engine
from autopar.cost.estimate import Estimate
from autopar.cost.memory import FP32, OPTIMIZER_STATES, rank_memory
from autopar.hardware.topology import Group
from autopar.model.graph import OpGraph
from autopar.model.spec import TrainingJob
from autopar.plan import BlockPlan, ClusterRef, Layout, ModelRef, Plan
from autopar.planner.bound import fill
from autopar.planner.case import Case, trainable_elements
from autopar.planner.chain import Chain
from autopar.planner.chain_tables import ChainTables
from autopar.planner.elimination import TooLarge
from autopar.planner.inter import Cut
from autopar.planner.memory_policy import Line, fastest_lines
from autopar.planner.options import Option
from autopar.planner.space import Candidate, Pins, schedules_of
from autopar.sharding.resolve import axis_sizes

SMALLEST, BETWEEN = (
    100.0,
    (0.03, 0.3, 3.0),
)  # prices of memory, in the time that a byte takes on average
MOST_CUTS_PRICED = 24
LINES_PRICED = 3
LEVELS = 2

_InnerMesh = tuple[int, tuple[tuple[str, int], ...], tuple[Group, ...]]  # micro-batch, axes and where they lie
Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]
Precision = Literal["fp32", "bf16", "fp16", "fp8"]


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


class _Best:
    """The fastest plan of a candidate that fits, or what it must beat."""

    def __init__(self, cutoff: float) -> None:
        self.seconds, self.found = cutoff, False

    def seen(self, priced: Priced) -> Priced:
        """Notes a plan."""
        if priced.excess_bytes <= 0:
            self.seconds, self.found = min(self.seconds, priced.seconds), True
        return priced


class Evaluator:
    """Finds the best plans of candidates of one job on one cluster.

    Args:
        engine: prices everything.
        global_batch: samples per step.
    """

    def __init__(self, engine: Engine, job: TrainingJob, global_batch: int) -> None:
        self.engine, self.job, self.global_batch = engine, job, global_batch
        self._cases: dict[Candidate, Case] = {}
        self._tables: dict[_InnerMesh, ChainTables | None] = {}
        self._placed: dict[_InnerMesh, float] = {}
        self._first: OpGraph | None = None

    def bound(self, candidate: Candidate, level: int, pins: Pins) -> float:
        """A lower bound on the step time, the tighter and dearer the higher the level (up to :data:`LEVELS`).

        0: FLOPs at the peak rate, which grow with the samples; one capture tells them for all micro-batch sizes.
        1: operators and redistributions, parameters and memory for free; meshes whose inner axes lie alike share it.
        2: with parameters, whole blocks in every stage, and within memory.
        """
        if level == 0:
            return self._at_peak(candidate) * fill(candidate.mesh.pp, candidate.micro_batches)
        if level == 1:
            key = self._inner(candidate)
            if key not in self._placed:
                self._placed[key] = self._case(candidate).placed_bound()
            return self._placed[key] * fill(candidate.mesh.pp, candidate.micro_batches)
        modes = tuple(word == "full" for word in pins.options("recompute"))
        return self._case(candidate).step_bound(modes)

    def _at_peak(self, candidate: Candidate) -> float:
        """Seconds of one micro-batch through all stages, spread over the inner axes without loss."""
        flops = self._flops_per_sample(candidate) * candidate.micro_batch
        inner = candidate.mesh.cp * candidate.mesh.tp
        return flops / inner / self.engine.cluster.device.peak(self.engine.precision)

    def _any(self, candidate: Candidate) -> OpGraph:
        """The model at the first micro-batch size that was asked for."""
        if self._first is None:
            self._first = self.engine.graph(candidate.micro_batch)
        return self._first

    def _flops_per_sample(self, candidate: Candidate) -> float:
        graph = self._any(candidate)
        if "flops" not in graph.facts:
            graph.facts["flops"] = (graph.forward_flops + graph.backward_flops) / graph.batch_size
        return float(graph.facts["flops"])

    def may_fit(self, candidate: Candidate) -> bool:
        """Whether parameters alone, divided as far as the mesh can, leave room."""
        cluster, mesh = self.engine.cluster, candidate.mesh
        elements = trainable_elements(self._any(candidate))
        divided = mesh.pp * mesh.cp * mesh.tp * (mesh.dp_shard if candidate.zero_stage else 1)
        needed = FP32 * (2 + OPTIMIZER_STATES) * elements / divided * (1 + cluster.device.allocator_overhead_fraction)
        return needed + cluster.device.context_bytes <= cluster.memory_limit_bytes

    def plans(self, candidate: Candidate, pins: Pins, cutoff: float) -> Iterator[Priced]:
        """Plans of a candidate, those that do not fit included; memory is weighed until one fits.

        Args:
            cutoff: seconds; what cannot be faster need not be looked at.
        """
        case = self._case(candidate)
        modes = tuple(word == "full" for word in pins.options("recompute"))
        fastest = case.chain(0.0)
        best = _Best(cutoff)
        missed = math.inf
        if False in modes:
            for schedule, cut in self._shapes(case, pins, modes, best):
                priced = best.seen(self._price(self._plan(case, fastest.layouts, cut, schedule)))
                yield priced
                missed = min(missed, priced.seconds if priced.excess_bytes > 0 else math.inf)
            if missed >= best.seconds:
                return
        yield from self._within_memory(case, pins, modes, best)

    def _shapes(self, case: Case, pins: Pins, modes: Sequence[bool], best: _Best) -> Iterator[tuple[str, Cut]]:
        """Schedules and cuts that may beat the best so far."""
        for schedule in reversed(schedules_of(case.candidate, pins)):  # 1F1B holds the least
            for cut in case.cuts(schedule, modes)[:MOST_CUTS_PRICED]:
                if case.cut_bound(cut, schedule, modes) < best.seconds:
                    yield schedule, cut

    def _within_memory(self, case: Case, pins: Pins, modes: Sequence[bool], best: _Best) -> Iterator[Priced]:
        """The fastest mixes of layouts and recomputation that fit; if there is none, the smallest plan."""
        chains = [case.chain(0.0)]
        if case.sizes:
            chains.append(case.chain(SMALLEST, modes[-1]))
        yield from self._mixed(case, chains, pins, modes, best)
        if not best.found and math.isinf(best.seconds):
            smallest = chains[-1]
            for schedule in schedules_of(case.candidate, pins):
                for cut in case.cuts(schedule, modes)[:1] or [case.even_cut()]:
                    yield self._price(self._plan(case, smallest.layouts, cut, schedule, [modes[-1]] * len(case.blocks)))
        elif case.sizes and not case.is_small():
            chains += [case.chain(price) for price in BETWEEN]
            yield from self._mixed(case, chains, pins, modes, best)

    def _mixed(
        self, case: Case, chains: Sequence[Chain], pins: Pins, modes: Sequence[bool], best: _Best
    ) -> Iterator[Priced]:
        options = case.options(chains, modes)
        device, reserve = self.engine.cluster.device, self.engine.cluster.memory_limit_bytes
        for schedule, cut in self._shapes(case, pins, modes, best):
            in_flight = case.in_flight(schedule)
            shape = self._plan(case, chains[0].layouts, cut, schedule)

            def fits(
                stage: int,
                first: int,
                last: int,
                chosen: Sequence[Option],
                shape: Plan = shape,
                held: Sequence[int] = in_flight,
            ) -> bool:
                parts = case.parts(first, last, chosen)
                return rank_memory(shape, [(parts, held[stage])], device).reserved <= reserve

            count, limit = case.candidate.micro_batches, case.limit_bytes()
            lines = fastest_lines(case.blocks, cut, options, in_flight, limit, fits, case.send_seconds, count)
            for line in lines[:LINES_PRICED]:
                yield best.seen(self._price(self._of_line(case, line, cut, schedule)))

    def _of_line(self, case: Case, line: Line, cut: Cut, schedule: str) -> Plan:
        layouts = [option.layout for option in line.options]
        return self._plan(case, layouts, cut, schedule, [option.recompute for option in line.options])

    def _case(self, candidate: Candidate) -> Case:
        if candidate not in self._cases:
            key = self._inner(candidate)
            if key not in self._tables:
                self._tables[key] = self._table(candidate)
            self._cases[candidate] = Case(self.engine, candidate, self._tables[key])
        return self._cases[candidate]

    def _inner(self, candidate: Candidate) -> _InnerMesh:
        sizes = axis_sizes(candidate.mesh)
        groups = tuple(self.engine.group(candidate.mesh, axis) for axis in sizes)
        return candidate.micro_batch, tuple(sizes.items()), groups

    def _table(self, candidate: Candidate) -> ChainTables | None:
        try:
            return ChainTables(self.engine.graph(candidate.micro_batch), candidate.mesh, self.engine)
        except TooLarge:
            return None

    def _price(self, plan: Plan) -> Priced:
        return Priced(plan, self.engine.estimate(plan))

    def _plan(
        self, case: Case, chosen: Sequence[Layout], cut: Cut, schedule: str, recompute: Sequence[bool] = ()
    ) -> Plan:
        graph, cluster, candidate = case.graph, self.engine.cluster, case.candidate
        names, layouts = name_layouts(graph, chosen)
        again = recompute or [False] * len(names)
        return Plan(
            model=ModelRef(source=self.job.source, fingerprint=graph.fingerprint, parameters=graph.parameter_count),
            cluster=ClusterRef(name=cluster.name, devices=cluster.devices, source=cluster.source),
            global_batch=self.global_batch,
            mesh=candidate.mesh,
            stages=[graph.blocks[i].name for i in cut],
            blocks=[
                BlockPlan(name=b.name, layout=n, recompute="full" if r else "none")
                for b, n, r in zip(graph.blocks, names, again, strict=True)
            ],
            layouts=layouts,
            zero_stage=3 if candidate.zero_stage else 0,
            schedule=cast(Schedule, schedule),
            micro_batch=candidate.micro_batch,
            micro_batches=candidate.micro_batches,
            precision=cast(Precision, self.engine.precision),
        )


def name_layouts(graph: OpGraph, chosen: Sequence[Layout]) -> tuple[list[str], dict[str, Layout]]:
    """Names layouts by the kind of block, numbered where a kind has several; equal ones share a name."""
    names: list[str] = []
    layouts: dict[str, Layout] = {}
    for block, layout in zip(graph.blocks, chosen, strict=True):
        number, name = 1, block.kind
        while name in layouts and layouts[name] != layout:
            number += 1
            name = f"{block.kind}.{number}"
        layouts[name] = layout
        names.append(name)
    return names, layouts
