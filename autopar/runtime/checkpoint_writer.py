"""Writing checkpoints while training goes on.

torch.distributed.checkpoint copies the state and writes it in a thread; then every process hashes the files that it
wrote, and the first one writes the list of checksums and gives the folder its final name. All of it happens under a
temporary name and on a process group of its own, so that it does not meet the collectives of the training step.
"""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from autopar.errors import RunError
from autopar.runtime.checkpoint import checkpoints, partial, state_of
from autopar.runtime.checksums import RUN, checksums, files_of
from autopar.runtime.parallelize import ParallelModel


def save(model: ParallelModel, folder: Path, step: int, keep: int = 3) -> Path:
    """Writes the checkpoint ``step-NNNNNNNN`` and waits until it is whole; every process must call it."""
    writer = CheckpointWriter(model, folder, keep)
    path = writer.save(step)
    writer.wait()
    return path


class CheckpointWriter:
    """Writes one checkpoint after the other; every process of the run has one and calls it alike.

    Args:
        folder: where the checkpoints lie.
        keep: how many of the newest to keep; older ones are deleted once a new one is whole.
        settings: of the run, kept beside the tensors in run.json.
    """

    def __init__(
        self, model: ParallelModel, folder: Path, keep: int = 3, settings: dict[str, Any] | None = None
    ) -> None:
        self.model, self.folder, self.keep, self.settings = model, folder, keep, settings or {}
        together = dist.is_initialized()
        self._group = dist.new_group(backend="gloo") if together else None
        self._rank = dist.get_rank() if together else 0
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None

    def save(self, step: int) -> Path:
        """Begins to write the state after ``step`` steps; training may go on at once. Waits for the one before it.

        Raises:
            RunError: the folder cannot be made, or the checkpoint before could not be written.
        """
        self.wait()
        final, aside = self.folder / f"step-{step:08d}", self.folder / f".step-{step:08d}.partial"
        self._make(aside)
        written = async_save(
            state_of(self.model), checkpoint_id=str(aside), process_group=self._group, no_dist=self._group is None
        )
        assert not isinstance(written, AsyncSaveResponse)  # that is for stagers that copy in a thread
        scale = self.model.loss_scale
        run = {**self.settings, "step": step, "loss_scale": scale.to_json() if scale else None}
        self._pending = self._thread.submit(self._finish, written, aside, final, run)
        return final

    def _make(self, aside: Path) -> None:
        """A fresh folder, made by the first process; an error is raised on all."""
        fault: list[str | None] = [None]
        if self._rank == 0:
            try:
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
            except OSError as error:
                fault = [str(error)]
        if self._group is not None:
            dist.broadcast_object_list(fault, src=0, group=self._group)
        if fault[0]:
            raise self._failed(fault[0])

    def _failed(self, why: object) -> RunError:
        return RunError(
            f"a checkpoint could not be written to {str(self.folder)!r}: {why}", "Check space and permissions"
        )

    def wait(self) -> None:
        """Until the last checkpoint is whole on every process.

        Raises:
            RunError: it could not be written; says why.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except Exception as error:
            raise self._failed(error) from error

    def _finish(self, written: Future[Any], aside: Path, final: Path, run: dict[str, Any]) -> None:
        written.result()
        mine = checksums(aside.glob(f"__{self._rank}_*"), aside)
        parts: list[dict[str, str]] = [mine]
        if self._group is not None:
            parts = [{}] * dist.get_world_size()
            dist.all_gather_object(parts, mine, group=self._group)
        if self._rank == 0:
            self._complete(aside, final, run, {name: sum_ for part in parts for name, sum_ in part.items()})
        if self._group is not None:
            dist.barrier(self._group)

    def _complete(self, aside: Path, final: Path, run: dict[str, Any], sums: dict[str, str]) -> None:
        """On the first process: hashes what none has hashed (the metadata), writes run.json, renames, tidies up."""
        sums |= checksums((p for p in files_of(aside) if p.relative_to(aside).as_posix() not in sums), aside)
        graph = self.model.graph
        run = {**run, "fingerprint": graph.fingerprint, "tied": graph.tied, "files": sums}
        (aside / RUN).write_text(json.dumps(run))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(aside, final)
        before = [p for p in checkpoints(self.folder) if p.name <= final.name]  # a later one may be of another run
        for old in [*before[: -self.keep], *partial(self.folder)]:
            shutil.rmtree(old, ignore_errors=True)
