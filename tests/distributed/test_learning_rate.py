"""Learning rates over a run, against torch's own schedulers and the definitions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from autopar.errors import InputError
from autopar.runtime.learning_rate import LearningRate

STEPS = 21


def optimizer() -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    return torch.optim.SGD([{"params": parameters[:1], "lr": 1.0}, {"params": parameters[1:], "lr": 0.1}])


def rates(optimizer: torch.optim.Optimizer, scheduler: Any, count: int) -> list[list[float]]:
    found = []
    for _ in range(count):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return found


def flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


def test_shapes_equal_torch() -> None:
    for shape, make in (
        ("cosine", lambda o: CosineAnnealingLR(o, STEPS - 1)),
        ("linear", lambda o: LinearLR(o, 1.0, 1e-12, STEPS - 1)),
    ):
        ours, theirs = optimizer(), optimizer()
        got = rates(ours, LearningRate(shape).scheduler(ours, 0, STEPS, 8), STEPS)
        assert flat(got) == pytest.approx(flat(rates(theirs, make(theirs), STEPS)), abs=1e-9)


def test_warm_up_floor_and_the_phases_of_wsd() -> None:
    rate = LearningRate("wsd", warmup_steps=4, decay_steps=5, floor=0.1)
    shares = [rate.share(step, STEPS) for step in range(STEPS)]
    assert shares[:5] == pytest.approx([0.25, 0.5, 0.75, 1, 1])
    assert shares[5:16] == pytest.approx([1] * 11)
    assert shares[16:] == pytest.approx([1 - 0.9 * k / 5 for k in range(1, 6)])
    for shape in ("linear", "cosine"):
        shares = [LearningRate(shape, warmup_steps=3, floor=0.2).share(s, STEPS) for s in range(STEPS)]
        assert max(shares) == shares[3] == pytest.approx(1)
        assert shares[3:] == sorted(shares[3:], reverse=True)
        assert shares[-1] == pytest.approx(0.2)


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "wsd"])
def test_going_on_from_a_step_gives_the_same_rates(shape: str) -> None:
    rate = LearningRate(shape, warmup_steps=3)
    whole, rest = optimizer(), optimizer()
    all_rates = rates(whole, rate.scheduler(whole, 0, STEPS, 8), STEPS)
    assert rates(rest, rate.scheduler(rest, 9, STEPS, 8), STEPS - 9) == all_rates[9:]


def test_the_rate_follows_the_global_batch() -> None:
    for scaling, factor in (("linear", 4.0), ("sqrt", 2.0)):
        own = optimizer()
        LearningRate(scaling=scaling, reference_batch=8).scheduler(own, 0, STEPS, 32)
        assert [g["lr"] for g in own.param_groups] == pytest.approx([factor, 0.1 * factor])


@pytest.mark.parametrize(
    "values",
    [
        {"shape": "cubic"},
        {"warmup_steps": -1},
        {"decay_steps": 0},
        {"floor": 2.0},
        {"floor": math.nan},
        {"scaling": "linear"},
        {"scaling": "cube", "reference_batch": 8},
        {"reference_batch": 8},
    ],
)
def test_settings_that_make_no_sense_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        LearningRate(**values)
