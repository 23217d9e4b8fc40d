"""Explanations add up to the estimate, and every predicted gain is that of re-estimating."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from random import Random

import pytest
from rich.console import Console

from autopar.cost.engine import Engine
from autopar.errors import InputError, PlanError
from autopar.plan import Mesh
from autopar.report.chinese import CHINESE
from autopar.report.compare import compare, compare_json, compare_table
from autopar.report.explain import explain, memory_parts
from autopar.report.explain_text import explanation
from autopar.report.language import Language
from autopar.report.subject import Subject, subject
from autopar.report.tables import plan_table, proof, why_it_wins
from autopar.report.what_if import faster_link, remedies
from tests.cost.plans import drawn_plan, engine, gpt
from tests.report.subjects import fresh, pipelined, priced, replicated

SUBJECTS = pytest.mark.parametrize("about", [pipelined(), replicated()], ids=lambda s: s.name)


@SUBJECTS
def test_time_adds_up(about: Subject) -> None:
    found = explain(about)
    assert sum(found.components.values()) == pytest.approx(about.estimate.step_time_s)
    busy = sum(row.total_s for row in found.kinds) + found.between_s
    assert busy == pytest.approx(sum(about.estimate.timeline.busy_s))
    assert found.between_s >= -1e-12
    assert sum(row.count for row in found.kinds) == len(about.plan.blocks) == sum(row.blocks for row in found.stages)
    for row in found.stages:
        assert row.forward_s + row.backward_s + row.idle_s == pytest.approx(about.estimate.timeline.makespan_s)


@SUBJECTS
def test_memory_adds_up(about: Subject) -> None:
    for rank, stage in enumerate(about.estimate.stages):
        assert sum(memory_parts(about, rank).values()) == stage.reserved


@SUBJECTS
def test_gains_are_re_estimates(about: Subject) -> None:
    found = remedies(about)
    assert [r.gain for r in found] == sorted((r.gain for r in found), reverse=True)
    assert {r.resource for r in found} == {"compute", "link", "memory", "batch"}
    for remedy in found:
        tokens = about.estimate.tokens * (2 if remedy.resource == "batch" else 1)
        assert remedy.gain == pytest.approx(tokens / remedy.step_time_s / about.tokens_per_s - 1)
    compute = next(r for r in found if r.resource == "compute")
    assert compute.step_time_s >= 0.5 * about.estimate.step_time_s
    saved = about.estimate.step_time_s - compute.step_time_s
    assert saved >= 0.4 * about.estimate.breakdown["compute"]


def test_more_memory_is_spent_on_what_memory_was_saved_by() -> None:
    memory = next(r for r in remedies(pipelined()) if r.resource == "memory")
    assert "no recomputation" in memory.where
    assert memory.gain > 0


def test_a_faster_link_halves_what_was_measured_on_it() -> None:
    cluster = replicated().cluster
    faster = faster_link(cluster, 0)
    assert faster.links[0].bandwidth == 2 * cluster.links[0].bandwidth
    assert replace(faster, links=cluster.links) == cluster


def test_the_slow_link_is_the_bottleneck() -> None:
    about = replicated()
    link = about.cluster.links[0]
    slow = replace(about.cluster, links=(replace(link, bandwidth=link.bandwidth / 1e4, in_switch=None),))
    slowed = Engine(about.engine.graph, slow)
    found = explain(Subject("slow", about.plan, slow, slowed, slowed.estimate(about.plan)))
    assert found.largest == "dp"
    assert found.bottleneck is not None
    assert (found.bottleneck.resource, found.bottleneck.where) == ("link", link.scope)


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_what_is_printed(lang: str) -> None:
    about = pipelined()
    console = Console(width=100, record=True, file=io.StringIO())
    for part in explanation(about, explain(about), Language(lang)):
        console.print(part)
    text = console.export_text()
    words = {
        "en": ("pipeline bubble", "The first bottleneck is", "Doubling compute speed", "dp_shard: node"),
        "zh": ("流水线气泡", "首要瓶颈是", "计算速度加倍", "dp_shard: node"),
    }
    assert all(word in text for word in words[lang]), text
    if lang == "zh":  # nothing is left in English but names and units
        rest = set(re.findall(r"[a-z]{4,}", text)) - {"shard", "node", "blocks", "embed", "head", "tokens"}
        assert not rest


def test_translations_keep_their_values() -> None:
    for english, chinese in CHINESE.items():
        assert sorted(re.findall(r"{\w+}", english)) == sorted(re.findall(r"{\w+}", chinese)), english
    with pytest.raises(InputError, match="'fr' is unknown"):
        Language("fr")


def test_compare() -> None:
    rows = {row.name: row for row in compare(replicated(), pipelined())}
    assert rows["mesh"].first == "dp=8"
    assert rows["mesh"].second == "pp=2 dp_shard=2 tp=2"
    assert rows["step time (s)"].second == pipelined().estimate.step_time_s
    assert 0 < rows["operators placed differently"].second <= rows["operators in both"].second
    same = {row.name: row for row in compare(replicated(), fresh())}
    assert not any(row.differs for row in same.values())
    assert compare_json(replicated(), pipelined())["speedup"] == pytest.approx(
        pipelined().tokens_per_s / replicated().tokens_per_s
    )
    assert compare_table(replicated(), pipelined()).row_count > 15


def test_a_plan_that_does_not_fit_says_so() -> None:
    about = priced(replicated().plan)
    about = replace(about, estimate=replace(about.estimate, memory_limit=1))
    assert any("does NOT fit" in part for part in explanation(about, explain(about)) if isinstance(part, str))


def test_a_larger_mesh_than_the_cluster_is_refused() -> None:
    plan = drawn_plan(Mesh(dp_replicate=16), Random(1))
    with pytest.raises(PlanError, match="needs 16 devices"):
        subject(gpt(), plan, engine().cluster)


def test_a_search_in_chinese() -> None:
    shown = [
        about.plan.model_copy(update={"estimate": about.estimate.to_json()}) for about in (replicated(), pipelined())
    ]
    baselines = [("pipeline", shown[1], ""), ("FSDP", None, "")]
    console = Console(width=200, record=True, file=io.StringIO())
    for lang in ("en", "zh"):
        console.print(plan_table(shown, baselines, language=Language(lang)))
        console.print(why_it_wins(shown, baselines, Language(lang)))
        console.print(proof(0.5, 0.1, 2.0, False, Language(lang)))
        console.print(compare_table(replicated(), pipelined(), Language(lang)))
    text = console.export_text()
    english, chinese = text[: text.index("设备网格")], text[text.index("设备网格") :]
    assert "tensor-parallel communication" in english
    assert "within 10.0% of it. Searched for 2.0 s, stopped at the time limit" in english
    for word in ("重计算 全部", "流水线并行", "不可行", "张量并行通信", "到时限停止", "切分不同的算子"):
        assert word in chinese, chinese
    rest = set(re.findall(r"[A-Za-z]{4,}", chinese)) - {"shard", "tokens", "ZeRO", "FSDP", "gpipe", "none"}
    assert not rest - {"replicated", "pipelined", "embed", "blocks"}, rest
