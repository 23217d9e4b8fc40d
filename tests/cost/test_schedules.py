"""Schedules: the same orders as torch.distributed.pipelining, complete, and free of deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.cost.schedules import PRICED, V_SHAPED, Action, actions, rank_of_stage, stages_of_rank
from autopar.cost.timeline import StageTime, play
from autopar.errors import PlanError

TORCH: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
SHAPES = [(2, 4), (2, 5), (3, 6), (4, 8), (4, 11), (4, 16), (5, 3), (8, 32)]


def virtuals(schedule: str) -> tuple[int, ...]:
    return (1,) if schedule in ("gpipe", "1f1b") else (2,) if schedule in V_SHAPED else (1, 2, 3)


CASES = [(s, p, v, m) for s in PRICED for p, m in SHAPES for v in virtuals(s)]


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """One of so many processes, the others of which answer nothing and keep nobody waiting."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def stage_of(index: int, count: int) -> PipelineStage:
    example = torch.zeros(1, 4)
    device = torch.device("cpu")
    return PipelineStage(torch.nn.Linear(4, 4), index, count, device, input_args=example, output_args=example)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def plain(order: list[Any]) -> list[Action]:
    """Torch's actions without idle slots, overlapped pairs one after the other."""
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    passes = [one for action in order if action is not None for one in action.sub_actions or (action,)]
    return [
        Action(kinds[one.computation_type.name], one.stage_index, one.microbatch_index)
        for one in passes
        if one.computation_type.name in kinds
    ]


@pytest.mark.parametrize(("ranks", "micro_batches"), [c for c in SHAPES if c[0] <= c[1]])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_passes_alternate_as_in_torch(schedule: str, ranks: int, micro_batches: int) -> None:
    """Kinds alone: torch's table numbers the last rank's micro-batches of 1F1B from 1, though it runs them from 0."""
    with fake_world(0, ranks):
        theirs = TORCH[schedule](stage_of(0, ranks), micro_batches, loss_fn=loss_of)._get_pipeline_order()
    for rank, mine in enumerate(actions(schedule, ranks, 1, micro_batches)):
        assert [a.kind for a in mine] == [a.kind for a in plain(theirs[rank])]


@pytest.mark.parametrize("case", [c for c in CASES if c[0] not in ("gpipe", "1f1b")], ids=str)
def test_order_is_that_of_torch(case: tuple[str, int, int, int]) -> None:
    schedule, ranks, virtual, micro_batches = case
    with fake_world(0, ranks):
        stages = [stage_of(i, ranks * virtual) for i in stages_of_rank(schedule, 0, ranks, virtual)]
        try:
            theirs = TORCH[schedule](stages, micro_batches, loss_fn=loss_of).pipeline_order
        except ValueError:  # torch refuses these numbers
            with pytest.raises(PlanError):
                actions(*case)
            return
    mine = actions(*case)
    for rank in range(ranks):
        assert list(mine[rank]) == plain(theirs[rank])


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, int, int]:
    schedule = draw(st.sampled_from(PRICED))
    ranks = draw(st.integers(1, 8))
    virtual = draw(st.sampled_from(virtuals(schedule)))
    micro_batches = draw(st.integers(1, 24))
    if schedule.startswith("interleaved"):
        micro_batches = ranks * max(1, micro_batches // ranks)
    if schedule == "dualpipev":
        micro_batches = max(micro_batches, 2 * ranks)
    return schedule, ranks, virtual, micro_batches


@given(cases())
@settings(max_examples=150, deadline=None)
def test_every_pass_once_and_weights_after_inputs(case: tuple[str, int, int, int]) -> None:
    schedule, ranks, virtual, micro_batches = case
    for rank, queue in enumerate(actions(*case)):
        count = Counter(queue)
        assert set(count.values()) == {1}
        assert {a.stage for a in queue} == set(stages_of_rank(schedule, rank, ranks, virtual))
        place = {action: i for i, action in enumerate(queue)}
        for stage in stages_of_rank(schedule, rank, ranks, virtual):
            for i in range(micro_batches):
                whole = Action("B", stage, i) in place
                first = place[Action("B" if whole else "I", stage, i)]
                assert place[Action("F", stage, i)] < first
                assert whole == (Action("W", stage, i) not in place)
                assert whole or first < place[Action("W", stage, i)]


@given(cases(), st.floats(0, 2))
@settings(max_examples=100, deadline=None)
def test_every_schedule_runs_to_its_end(case: tuple[str, int, int, int], send: float) -> None:
    schedule, ranks, virtual, micro_batches = case
    stages = [StageTime(1.0, 2.0, send, weight_s=1.0)] * (ranks * virtual)
    played = play(schedule, ranks, virtual, micro_batches, stages)
    assert played.makespan_s >= max(played.busy_s) - 1e-9
    assert played.busy_s == pytest.approx([3.0 * virtual * micro_batches] * ranks)
    assert all(1 <= held <= micro_batches for held in played.in_flight)


def test_v_shape_ends_where_it_began() -> None:
    assert [rank_of_stage("zbv", s, 4) for s in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [rank_of_stage("interleaved_1f1b", s, 4) for s in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 2), ("gpipe", 2), ("zbv", 1), ("dualpipev", 3), ("x", 1)])
def test_refused(schedule: str, virtual: int) -> None:
    with pytest.raises(PlanError, match=schedule):
        actions(schedule, 2, virtual, 8)
