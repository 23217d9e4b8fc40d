"""Why not: the best plan that makes one choice otherwise, and what it loses against a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.errors import NoPlanFits
from autopar.model.spec import TrainingJob
from autopar.plan import Plan
from autopar.planner.planner import describe_plan, search
from autopar.planner.space import Candidate, Pins, check_pins, parse_pins
from autopar.report.language import ENGLISH, Language
from autopar.report.subject import Subject
from autopar.report.tables import COMPONENTS, recompute_of, step_time_s
from autopar.units import format_seconds

SAME = 0.005  # predictions that differ by less than half a percent are called equal


@dataclass(frozen=True)
class Answer:
    """What one choice costs.

    Attributes:
        question: the choice, as ``tp=4``.
        kept: the plan makes this choice itself.
        plan: the best that makes it, with its estimate; None where the plan itself does, or nothing fits.
        loss: its step time over the plan's, less 1.
        part, part_s: the component that it spends most more on, and the seconds.
        reason: why nothing fits.
    """

    question: str
    kept: bool = False
    plan: Plan | None = None
    loss: float = 0.0
    part: str = ""
    part_s: float = 0.0
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """The key ``why`` of ``explain --why ... --json``."""
        found: dict[str, Any] = {"question": self.question, "kept": self.kept, "reason": self.reason}
        if self.plan is not None:
            found |= {"plan": describe_plan(self.plan), "step_time_s": step_time_s(self.plan), "loss": self.loss}
            found |= {"component": self.part, "component_s": self.part_s}
        return found


def why_not(job: TrainingJob, subject: Subject, question: str) -> Answer:
    """Searches for the best plan that makes one choice, and compares it with a plan.

    Args:
        question: a pin as typed: ``tp=4``, ``dp_shard=8``, ``recompute=none``, ``schedule=gpipe``, ``tp<=2``.

    Raises:
        InputError: the choice is unknown, or cannot hold on this cluster or batch.
    """
    plan, estimate = subject.plan, subject.estimate
    pins = parse_pins([question])
    checked = check_pins(pins, subject.cluster.devices, plan.global_batch)
    if _keeps(plan, checked):
        return Answer(question, kept=True)
    try:
        other = search(job, subject.cluster, plan.global_batch, plan.precision, pins=pins, top=1).plans[0]
    except NoPlanFits as error:
        return Answer(question, reason=f"{error.what}. {error.remedy}")
    seconds = other.estimate["breakdown"]
    more = {part: seconds[part] - estimate.breakdown[part] for part in COMPONENTS}
    loss = step_time_s(other) / estimate.step_time_s - 1
    part = max(more, key=lambda name: more[name] if loss > 0 else -more[name])
    return Answer(question, plan=other, loss=loss, part=part, part_s=more[part])


def _keeps(plan: Plan, pins: Pins) -> bool:
    """Whether a plan makes the choice."""
    chosen = {"schedule": plan.schedule, "recompute": recompute_of(plan), "zero_stage": str(plan.zero_stage)}
    words = all(chosen[key] in pins.options(key) for key in chosen if key in pins.words or (key, "!=") in pins.limits)
    return words and pins.allow(Candidate(plan.mesh, plan.micro_batch, plan.micro_batches))


def sentence(answer: Answer, language: Language = ENGLISH) -> str:
    """The answer in a sentence."""
    say, words = language.say, {"question": answer.question}
    if answer.kept:
        return say("Why not {question}? The plan does that.", **words)
    if answer.plan is None:
        return say("Why not {question}? Nothing fits then: {reason}", **words, reason=answer.reason)
    words |= {"plan": describe_plan(answer.plan), "time": format_seconds(step_time_s(answer.plan))}
    if abs(answer.loss) < SAME:
        return say("Why not {question}? It is as good: {plan} takes {time} a step.", **words)
    words |= {"share": f"{abs(answer.loss):.1%}", "part": say(COMPONENTS[answer.part])}
    words["seconds"] = format_seconds(abs(answer.part_s))
    if answer.loss > 0:
        return say(
            "Why not {question}? The best with it ({plan}) takes {time} a step, {share} longer, mostly by {seconds} "
            "more {part}.",
            **words,
        )
    return say(
        "Why not {question}? It is better: {plan} takes {time} a step, {share} less, mostly by {seconds} less {part}.",
        **words,
    )
