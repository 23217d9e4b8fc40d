"""Report: one self-contained page about a plan, ready to send to a colleague."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from rich.table import Table

from autopar import __version__
from autopar.report import page
from autopar.report.explain import Explanation, explain
from autopar.report.explain_text import components_table, kinds_table, sentences, stages_table
from autopar.report.language import ENGLISH, Language
from autopar.report.plots.block_graph import block_graph
from autopar.report.plots.breakdown import breakdown
from autopar.report.plots.memory import memory, memory_over_time
from autopar.report.plots.timeline import timeline
from autopar.report.plots.topology import topology
from autopar.report.subject import Subject
from autopar.report.tables import recompute_of, tight_table
from autopar.units import GBPS, format_bytes, format_count, format_seconds


def report(subject: Subject, language: Language = ENGLISH) -> str:
    """The whole page as HTML."""
    name = _model_name(subject)
    return page.document(f"autopar: {name}, {subject.cluster.name}", language.name, _body(subject, name, language))


def _model_name(subject: Subject) -> str:
    """The last part of where the model came from: a report may leave the house, folders stay."""
    return subject.plan.model.source.removeprefix("hf:").rstrip("/").rsplit("/", 1)[-1]


def _body(subject: Subject, name: str, language: Language) -> Iterator[str]:
    say, plan, found = language.say, subject.plan, explain(subject)
    yield f"<h1>{escape(name)} · {escape(subject.cluster.name)}</h1>"
    yield f'<p class="under">{escape(_under(subject, language))}</p>'
    yield from _summary(subject, found, language)
    yield f"<h2>{escape(say('The plan'))}</h2>"
    yield page.table(settings_table(subject, language))
    yield f"<h2>{escape(say('Where the time goes'))}</h2>"
    yield page.plot(breakdown([subject]), "breakdown")
    yield page.table(components_table(subject, found, language))
    yield page.plot(timeline(subject), "timeline")
    yield page.table(kinds_table(found, language))
    yield f"<h2>{escape(say('Time and memory by stage'))}</h2>"
    yield page.table(stages_table(found, language))
    yield page.plot(memory(subject), "memory", tall=plan.mesh.pp < 8)
    yield page.plot(memory_over_time(subject), "memory-over-time")
    yield f"<h2>{escape(say('Network and placements'))}</h2>"
    yield page.plot(topology(subject), "topology")
    yield f"<details><summary>{escape(say('The operators of the most frequent block'))}</summary>"
    yield page.plot(block_graph(subject), "block", tall=True)
    yield "</details>"
    yield f"<h2>{escape(say('Assumptions and sources'))}</h2>"
    yield page.bullets(assumptions(subject, language))


def _under(subject: Subject, language: Language) -> str:
    return language.say(
        "{parameters} parameters, {devices} x {device}, {batch} samples a step",
        parameters=format_count(subject.graph.parameter_count),
        devices=subject.plan.mesh.devices,
        device=subject.cluster.device.name,
        batch=f"{subject.plan.global_batch:,}",
    )


def _summary(subject: Subject, found: Explanation, language: Language) -> Iterator[str]:
    say, estimate, gap = language.say, subject.estimate, subject.plan.optimality_gap
    facts = [
        (say("a step, predicted"), format_seconds(estimate.step_time_s)),
        (say("tokens/s, all devices"), f"{subject.tokens_per_s:,.0f}"),
        ("MFU", f"{estimate.mfu:.1%}"),
        (say("of {limit} per device", limit=format_bytes(estimate.memory_limit)), format_bytes(estimate.peak_reserved)),
    ]
    if gap is not None:
        facts.append((say("at most above the proven bound"), f"{gap:.1%}"))
    yield page.cards(facts)
    said = list(sentences(subject, found, language))
    if not estimate.fits:
        yield f'<p class="warning">{escape(said.pop(0))}</p>'
    yield page.bullets(said)


def settings_table(subject: Subject, language: Language = ENGLISH) -> Table:
    """What the plan chooses, a row a setting."""
    plan, say = subject.plan, language.say
    shown = tight_table()
    shown.add_column(say("setting"))
    shown.add_column(say("value"))
    schedule = f"{plan.schedule}, {plan.virtual_stages} x {plan.mesh.pp}" if plan.mesh.pp > 1 else "-"
    reduction = plan.gradient_reduction
    rows = {
        "mesh": plan.mesh.describe(),
        "micro-batch x micro-batches": f"{plan.micro_batch} x {plan.micro_batches}",
        "schedule, virtual stages x ranks": schedule,
        "first blocks of the stages": ", ".join(plan.stages),
        "recompute": say(recompute_of(plan)),
        "ZeRO stage": str(plan.zero_stage),
        "precision": plan.precision,
        "gradient sums": f"{reduction.dtype}, {reduction.bucket_mib:g} MiB",
    }
    for name, value in rows.items():
        shown.add_row(say(name), value)
    return shown


def assumptions(subject: Subject, language: Language = ENGLISH) -> Iterator[str]:
    """What the numbers rest on, a sentence each."""
    say, cluster, device = language.say, subject.cluster, subject.cluster.device
    yield say("Every number is a prediction; nothing on this page was measured while training.")
    measured = bool(device.measured.entries) or bool(cluster.collectives)
    yield (
        say("Operators and collectives were measured on the device.")
        if measured
        else say("Nothing was measured on the device itself: rates and efficiencies are those of its profile.")
    )
    yield say("Device {name}: {sources}.", name=device.name, sources="; ".join(device.sources))
    for link in cluster.links:
        yield say(
            "Link {scope}: {rate} Gbit/s per device and direction, {latency} a hop, {devices} devices in a domain.",
            scope=link.scope,
            rate=f"{link.bandwidth / GBPS:,.0f}",
            latency=format_seconds(link.latency_s),
            devices=f"{link.devices:,}",
        )
    if cluster.memory_reserve_bytes:
        yield say("{reserve} of every device are kept free.", reserve=format_bytes(cluster.memory_reserve_bytes))
    if bound := subject.plan.search.get("lower_bound_s"):
        yield say("No plan of the searched space is predicted below {bound} a step.", bound=format_seconds(bound))
    if pins := subject.plan.search.get("pins"):
        yield say("The search kept these pins: {pins}.", pins=", ".join(f"{k}={v}" for k, v in pins.items()))
    yield say(
        "Made by autopar {version}; model fingerprint {print}.",
        version=__version__,
        print=subject.plan.model.fingerprint,
    )
