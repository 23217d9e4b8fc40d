"""Prints an explanation: three tables and three sentences."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from autopar.report.explain import NO_HELP, Explanation
from autopar.report.language import ENGLISH, Language
from autopar.report.subject import Subject
from autopar.report.tables import COMPONENTS, tight_table
from autopar.report.what_if import Remedy
from autopar.units import format_bytes, format_seconds


def explanation(subject: Subject, found: Explanation, language: Language = ENGLISH) -> Iterator[Table | str]:
    """What to print, in order.

    Args:
        found: of the subject.
    """
    yield headline(subject, language)
    for table in (
        components_table(subject, found, language),
        stages_table(found, language),
        kinds_table(found, language),
    ):
        yield table
        yield ""
    yield from sentences(subject, found, language)


def headline(subject: Subject, language: Language = ENGLISH) -> str:
    """The plan in a line."""
    plan, estimate = subject.plan, subject.estimate
    say = language.say
    return say(
        "{mesh}, micro-batch {size} x {count}: {time} a step, {tokens} tokens/s, MFU {mfu}, {memory} of {limit} per "
        "device",
        mesh=plan.mesh.describe(),
        size=plan.micro_batch,
        count=plan.micro_batches,
        time=format_seconds(estimate.step_time_s),
        tokens=f"{subject.tokens_per_s:,.0f}",
        mfu=f"{estimate.mfu:.1%}",
        memory=format_bytes(estimate.peak_reserved),
        limit=format_bytes(estimate.memory_limit),
    )


def sentences(subject: Subject, found: Explanation, language: Language = ENGLISH) -> Iterator[str]:
    """What takes most of the step, the first bottleneck, and what would help."""
    say, total = language.say, subject.estimate.step_time_s
    if not subject.estimate.fits:
        over = subject.estimate.peak_reserved - subject.estimate.memory_limit
        yield say("It does NOT fit: the fullest device needs {over} more.", over=format_bytes(over))
    share = f"{found.components[found.largest] / total:.0%}"
    yield say("Most of the step, {share}, is {part}.", share=share, part=say(COMPONENTS[found.largest]))
    if found.crosses:
        pairs = ", ".join(f"{axis}: {scope}" for axis, scope in found.crosses.items())
        yield say("Links that the axes cross: {pairs}.", pairs=pairs)
    if found.bottleneck is None:
        yield say("No resource is a bottleneck: doubling any of them gains less than {least}.", least=f"{NO_HELP:.1%}")
    else:
        yield say("The first bottleneck is {what}.", what=_resource(found.bottleneck, language))
    for remedy in found.remedies:
        if remedy.gain > NO_HELP:
            yield say(
                "  Doubling {what}: {time} a step, {gain} more tokens/s.",
                what=_resource(remedy, language, how=True),
                time=format_seconds(remedy.step_time_s),
                gain=f"{remedy.gain:.1%}",
            )
        else:
            yield say("  Doubling {what}: no gain.", what=_resource(remedy, language, how=True))


def _resource(remedy: Remedy, language: Language, how: bool = False) -> str:
    say = language.say
    if remedy.resource == "link":
        return say("the bandwidth of the {scope} link", scope=remedy.where)
    name = {"compute": "compute speed", "memory": "device memory", "batch": "the global batch"}[remedy.resource]
    if not how or not remedy.where:
        return say(name)
    return f"{say(name)} ({', '.join(say(word) for word in remedy.where.split(', '))})"


def _table(language: Language, first: str, *others: str) -> Table:
    table = tight_table()
    table.add_column(language.say(first))
    for name in others:
        table.add_column(language.say(name), justify="right", no_wrap=True)
    return table


def components_table(subject: Subject, found: Explanation, language: Language = ENGLISH) -> Table:
    """Seconds of a step by component."""
    table = _table(language, "component", "seconds", "share")
    for name, seconds in found.components.items():
        if seconds > 0:
            share = f"{seconds / subject.estimate.step_time_s:.1%}"
            table.add_row(language.say(COMPONENTS[name]), format_seconds(seconds), share)
    return table


def stages_table(found: Explanation, language: Language = ENGLISH) -> Table:
    """Time and memory of one device of each pipeline rank."""
    table = _table(language, "stage", "forward", "backward", "idle", "states", "activations", "other", "peak")
    for row in found.stages:
        states = sum(row.memory[name] for name in ("parameters", "gradients", "optimizer"))
        kept = row.memory["activations"]
        sizes = (states, kept, row.reserved - states - kept, row.reserved)
        seconds = (row.forward_s, row.backward_s, row.idle_s)
        table.add_row(str(row.rank), *map(format_seconds, seconds), *map(format_bytes, sizes))
    return table


def kinds_table(found: Explanation, language: Language = ENGLISH) -> Table:
    """Device-seconds of a step by kind of block."""
    table = _table(language, "block kind", "count", "compute", "communication", "share", "saved per micro-batch")
    total = sum(row.total_s for row in found.kinds) + found.between_s
    for row in found.kinds:
        seconds = (format_seconds(row.compute_s), format_seconds(row.communication_s))
        table.add_row(row.kind, str(row.count), *seconds, f"{row.total_s / total:.1%}", format_bytes(row.saved_bytes))
    if found.between_s / total > 1e-3:
        share = f"{found.between_s / total:.1%}"
        table.add_row(language.say("between blocks"), "", format_seconds(found.between_s), "", share, "")
    return table
