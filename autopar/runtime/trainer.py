"""The training loop of one process: data, step, metrics, checkpoints."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from autopar.errors import InputError, RunError
from autopar.runtime import checkpoint
from autopar.runtime.checkpoint_writer import CheckpointWriter
from autopar.runtime.data import make_source
from autopar.runtime.learning_rate import LearningRate
from autopar.runtime.metrics import Metrics
from autopar.runtime.monitor import lagging, peak_memory_gib
from autopar.runtime.parallelize import ParallelModel
from autopar.runtime.tracing import Tracer
from autopar.runtime.weights import load_weights


@dataclass(frozen=True)
class Options:
    """Settings of a run that are no part of the plan.

    Attributes:
        steps: optimizer steps to do in all, those of the checkpoint included.
        data: file of tokens, or None.
        checkpoint_dir: where to write checkpoints, or None for none.
        checkpoint_every: steps between checkpoints; one is always written at the end.
        keep_checkpoints: how many of the newest to keep.
        resume: ``auto``, ``none`` or the path of a checkpoint.
        metrics: JSONL file, or None.
        tensorboard: folder for TensorBoard, or None.
        profile: folder for Chrome traces of a few steps, or None.
        nonfinite: ``stop`` at a loss or gradient norm that is NaN or infinite, or ``skip`` the step. Overflows under
            fp16 are always skipped.
        max_grad_norm: clip the gradient's global norm, or None.
        weights: checkpoint or safetensors file that gives the first weights when there is nothing to go on from.
        learning_rate: how the optimizer's rates move over the run; None: as in the checkpoint, else constant.
    """

    steps: int
    data: str | None = None
    checkpoint_dir: str | None = None
    checkpoint_every: int = 100
    keep_checkpoints: int = 3
    resume: str = "auto"
    metrics: str | None = None
    tensorboard: str | None = None
    profile: str | None = None
    nonfinite: str = "stop"
    max_grad_norm: float | None = None
    weights: str | None = None
    learning_rate: LearningRate | None = None

    def __post_init__(self) -> None:
        if self.nonfinite not in ("stop", "skip"):
            raise InputError(f"nonfinite {self.nonfinite!r} is unknown", "Use stop or skip")

    def to_json(self) -> dict[str, Any]:
        """As plain values, for :meth:`from_json`."""
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Options:
        """What :meth:`to_json` gave."""
        rate = values["learning_rate"]
        return Options(**{**values, "learning_rate": LearningRate(**rate) if rate else None})


def train(model: ParallelModel, options: Options) -> dict[str, Any]:
    """Trains; every process of the plan must call it.

    Returns:
        A summary (the same on every process): steps done, first and last loss, median step time, predicted step time.

    Raises:
        RunError: the loss became NaN or infinite; names the step and the last checkpoint.
    """
    return _Loop(model, options).run()


class _Loop:
    def __init__(self, model: ParallelModel, options: Options) -> None:
        self.model, self.options, self.plan = model, options, model.plan
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.first = self.rank == 0
        self.folder = Path(options.checkpoint_dir) if options.checkpoint_dir else None
        self.rows: list[dict[str, Any]] = []
        self.interrupted = False
        self.writer: CheckpointWriter | None = None
        model.max_grad_norm = options.max_grad_norm

    def run(self) -> dict[str, Any]:
        source = make_source(
            self.model.job, self.plan, self.model.graph, self.model.topology.data_shard, self.options.data
        )
        found = checkpoint.find(self.options.resume, self.folder, self._say)
        begin = self._restore(found)
        rate = self._learning_rate(found)
        metrics = None
        if self.first:
            metrics = Metrics(self.options.metrics, self.options.tensorboard, begin, self._say)
        scheduler = rate.scheduler(self.model.optimizer, begin, self.options.steps, self.plan.global_batch)
        if self.folder:
            settings = {"learning_rate": asdict(rate), "steps": self.options.steps}
            self.writer = CheckpointWriter(self.model, self.folder, self.options.keep_checkpoints, settings)
        previous = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        step, saved = begin, begin
        try:
            with Tracer(self.options.profile, self.rank, self.options.steps - begin) as tracer:
                while step < self.options.steps and not self.model.stop_agreed:
                    self._step(step, source, metrics)
                    scheduler.step()
                    tracer.step()
                    step += 1
                    last = step == self.options.steps or self.model.stop_agreed
                    if self.writer and (last or step % self.options.checkpoint_every == 0):
                        self.writer.save(step)
                        saved = step
            if self.writer:
                self.writer.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            if metrics:
                metrics.close()
        if self.model.stop_agreed and step < self.options.steps:
            rest = "the same command goes on from there" if saved == step else "nothing was saved: no --checkpoint-dir"
            self._say(f"stopped after step {step}; {rest}")
        return self._summary(begin, step)

    def _restore(self, found: Path | None) -> int:
        """The steps done before this run."""
        if found:
            begin = checkpoint.load(self.model, found)
            self._say(f"resumed from {found} after step {begin}")
            return begin
        if self.options.weights:
            load_weights(self.model, Path(self.options.weights))
            self._say(f"weights from {self.options.weights}")
        return 0

    def _learning_rate(self, found: Path | None) -> LearningRate:
        """As asked for, else as the checkpoint's run had it; a change of it, or of its length, is said."""
        saved = checkpoint.settings(found) if found else {}
        before = LearningRate(**saved["learning_rate"]) if "learning_rate" in saved else None
        rate = self.options.learning_rate or before or LearningRate()
        if before and rate != before:
            self._say(f"the learning-rate schedule changes from {before} to {rate}")
        elif before and rate.shape != "constant" and saved["steps"] != self.options.steps:
            self._say(f"the {rate.shape} schedule now ends at step {self.options.steps}, not {saved['steps']}")
        return rate

    def _step(self, step: int, source: Any, metrics: Metrics | None) -> None:
        begun, cpu = time.perf_counter(), time.process_time()
        shard = source.shard(step)
        waited, cpu_waiting = time.perf_counter() - begun, time.process_time() - cpu
        self.model.step_shard(shard)
        elapsed = time.perf_counter() - begun
        work = waited + time.process_time() - cpu - cpu_waiting
        self.model.report = (work, peak_memory_gib(self.model.topology.device))
        if self.model.skipped:
            self._check_skipped(step)
        row = self._row(step, elapsed, waited)
        self.rows.append(row)
        if metrics:
            shown = step < 3 or (step + 1) % 5 == 0 or step + 1 == self.options.steps
            metrics.write(row, shown or row["skipped"])

    def _row(self, step: int, elapsed: float, waited: float) -> dict[str, Any]:
        """Work and memory of other processes arrive with the next step's loss, so they are those of the step before."""
        estimate, model = self.plan.estimate, self.model
        tokens = self.plan.global_batch * model.graph.tokens_per_sample
        flops = (model.graph.forward_flops + model.graph.backward_flops) / self.plan.micro_batch
        peak = float(estimate["tflops_per_device"]) / float(estimate["mfu"]) * 1e12 if estimate.get("mfu") else math.nan
        rate = flops * self.plan.global_batch / self.plan.mesh.devices / elapsed
        return {
            "step": step + 1,
            "loss": model.loss,
            "grad_norm": model.grad_norm,
            "lr": float(model.optimizer.param_groups[0]["lr"]),
            "step_time_s": elapsed,
            "data_wait_s": waited,
            **model.times,
            "tokens_per_s": tokens / elapsed,
            "mfu": rate / peak if peak == peak else None,
            "peak_memory_gib": max(model.report[1], *(memory for _, memory in model.reports)),
            "slowest_rank": lagging([work for work, _ in model.reports]) if step > 3 else None,
            "skipped": model.skipped,
            "loss_scale": model.loss_scale.value if model.loss_scale else None,
            "predicted_step_time_s": estimate.get("step_time_s"),
            "predicted_peak_memory_gib": estimate.get("peak_allocated_gib"),
        }

    def _check_skipped(self, step: int) -> None:
        """Goes on after an fp16 overflow, or if asked to; else ends the run. The weights are those before the step."""
        scale = self.model.loss_scale
        if scale is not None and not scale.exhausted and math.isfinite(self.model.loss):
            return
        if self.options.nonfinite == "skip":
            return
        if self.writer:
            self.writer.wait()
        saved = checkpoint.checkpoints(self.folder) if self.folder else []
        where = f"the last checkpoint is {saved[-1]}" if saved else "there is no checkpoint"
        what = f"the loss is {self.model.loss}"
        if math.isfinite(self.model.loss):
            what = f"the gradient norm is {self.model.grad_norm}"
        raise RunError(
            f"{what} at step {step + 1}{self._where_not_finite()}; {where}",
            "Lower the learning rate, or go on without such steps with --nonfinite skip",
        )

    def _where_not_finite(self) -> str:
        """The processes whose own share of the loss is not finite."""
        if not dist.is_initialized():
            return ""
        finite: list[bool] = [True] * dist.get_world_size()
        dist.all_gather_object(finite, math.isfinite(self.model.own_loss))
        ranks = [str(rank) for rank, good in enumerate(finite) if not good]
        return f" on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" if ranks else ""

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        """Asks for an end after a step that all agree on; a second Ctrl-C ends at once."""
        if signum == signal.SIGINT:
            if self.interrupted:
                os._exit(130)
            self.interrupted = True
        self.model.stop_asked = True

    def _summary(self, begin: int, step: int) -> dict[str, Any]:
        settled = [row["step_time_s"] for row in self.rows[2:]] or [row["step_time_s"] for row in self.rows]
        median = sorted(settled)[len(settled) // 2] if settled else None
        return {
            "steps": step,
            "steps_this_run": step - begin,
            "first_loss": self.rows[0]["loss"] if self.rows else None,
            "last_loss": self.rows[-1]["loss"] if self.rows else None,
            "losses": [row["loss"] for row in self.rows],
            "median_step_time_s": median,
            "predicted_step_time_s": self.plan.estimate.get("step_time_s"),
            "tokens_per_s": self.rows[-1]["tokens_per_s"] if self.rows else None,
            "processes": self.plan.mesh.devices,
        }

    def _say(self, line: str) -> None:
        if self.first:
            print(line, file=sys.stderr, flush=True)
