"""The training loop of one process: data, step, metrics, checkpoints."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import torch.distributed as dist

from autopar.errors import RunError
from autopar.runtime import checkpoint
from autopar.runtime.checkpoint_writer import CheckpointWriter
from autopar.runtime.data import make_source
from autopar.runtime.learning_rate import LearningRate
from autopar.runtime.parallelize import ParallelModel
from autopar.runtime.weights import load_weights
from autopar.units import format_seconds


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
    max_grad_norm: float | None = None
    weights: str | None = None
    learning_rate: LearningRate | None = None

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
        self.first = not dist.is_initialized() or dist.get_rank() == 0
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
        metrics = self._open(begin)
        scheduler = rate.scheduler(self.model.optimizer, begin, self.options.steps, self.plan.global_batch)
        if self.folder:
            settings = {"learning_rate": asdict(rate), "steps": self.options.steps}
            self.writer = CheckpointWriter(self.model, self.folder, self.options.keep_checkpoints, settings)
        previous = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        step, saved = begin, begin
        try:
            while step < self.options.steps and not self.model.stop_agreed:
                self._step(step, source, metrics)
                scheduler.step()
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

    def _step(self, step: int, source: Any, metrics: TextIO | None) -> None:
        begun = time.perf_counter()
        shard = source.shard(step)
        waited = time.perf_counter() - begun
        self.model.step_shard(shard)
        elapsed = time.perf_counter() - begun
        if not math.isfinite(self.model.loss):
            self._fail(step)
        row = self._row(step, elapsed, waited)
        self.rows.append(row)
        if metrics:
            metrics.write(json.dumps(row) + "\n")
            metrics.flush()
        if step < 3 or (step + 1) % 5 == 0 or step + 1 == self.options.steps:
            self._say(
                f"step {step + 1:>5}  loss {row['loss']:.4f}  grad norm {row['grad_norm']:.3f}  "
                f"{format_seconds(elapsed)} (predicted {format_seconds(row['predicted_step_time_s'] or math.nan)})  "
                f"{row['tokens_per_s']:,.0f} tokens/s"
            )

    def _row(self, step: int, elapsed: float, waited: float) -> dict[str, Any]:
        estimate = self.plan.estimate
        tokens = self.plan.global_batch * self.model.graph.tokens_per_sample
        flops = (self.model.graph.forward_flops + self.model.graph.backward_flops) / self.plan.micro_batch
        peak = float(estimate["tflops_per_device"]) / float(estimate["mfu"]) * 1e12 if estimate.get("mfu") else math.nan
        rate = flops * self.plan.global_batch / self.plan.mesh.devices / elapsed
        return {
            "step": step + 1,
            "loss": self.model.loss,
            "grad_norm": self.model.grad_norm,
            "lr": float(self.model.optimizer.param_groups[0]["lr"]),
            "step_time_s": elapsed,
            "data_wait_s": waited,
            "tokens_per_s": tokens / elapsed,
            "mfu": rate / peak if peak == peak else None,
            "predicted_step_time_s": estimate.get("step_time_s"),
        }

    def _fail(self, step: int) -> None:
        if self.writer:
            self.writer.wait()
        saved = checkpoint.checkpoints(self.folder) if self.folder else []
        where = f"the last checkpoint is {saved[-1]}" if saved else "there is no checkpoint"
        raise RunError(f"the loss is {self.model.loss} at step {step + 1}; {where}", "Lower the learning rate")

    def _open(self, begin: int) -> TextIO | None:
        """The metrics file on the first process; on resume, rows of steps to be done again are dropped."""
        if not self.first or not self.options.metrics:
            return None
        path = Path(self.options.metrics)
        kept = []
        if begin and path.is_file():
            kept = [line for line in path.read_text().splitlines() if line and json.loads(line)["step"] <= begin]
        file = path.open("w")
        file.writelines(line + "\n" for line in kept)
        return file

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
