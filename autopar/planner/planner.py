"""The driver: candidates in the order of their lower bounds, until none left can be among the best."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.cost.engine import Engine
from autopar.errors import NoPlanFits
from autopar.hardware.cluster import Cluster
from autopar.model.capture import capture
from autopar.model.spec import TrainingJob
from autopar.plan import Mesh, Plan
from autopar.planner.candidate import LEVELS, Evaluator, Priced
from autopar.planner.space import Candidate, Pins, candidates, check_pins, check_settings, divisors, meshes
from autopar.units import format_bytes, format_seconds

Baseline = tuple[str, Plan | None, str]
Progress = Callable[[int, int, str], None]
_Bounded = tuple[float, int, int, Candidate]  # bound, its level, order, candidate


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        plans: best first; of each mesh the best plan only.
        lower_bound_s: no plan of the searched space takes fewer seconds a step.
        baselines: (name, plan or None, why not).
        rejected: (candidate in words, reason) of what was looked at and does not fit.
        complete: the whole space was covered; False where the time limit cut it short.
    """

    plans: list[Plan]
    lower_bound_s: float
    search_time_s: float
    baselines: list[Baseline] = field(default_factory=list)
    rejected: list[tuple[str, str]] = field(default_factory=list)
    complete: bool = True


def search(
    job: TrainingJob,
    cluster: Cluster,
    global_batch: int,
    precision: str = "fp32",
    pins: Mapping[str, Any] | None = None,
    top: int = 5,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """The best plans to train a model on a cluster.

    Args:
        job: from :func:`autopar.load`.
        global_batch: samples per optimizer step, over all devices.
        precision: fp32, bf16, fp16 or fp8.
        pins: choices to keep, by key (``tp``, ``dp``, ``micro_batch``, ``schedule``, ...).
        top: how many plans to return at most.
        time_limit_s: the best found until then are returned, with the bound as proven by then.
        progress: called with candidates done, candidates in all, and the current one in words.

    Raises:
        InputError: a setting or a pin cannot hold.
        CaptureError, ModelError: the model cannot be captured.
        NoPlanFits: every plan needs more memory than a device has.
    """
    check_settings(global_batch, precision, top, cluster, time_limit_s)
    checked = check_pins(pins or {}, cluster.devices, global_batch)
    return _Search(job, cluster, global_batch, precision, top, time_limit_s, progress).run(checked)


class _Search:
    def __init__(
        self,
        job: TrainingJob,
        cluster: Cluster,
        global_batch: int,
        precision: str,
        top: int,
        time_limit_s: float | None,
        progress: Progress | None,
    ) -> None:
        self.cluster, self.global_batch, self.top = cluster, global_batch, top
        self.engine = Engine(lambda batch: capture(job, batch, cluster.device.kind, precision), cluster, precision)
        self.evaluator = Evaluator(self.engine, job, global_batch)
        self.progress = progress or (lambda done, total, what: None)
        self.started = time.perf_counter()
        self.deadline = math.inf if time_limit_s is None else self.started + time_limit_s

    def run(self, pins: Pins) -> SearchResult:
        every = list(candidates(self.cluster.devices, self.global_batch, pins))
        pool = _Pool(self.top)
        bound, complete = self._branch(every, pins, pool)
        if not pool.fitting:
            raise self._nothing_fits(pins, pool)
        best = pool.ranked()
        bound = min(bound, best[0].seconds)
        baselines = self._baselines(pins)
        seconds = time.perf_counter() - self.started
        plans = [self._finished(priced, bound, seconds, pins, complete) for priced in best]
        return SearchResult(
            plans,
            bound,
            seconds,
            [
                (n, None if p is None else self._finished(p, None, seconds, Pins(), True), why)
                for n, p, why in baselines
            ],
            pool.rejected(),
            complete,
        )

    def _branch(self, every: Sequence[Candidate], pins: Pins, pool: _Pool) -> tuple[float, bool]:
        """Evaluates candidates until bounds rule out the rest.

        Returns:
            The least bound over all candidates, and whether all were covered.
        """
        possible = [c for c in every if self.evaluator.may_fit(c)]
        queue = [(self.evaluator.bound(c, 0, pins), 0, i, c) for i, c in enumerate(possible or every)]
        total, done = len(queue), 0
        heapq.heapify(queue)
        proven = math.inf
        while queue:
            bound, level, order, candidate = self._next(queue, pool)
            if math.isinf(bound):  # fewer blocks than stages
                continue
            if bound >= pool.cutoff():
                return min(proven, bound), True
            if time.perf_counter() > self.deadline and pool.fitting:
                return min(proven, bound, *(other[0] for other in queue)), False
            self.progress(done, total, self._status(candidate, pool, min(proven, bound)))
            if level < LEVELS:
                tighter = max(bound, self.evaluator.bound(candidate, level + 1, pins))
                heapq.heappush(queue, (tighter, level + 1, order, candidate))
                continue
            done += 1
            fitted = False
            for priced in self.evaluator.plans(candidate, pins, pool.cutoff()):
                pool.add(candidate, priced)
                fitted |= priced.excess_bytes <= 0
            if fitted:  # what does not fit at all bounds nothing
                proven = min(proven, bound)
        return proven, True

    def _next(self, queue: list[_Bounded], pool: _Pool) -> _Bounded:
        """The least bound; when a quarter of the time is gone without any plan, what is nearest to giving one."""
        late = time.perf_counter() - self.started > (self.deadline - self.started) / 4
        if not late or pool.fitting:
            return heapq.heappop(queue)
        best = min(queue, key=lambda item: (-item[1], item[0], item[2]))
        queue.remove(best)
        heapq.heapify(queue)
        return best

    def _status(self, candidate: Candidate, pool: _Pool, bound: float) -> str:
        """What is looked at, the best step so far and the bound on all plans."""
        if not pool.fitting:
            return describe(candidate)
        return f"{describe(candidate)}; best {format_seconds(pool.ranked()[0].seconds)}, bound {format_seconds(bound)}"

    def _baselines(self, pins: Pins) -> list[tuple[str, Priced | None, str]]:
        """What a person would try first, each at its best micro-batch and recomputation."""
        devices, inside = self.cluster.devices, self.cluster.devices_per_node
        if devices == 1:
            return []
        tp = math.gcd(devices, inside)
        named = [
            ("data", {"dp_replicate": devices}),
            ("FSDP", {"dp_shard": devices}),
            ("tensor", {"tp": tp, "dp_replicate": devices // tp}),
            ("pipeline", {"pp": devices}),
        ]
        found = [(name, *self._baseline(Pins(axes))) for name, axes in named]
        return [*found, *self._megatron(tp)]

    def _megatron(self, tp: int) -> list[tuple[str, Priced | None, str]]:
        """Tensor parallel within nodes, the shortest pipeline over nodes that fits, data parallel over the rest
        (Narayanan et al. 2021, arXiv 2104.04473, takeaways 1 and 2); nothing where there is one node."""
        rest = self.cluster.devices // tp
        best: tuple[Priced | None, str] | None = None
        for pp in divisors(rest)[1:]:
            best = self._baseline(Pins({"tp": tp, "pp": pp, "dp_replicate": rest // pp}))
            if best[0] is not None:
                break
        return [] if best is None else [("Megatron", *best)]

    def _baseline(self, pins: Pins) -> tuple[Priced | None, str]:
        if time.perf_counter() > self.deadline:
            return None, "not looked at within the time limit"
        every = list(candidates(self.cluster.devices, self.global_batch, pins))
        if not every:
            (mesh, *_) = (m for m in meshes(self.cluster.devices, pins) if pins.allow_mesh(m))
            return None, f"batch {self.global_batch} not divisible by {mesh.dp}"
        blocks = len(self.engine.graph(every[0].micro_batch).blocks)
        if every[0].mesh.pp > blocks:
            return None, f"{blocks} blocks for {every[0].mesh.pp} stages"
        pool = _Pool(1)
        self._branch(every, pins, pool)
        if pool.fitting:
            return pool.ranked()[0], ""
        near = pool.nearest()
        if near is None:
            return None, "no schedule can run it"
        return None, f"needs {format_bytes(near.estimate.peak_reserved)} of {format_bytes(near.estimate.memory_limit)}"

    def _nothing_fits(self, pins: Pins, pool: _Pool) -> NoPlanFits:
        near = pool.nearest()
        if near is None:
            return NoPlanFits("no plan can run with these pins", f"Leave one out: {pins.text()}")
        limit = near.estimate.memory_limit
        what = (
            f"no plan fits in memory: the nearest ({describe_plan(near.plan)}) needs "
            f"{format_bytes(near.estimate.peak_reserved)} per device, {format_bytes(near.excess_bytes)} more than the "
            f"{format_bytes(limit)} of {self.cluster.name!r}"
        )
        for key in pins.named():
            looser, rest = pins.without(key), _Pool(1)
            self._branch(list(candidates(self.cluster.devices, self.global_batch, looser)), looser, rest)
            if rest.fitting:
                return NoPlanFits(what, f"Without the pin {key} it fits: {describe_plan(rest.ranked()[0].plan)}")
        needed = format_bytes(near.estimate.peak_reserved + self.cluster.memory_reserve_bytes)
        return NoPlanFits(what, f"Devices with {needed} would do; more devices or a smaller model need less on each")

    def _finished(self, priced: Priced, bound: float | None, seconds: float, pins: Pins, complete: bool) -> Plan:
        gap = None if bound is None else priced.seconds / bound - 1 if bound > 0 else None
        estimate = {**priced.estimate.to_json(), "optimality_gap": gap, "search_time_s": seconds}
        settings = {
            "pins": pins.named(),
            "lower_bound_s": bound,
            "search_time_s": seconds,
            "complete": complete,
        }
        return priced.plan.model_copy(update={"estimate": estimate, "optimality_gap": gap, "search": settings})


class _Pool:
    """The best plan of each candidate so far, and the nearest miss.

    Args:
        top: how many meshes count as the best.
    """

    def __init__(self, top: int) -> None:
        self.top = top
        self.fitting: dict[Candidate, Priced] = {}
        self.missing: dict[Candidate, Priced] = {}

    def add(self, candidate: Candidate, priced: Priced) -> None:
        """Keeps a plan if it is the best of its candidate."""
        if priced.excess_bytes <= 0:
            known = self.fitting.get(candidate)
            if known is None or priced.seconds < known.seconds:
                self.fitting[candidate] = priced
            return
        known = self.missing.get(candidate)
        if known is None or priced.excess_bytes < known.excess_bytes:
            self.missing[candidate] = priced

    def cutoff(self) -> float:
        """Seconds that a plan must beat to be among the best."""
        best = self.ranked()
        return best[self.top - 1].seconds if len(best) >= self.top else math.inf

    def ranked(self) -> list[Priced]:
        """The best of each mesh, fastest first; equally fast ones by memory, then by mesh."""
        key = lambda p: (p.seconds, p.estimate.peak_reserved, p.plan.mesh.describe(), p.plan.micro_batch)  # noqa: E731
        of_mesh: dict[Mesh, Priced] = {}
        for priced in sorted(self.fitting.values(), key=key):
            of_mesh.setdefault(priced.plan.mesh, priced)
        return list(of_mesh.values())[: self.top]

    def nearest(self) -> Priced | None:
        """What misses the memory limit by least."""
        return min(self.missing.values(), key=lambda p: p.excess_bytes, default=None)

    def rejected(self) -> list[tuple[str, str]]:
        """Candidates that do not fit, in words."""
        return [
            (describe(candidate), f"needs {format_bytes(priced.estimate.peak_reserved)} per device")
            for candidate, priced in self.missing.items()
            if candidate not in self.fitting
        ]


def describe(candidate: Candidate) -> str:
    """A candidate in words."""
    return f"{candidate.mesh.describe()}, micro-batches {candidate.micro_batches} x {candidate.micro_batch}"


def describe_plan(plan: Plan) -> str:
    """A plan in words."""
    kinds = {b.recompute for b in plan.blocks}
    recompute = kinds.pop() if len(kinds) == 1 else "mixed"
    return f"{plan.mesh.describe()}, micro-batch {plan.micro_batch}, recompute {recompute}"
