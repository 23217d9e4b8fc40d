"""Why not: the other choice is searched, and the loss is the difference of the two predictions."""

from __future__ import annotations

import pytest

from autopar.errors import InputError
from autopar.hardware.cluster import Cluster
from autopar.planner.planner import search
from autopar.report.language import Language
from autopar.report.subject import subject
from autopar.report.why import sentence, why_not
from tests.cost.plans import gpt


def test_what_another_choice_loses() -> None:
    cluster = Cluster.load("local-cpu-2")
    best = search(gpt(), cluster, 8, pins={"micro_batch": 2}, top=1).plans[0]
    about = subject(gpt(), best, cluster)
    answer = why_not(gpt(), about, "recompute=full")
    assert answer.plan is not None
    assert {block.recompute for block in answer.plan.blocks} == {"full"}
    assert answer.loss == pytest.approx(answer.plan.estimate["step_time_s"] / about.estimate.step_time_s - 1)
    assert answer.part_s == pytest.approx(
        answer.plan.estimate["breakdown"][answer.part] - about.estimate.breakdown[answer.part]
    )
    said = sentence(answer)
    assert said.startswith("Why not recompute=full? The best with it (")
    assert f"{answer.loss:.1%} longer" in said
    assert "重计算" not in said
    assert sentence(answer, Language("zh")).startswith("为什么不用 recompute=full？")


def test_the_plans_own_choice_and_impossible_ones() -> None:
    cluster = Cluster.load("local-cpu-2")
    pins = {"tp": 2, "micro_batch": 2, "recompute": "full"}
    about = subject(gpt(), search(gpt(), cluster, 8, pins=pins, top=1).plans[0], cluster)
    for kept in ("tp=2", "micro_batch=2", "recompute=full", "tp<=4"):
        assert sentence(why_not(gpt(), about, kept)) == f"Why not {kept}? The plan does that."
    better = why_not(gpt(), about, "recompute=none")
    assert better.loss < 0
    assert "It is better" in sentence(better)
    with pytest.raises(InputError, match="tp=3"):
        why_not(gpt(), about, "tp=3")
