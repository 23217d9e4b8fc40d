"""Tables for the terminal: ranked plans against the baselines a person would otherwise choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from autopar.plan import Plan
from autopar.report.language import ENGLISH, Language
from autopar.units import GIB, format_bytes, format_count, format_seconds

COMPONENTS = {
    "compute": "compute",
    "tp": "tensor-parallel communication",
    "dp": "data-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "pp": "pipeline communication",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
}
Baseline = tuple[str, Plan | None, str]


def step_time_s(plan: Plan) -> float:
    """Predicted step time of a plan, in seconds."""
    return float(plan.estimate["step_time_s"])


def tokens_per_s(plan: Plan) -> float:
    """Predicted tokens (samples, for models without a sequence) per second over all devices."""
    return float(plan.estimate["tokens_per_s_per_device"]) * plan.cluster.devices


def recompute_of(plan: Plan) -> str:
    """The plan's recomputation in a word: none, selective, full or mixed."""
    kinds = {block.recompute for block in plan.blocks}
    return kinds.pop() if len(kinds) == 1 else "mixed"


def tight_table(title: str = "") -> Table:
    """An empty table without a border."""
    return Table(
        title=title or None,
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )


def plan_table(
    plans: Sequence[Plan], baselines: Sequence[Baseline] = (), title: str = "", language: Language = ENGLISH
) -> Table:
    """Ranked plans, then the baselines; ``batch`` is samples of a micro-batch x micro-batches, ``GiB`` the peak of the
    fullest device, ``vs #1`` the step time relative to the first plan.

    Args:
        plans: best first, each with its estimate.
        baselines: (name, plan or None where it cannot be done, why not).
    """
    table = tight_table(title)
    table.add_column("", no_wrap=True)
    table.add_column(language.say("mesh"), min_width=10)
    for name in ("batch", "pipe", "saving"):
        table.add_column(language.say(name), no_wrap=True)
    for name in ("step", "tokens/s", "GiB", "vs #1"):
        table.add_column(language.say(name), justify="right", no_wrap=True)
    best = step_time_s(plans[0]) if plans else 0.0
    for rank, plan in enumerate(plans, 1):
        table.add_row(*_cells(f"#{rank}", plan, best, language), style="bold" if rank == 1 else None)
    if baselines:
        table.add_section()
    refused: list[str] = []
    for name, plan_or_none, reason in baselines:
        if plan_or_none is None:
            refused.append(f"{language.say(name)}: {reason or language.say('not possible')}")
        else:
            table.add_row(*_cells(language.say(name), plan_or_none, best, language), style="dim")
    if refused:
        table.caption, table.caption_justify = "; ".join(refused), "left"
    return table


def _cells(label: str, plan: Plan, best: float, language: Language) -> tuple[str, ...]:
    time = step_time_s(plan)
    schedule: str = plan.schedule if plan.mesh.pp > 1 else "-"
    if plan.virtual_stages > 1:
        schedule += f" x{plan.virtual_stages}"
    return (
        label,
        plan.mesh.describe(),
        f"{plan.micro_batch} x {plan.micro_batches}",
        schedule,
        _saving(plan, language),
        format_seconds(time),
        f"{tokens_per_s(plan):,.0f}",
        f"{plan.estimate['peak_reserved_gib']:.2f}",
        f"{time / best:.2f}x" if best else "",
    )


def _saving(plan: Plan, language: Language) -> str:
    """ZeRO stage and recomputation, where there is any."""
    parts = [f"ZeRO-{plan.zero_stage}"] if plan.zero_stage else []
    recompute = recompute_of(plan)
    parts += [language.say("recompute {kind}", kind=language.say(recompute))] if recompute != "none" else []
    return ", ".join(parts) or "-"


