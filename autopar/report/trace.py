"""Trace: the simulated step as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

Format: "Trace Event Format" (Google, 2016): complete events (``ph`` X) with start and duration in microseconds, and
metadata (``ph`` M) that names processes and threads. A process is a pipeline rank; its threads are its compute and
what it sends.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopar.cost.timeline import Event
from autopar.errors import InputError
from autopar.files import replacing
from autopar.report.subject import Subject

COMPUTE, SEND_ON, SEND_BACK = 0, 1, 2
THREADS = {COMPUTE: "compute", SEND_ON: "send activations", SEND_BACK: "send gradients"}
NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
US = 1e6


def trace(subject: Subject) -> dict[str, Any]:
    """The document of ``report --trace``: every action of every rank, its sends, and the end of the step."""
    estimate, plan = subject.estimate, subject.plan
    events: list[dict[str, Any]] = []
    for rank in range(plan.mesh.pp):
        events.append(_named("process_name", rank, 0, f"pipeline rank {rank}"))
        events.append({"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
        events.extend(_named("thread_name", rank, thread, name) for thread, name in THREADS.items())
    for event in estimate.timeline.events():
        events.append(_action(event))
        events.extend(_sends(subject, event))
    tail = estimate.step_time_s - estimate.timeline.makespan_s
    for rank in range(plan.mesh.pp if tail > 0 else 0):
        start = estimate.timeline.makespan_s
        events.append(_complete("gradient sums, optimizer", "step", rank, COMPUTE, start, tail, {}))
    about = {"plan": plan.mesh.describe(), "cluster": subject.cluster.name, "step_time_s": estimate.step_time_s}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {**about, "schedule": plan.schedule}}


def save_trace(subject: Subject, path: Path) -> None:
    """Writes the trace under a temporary name and renames it.

    Raises:
        InputError: the folder cannot be written.
    """
    with replacing(path, InputError) as aside:
        aside.write_text(json.dumps(trace(subject)))


def _action(event: Event) -> dict[str, Any]:
    kind, stage, number = event.action
    args = {"stage": stage, "micro_batch": number}
    length = event.end_s - event.start_s
    return _complete(f"{NAMES[kind]} {number}", NAMES[kind], event.rank, COMPUTE, event.start_s, length, args)


def _sends(subject: Subject, event: Event) -> Iterator[dict[str, Any]]:
    """What an action hands to another rank, from its end until it has arrived."""
    kind, stage, number = event.action
    held, times = subject.estimate.held, subject.estimate.stage_times
    after = stage + 1 if kind == "F" else stage - 1
    if kind == "W" or not 0 <= after < len(times) or after in held[event.rank]:
        return
    seconds = times[min(stage, after)].send_s  # of the boundary between the two
    thread, what = (SEND_ON, "activations") if kind == "F" else (SEND_BACK, "gradients")
    args = {"from_stage": stage, "to_stage": after, "micro_batch": number}
    yield _complete(f"send {what} {number}", "send", event.rank, thread, event.end_s, seconds, args)


def _complete(
    name: str, category: str, rank: int, thread: int, start_s: float, length_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    where = {"pid": rank, "tid": thread, "ts": start_s * US, "dur": length_s * US}
    return {"name": name, "cat": category, "ph": "X", **where, "args": args}


def _named(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
