"""Compare: two plans side by side; only what differs is marked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from autopar.report.language import ENGLISH, Language
from autopar.report.subject import Subject
from autopar.report.tables import COMPONENTS, recompute_of
from autopar.units import GIB

Value = str | int | float


@dataclass(frozen=True)
class Row:
    """One quantity of both plans; numbers carry their unit in the name."""

    name: str
    first: Value
    second: Value

    @property
    def change(self) -> float | None:
        """Second over first less 1; None where they are not numbers or the first is zero."""
        if isinstance(self.first, str) or isinstance(self.second, str) or not self.first:
            return None
        return self.second / self.first - 1

    @property
    def differs(self) -> bool:
        return self.first != self.second


def compare(first: Subject, second: Subject) -> list[Row]:
    """Settings, predictions, then seconds by component, of two plans."""
    pairs = zip(_facts(first).items(), _facts(second).values(), strict=True)
    rows = [Row(name, mine, theirs) for (name, mine), theirs in pairs]
    unlike, common = _placements(first, second)
    return [*rows, Row("operators placed differently", 0, unlike), Row("operators in both", common, common)]


def _facts(subject: Subject) -> dict[str, Value]:
    plan, estimate = subject.plan, subject.estimate
    settings: dict[str, Value] = {
        "cluster": subject.cluster.name,
        "mesh": plan.mesh.describe(),
        "devices": plan.mesh.devices,
        "global batch": plan.global_batch,
        "micro-batch": plan.micro_batch,
        "micro-batches": plan.micro_batches,
        "schedule": plan.schedule if plan.mesh.pp > 1 else "-",
        "stages": ", ".join(plan.stages),
        "recompute": recompute_of(plan),
        "ZeRO stage": plan.zero_stage,
        "precision": plan.precision,
    }
    predicted: dict[str, Value] = {
        "step time (s)": estimate.step_time_s,
        "tokens/s": subject.tokens_per_s,
        "MFU (%)": 100 * estimate.mfu,
        "peak reserved (GiB)": estimate.peak_reserved / GIB,
        "memory limit (GiB)": estimate.memory_limit / GIB,
        "fits": "yes" if estimate.fits else "no",
    }
    parts: dict[str, Value] = {f"{COMPONENTS[name]} (s)": value for name, value in estimate.breakdown.items()}
    return {**settings, **predicted, **parts}


def _placements(first: Subject, second: Subject) -> tuple[int, int]:
    """Operators of blocks with the same name that are placed unlike, and all operators of such blocks."""
    theirs = {block.name: second.plan.layouts[block.layout].operators for block in second.plan.blocks}
    labels = {block.name: block.labels for block in first.graph.blocks}
    unlike = common = 0
    for block in first.plan.blocks:
        if block.name in theirs:
            mine, other = first.plan.layouts[block.layout].operators, theirs[block.name]
            unlike += sum(mine.get(label, {}) != other.get(label, {}) for label in labels[block.name])
            common += len(labels[block.name])
    return unlike, common


def compare_table(first: Subject, second: Subject, language: Language = ENGLISH) -> Table:
    """Both plans side by side; what is the same in both is dim."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column(first.name, justify="right", overflow="fold")
    table.add_column(second.name, justify="right", overflow="fold")
    table.add_column(language.say("change"), justify="right")
    for row in compare(first, second):
        if not row.first and not row.second:
            continue
        table.add_row(_name(row.name, language), *_cells(row, language), style=None if row.differs else "dim")
    return table


def _name(name: str, language: Language) -> str:
    """The name of a row; a component's keeps its unit."""
    part = name.removesuffix(" (s)")
    return f"{language.say(part)} (s)" if part in COMPONENTS.values() else language.say(name)


def _cells(row: Row, language: Language) -> tuple[str, str, str]:
    change = ""
    if row.differs and row.change is not None:
        change = f"{row.change:+.1%}" if row.change < 9 else f"{1 + row.change:,.0f}x"
    return language.say(_text(row.first)), language.say(_text(row.second)), change


def _text(value: Value) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if isinstance(value, int) or value >= 1000 else f"{value:.4g}"


def compare_json(first: Subject, second: Subject) -> dict[str, Any]:
    """The document of ``compare --json``."""
    rows = [{"name": r.name, "first": r.first, "second": r.second, "change": r.change} for r in compare(first, second)]
    speedup = second.tokens_per_s / first.tokens_per_s
    return {"first": first.name, "second": second.name, "rows": rows, "speedup": speedup}
