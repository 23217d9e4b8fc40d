"""The played timeline against closed forms, and what must hold of any schedule."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.schedules import PRICED, V_SHAPED
from autopar.cost.timeline import StageTime, play

seconds = st.floats(0.01, 10)


@given(st.integers(1, 8), st.integers(1, 20), seconds, seconds, st.sampled_from(["gpipe", "1f1b"]))
def test_equal_stages_take_the_closed_form(p: int, extra: int, f: float, b: float, schedule: str) -> None:
    """(m + p - 1)(f + b), for m >= p (Narayanan et al. 2021, section 2.2)."""
    m = p + extra
    played = play(schedule, p, 1, m, [StageTime(f, b)] * p)
    assert played.makespan_s == pytest.approx((m + p - 1) * (f + b))
    assert played.in_flight == tuple(m if schedule == "gpipe" else p - s for s in range(p))


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), seconds, seconds)
@settings(deadline=None)
def test_interleaving_divides_the_bubble(p: int, v: int, rounds: int, f: float, b: float) -> None:
    """(p - 1)(f + b) / v of bubble, with f and b of a whole rank (Narayanan et al. 2021, section 2.2)."""
    m = p * rounds
    played = play("interleaved_1f1b", p, v, m, [StageTime(f / v, b / v)] * (p * v))
    assert played.makespan_s == pytest.approx(m * (f + b) + (p - 1) * (f + b) / v)


@given(st.integers(2, 6), st.integers(0, 8), seconds)
def test_zb_v_has_next_to_no_bubble_where_all_passes_are_equal(p: int, extra: int, t: float) -> None:
    """Only the way of the first micro-batch to the rank remains (Qi et al. 2023, section 6)."""
    m = 2 * p + extra
    stages = [StageTime(t, 2 * t, weight_s=t)] * (2 * p)
    played = play("zbv", p, 2, m, stages)
    whole = play("1f1b", p, 1, m, [StageTime(2 * t, 4 * t)] * p)
    assert played.makespan_s - 6 * t * m <= (p + 1) * t + 1e-9
    assert played.makespan_s < whole.makespan_s


@given(st.integers(1, 6), st.integers(1, 10), seconds, seconds)
def test_one_rank_has_no_bubble(v: int, m: int, f: float, b: float) -> None:
    played = play("interleaved_1f1b", 1, v, m, [StageTime(f, b)] * v)
    assert played.makespan_s == pytest.approx(v * m * (f + b))


@st.composite
def runs(draw: st.DrawFn) -> tuple[str, int, int, int, list[StageTime]]:
    schedule = draw(st.sampled_from(PRICED))
    p = draw(st.integers(1, 5))
    v = 1 if schedule in ("gpipe", "1f1b") else 2 if schedule in V_SHAPED else draw(st.integers(1, 3))
    m = p * v * draw(st.integers(1, 3))
    times = draw(st.lists(st.tuples(seconds, seconds, seconds), min_size=p * v, max_size=p * v))
    return schedule, p, v, m, [StageTime(f, b, c, weight_s=b / 3) for f, b, c in times]


@given(runs(), st.floats(0, 0.9))
@settings(max_examples=150, deadline=None)
def test_faster_sends_or_passes_never_take_longer(
    run: tuple[str, int, int, int, list[StageTime]], factor: float
) -> None:
    *what, stages = run
    slow = play(*what, stages)
    wires = [StageTime(s.forward_s, s.backward_s, s.send_s * factor, s.weight_s) for s in stages]
    passes = [StageTime(s.forward_s * factor, s.backward_s, s.send_s, s.weight_s) for s in stages]
    assert play(*what, wires).makespan_s <= slow.makespan_s + 1e-9
    assert play(*what, passes).makespan_s <= slow.makespan_s + 1e-9


@given(runs())
@settings(max_examples=150, deadline=None)
def test_events_keep_the_order_of_the_chain(run: tuple[str, int, int, int, list[StageTime]]) -> None:
    schedule, p, v, m, stages = run
    played = play(schedule, p, v, m, stages)
    end = {e.action: e.end_s for e in played.events()}
    start = {e.action: e.start_s for e in played.events()}
    rank = {e.action.stage: e.rank for e in played.events()}
    assert played.makespan_s == max(end.values())
    for action, begun in start.items():
        kind, stage, i = action
        near = [a for a in start if a.micro_batch == i and a.stage == stage + (-1 if kind == "F" else 1)]
        before = [a for a in near if a.kind != "W" and (a.kind == "F") == (kind == "F")] if kind != "W" else []
        for a in before:
            wire = 0.0 if rank[a.stage] == rank[stage] else stages[min(a.stage, stage)].send_s
            assert begun >= end[a] + wire - 1e-9
    for r in range(p):  # one action at a time
        mine = [(e.start_s, e.end_s) for e in played.events() if e.rank == r]
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(mine))


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=6), st.integers(1, 8))
def test_a_stage_waits_for_those_before_it(times: list[tuple[float, float]], m: int) -> None:
    """The bound that the planner prunes with: t_0 + ... + t_(s-1) + m t_s, for every stage s."""
    stages = [StageTime(f, b) for f, b in times]
    for schedule in ("gpipe", "1f1b"):
        makespan = play(schedule, len(stages), 1, m, stages).makespan_s
        for s, (f, b) in enumerate(times):
            assert makespan >= sum(x + y for x, y in times[:s]) + m * (f + b) - 1e-9


def test_first_stage_has_no_gradients_of_inputs() -> None:
    """All its backward waits for the weights' pass, as torch runs it."""
    played = play("zbv", 2, 2, 4, [StageTime(1, 2, weight_s=1)] * 4)
    lengths = {e.action.kind: e.end_s - e.start_s for e in played.events() if e.action.stage == 0}
    assert lengths == {"F": 1, "I": 0, "W": 2}
