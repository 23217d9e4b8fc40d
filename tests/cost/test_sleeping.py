"""The simulator against real runs of torch.distributed.pipelining whose compute is sleep."""

from __future__ import annotations

import pytest

from autopar.cost.timeline import play
from tests.sleeping_pipeline import hop_s, measure, sleeping_stages


@pytest.mark.slow  # compares seconds, so wants a machine that does nothing else
@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("zbv", 2)])
def test_unequal_stages_take_what_they_take_in_torch(schedule: str, virtual: int) -> None:
    """Within 5%, wide enough for busy machines; bench_schedules.py prints all six schedules."""
    stages = sleeping_stages(4 * virtual, equal=False, send_s=hop_s(4))
    measured = measure(schedule, 4, virtual, 4, stages, repeats=2)
    assert play(schedule, 4, virtual, 4, stages).makespan_s == pytest.approx(measured, rel=0.05)