def why_it_wins(plans: Sequence[Plan], baselines: Sequence[Baseline], language: Language = ENGLISH) -> str:
    """One sentence: what the first plan saves against the best baseline, by component of the step time."""
    say, best = language.say, plans[0]
    rivals = [(name, plan) for name, plan, _ in baselines if plan is not None and plan.mesh != best.mesh]
    mesh = best.mesh.describe()
    if not rivals:
        return say("The best plan is {mesh}; no baseline with another mesh can run here.", mesh=mesh)
    name, rival = min(rivals, key=lambda pair: step_time_s(pair[1]))
    words = {"mesh": mesh, "name": say(name), "theirs": rival.mesh.describe()}
    mine, theirs = best.estimate.get("breakdown", {}), rival.estimate.get("breakdown", {})
    saved = {part: theirs[part] - mine[part] for part in COMPONENTS if part in mine and part in theirs}
    gain = step_time_s(rival) / step_time_s(best) - 1
    if gain < 0:
        return say(
            "The {name} plan ({theirs}) is predicted {gain} faster than {mesh}, the best of what was asked for.",
            **words,
            gain=f"{-gain:.0%}",
        )
    if not saved or gain == 0:
        return say("{mesh} and {name} are predicted equally fast.", mesh=mesh, name=say(name))
    part = max(saved, key=lambda k: saved[k])
    return say(
        "{mesh} is predicted {gain} faster than the {name} plan ({theirs}), mostly by {saved} less {what} a step.",
        **words,
        gain=f"{gain:.0%}",
        saved=format_seconds(max(saved[part], 0.0)),
        what=say(COMPONENTS[part]),
    )


def proof(bound_s: float, gap: float, search_time_s: float, complete: bool, language: Language = ENGLISH) -> str:
    """One sentence: what the search has proven of the best plan.

    Args:
        gap: how far at most the best plan is above the bound, as a fraction.
    """
    return language.say(
        "No plan can take less than {bound} a step (predicted): the best is within {gap} of it. Searched for "
        "{time}{end}.",
        bound=format_seconds(bound_s),
        gap=f"{gap:.1%}",
        time=f"{search_time_s:.1f} s",
        end="" if complete else language.say(", stopped at the time limit"),
    )


def graph_table(summary: dict[str, Any]) -> Table:
    """The captured model by block kind; the last row is the whole."""
    table = Table(
        title=f"{summary['operators']} operators, micro-batch {summary['batch_size']}, "
        f"captured in {format_seconds(summary['capture_time_s'])}",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("block")
    for name in ("count", "parameters", "FLOPs fwd", "bwd", "saved"):
        table.add_column(name, justify="right")
    table.add_column("largest operators")
    for kind in summary["blocks"]:
        table.add_row(kind["kind"], str(kind["count"]), *_sizes(kind), ", ".join(kind["largest_operators"]))
    table.add_section()
    table.add_row("all", str(sum(kind["count"] for kind in summary["blocks"])), *_sizes(summary), "", style="bold")
    shares = [
        f"{kind} {format_count(one['forward'])} fwd, {format_count(one['backward'])} bwd"
        for kind, one in summary["flops"].items()
        if one.get("backward")
    ]
    elements = format_count(summary["flops"]["other"]["forward"])
    table.caption, table.caption_justify = (
        f"FLOPs: {'; '.join(shares)}; other operators make {elements} elements",
        "left",
    )
    return table


def _sizes(row: dict[str, Any]) -> tuple[str, ...]:
    counts = [format_count(row[key]) for key in ("parameters", "forward_flops", "backward_flops")]
    return (*counts, format_bytes(row["saved_activation_bytes"]))


def estimate_table(plan: Plan, estimate: dict[str, Any]) -> Table:
    """Where one predicted step goes, in time and in memory of the fullest device."""
    schedule = f", {plan.schedule}" if plan.mesh.pp > 1 else ""
    table = Table(
        title=f"{plan.mesh.describe()}, micro-batch {plan.micro_batch} x {plan.micro_batches}{schedule}: "
        f"{format_seconds(estimate['step_time_s'])} a step",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("time")
    table.add_column("", justify="right")
    table.add_column("share", justify="right")
    table.add_column("memory")
    table.add_column("", justify="right")
    fullest = max(estimate["stages"], key=lambda stage: stage["peak_reserved_gib"])
    times = [(k, v) for k, v in estimate["breakdown"].items() if k != "exposed_communication" and v > 0]
    memory = [*fullest["memory_gib"].items(), ("peak reserved", fullest["peak_reserved_gib"])]
    for i in range(max(len(times), len(memory))):
        name, seconds = times[i] if i < len(times) else ("", None)
        left = (name, format_seconds(seconds), f"{seconds / estimate['step_time_s']:.0%}") if seconds else ("", "", "")
        kind, gib = memory[i] if i < len(memory) else ("", None)
        table.add_row(*left, kind, format_bytes(gib * GIB) if gib is not None else "")
    fits = "fits" if estimate["fits"] else "does NOT fit"
    table.caption = (
        f"MFU {estimate['mfu']:.1%}, {estimate['tokens_per_s_per_device']:,.0f} tokens/s per device; "
        f"{fits} in {estimate['memory_limit_gib']:.2f} GiB"
    )
    return table
