"""Kinds: every plot that ``autopar plot`` draws, by name, from a plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from autopar.errors import InputError
from autopar.model.huggingface import load_config
from autopar.model.spec import TrainingJob
from autopar.report.plots.accuracy import accuracy
from autopar.report.plots.block_graph import block_graph
from autopar.report.plots.breakdown import breakdown
from autopar.report.plots.curves import scaling, sweep
from autopar.report.plots.frontier import frontier
from autopar.report.plots.memory import memory, memory_over_time
from autopar.report.plots.timeline import timeline
from autopar.report.plots.topology import topology
from autopar.report.studies import over_batches, over_devices, over_lengths, visited
from autopar.report.subject import Subject

OF_PLAN: dict[str, Callable[[Subject], Figure]] = {
    "timeline": timeline,
    "memory": memory,
    "memory-over-time": memory_over_time,
    "breakdown": lambda subject: breakdown([subject]),
    "topology": topology,
    "block": block_graph,
}


def of_frontier(job: TrainingJob, subject: Subject) -> Figure:
    """Searches again, keeping every plan."""
    return frontier(visited(job, subject.cluster, subject.plan.global_batch, subject.plan.precision))


def of_scaling(job: TrainingJob, subject: Subject) -> Figure:
    """Searches at 1, 2, 4, ... devices of the cluster."""
    counts = [n for n in (2**i for i in range(24)) if n < subject.cluster.devices] + [subject.cluster.devices]
    return scaling(over_devices(job, subject.cluster, counts, subject.plan.global_batch, subject.plan.precision))


def of_batches(job: TrainingJob, subject: Subject) -> Figure:
    """Searches at a quarter to four times the plan's global batch."""
    batch = subject.plan.global_batch
    batches = sorted({max(1, batch // 4), max(1, batch // 2), batch, 2 * batch, 4 * batch})
    return sweep(over_batches(job, subject.cluster, batches, subject.plan.precision), "global_batch")


def of_lengths(job: TrainingJob, subject: Subject) -> Figure:
    """Searches at a quarter to four times the plan's sequence length, at the same tokens a step.

    Raises:
        InputError: the model is a model.py, whose samples have one length.
        ModelError: a length is beyond the model's positions.
    """
    if not job.source.startswith("hf:"):
        raise InputError(
            f"--kind lengths cannot change the sequence length of {job.source!r}",
            "Give a model as hf:PATH, or call autopar.report.studies.over_lengths with jobs of your own",
        )
    length = subject.graph.tokens_per_sample
    lengths = [n for n in (length // 4, length // 2, length, 2 * length, 4 * length) if n]
    jobs = {n: load_config(job.source.removeprefix("hf:"), n) for n in lengths}
    table = over_lengths(jobs, subject.cluster, subject.plan.global_batch * length, subject.plan.precision)
    return sweep(table, "sequence_length")


SEARCHED: dict[str, Callable[[TrainingJob, Subject], Figure]] = {
    "frontier": of_frontier,
    "scaling": of_scaling,
    "batches": of_batches,
    "lengths": of_lengths,
}


def of_runs(path: Path) -> Figure:
    """Predicts a table of measured runs and draws both."""
    from autopar.validate.validate import validate

    return accuracy(pd.DataFrame([outcome.to_json() for outcome in validate(path).outcomes]))


NAMES = (*OF_PLAN, *SEARCHED)
