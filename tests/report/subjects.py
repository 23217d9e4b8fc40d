"""Subjects to show: plans of the small GPT, with the engine that prices them."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

from autopar.plan import Mesh
from autopar.report.subject import Subject, subject
from tests.cost.plans import drawn_plan, engine, gpt


@cache
def pipelined() -> Subject:
    """Two stages of tensor- and sharded-data-parallel blocks, with recomputation."""
    plan = drawn_plan(Mesh(pp=2, dp_shard=2, tp=2), Random(3), schedule="1f1b", recompute="full")
    return priced(plan, "pipelined")


@cache
def replicated() -> Subject:
    """Plain data parallelism."""
    return priced(drawn_plan(Mesh(dp_replicate=8), Random(1), recompute="none"), "replicated")


def priced(plan: Any, name: str = "plan") -> Subject:
    """A plan of the small GPT on eight GPUs; the captured graph is shared."""
    one = engine()
    return Subject(name, plan, one.cluster, one, one.estimate(plan))


def fresh() -> Subject:
    """Through the public way, capturing again."""
    return subject(gpt(), replicated().plan, engine().cluster)
