"""Data: the same samples in the same order whatever the mesh; each data shard loads only its own rows.

Step ``k`` trains on the rows from ``k * global_batch`` of a seeded permutation of the dataset, reshuffled each epoch;
data shard ``d`` takes the d-th contiguous part of a global batch. So a run can stop and go on, on any mesh, without
losing or repeating a sample. A last partial batch of an epoch is completed from the next epoch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate

from autopar.errors import InputError
from autopar.model.graph import OpGraph
from autopar.model.spec import TrainingJob
from autopar.plan import Plan


class Source(Protocol):
    """Gives this process's data shard of a step, by batch key."""

    def shard(self, step: int) -> dict[str, torch.Tensor]:
        """Rows of this data shard of the global batch of a step (counted from 0)."""


class FixedBatch:
    """``example_batch(global_batch)``: the same on every step and mesh."""

    def __init__(self, job: TrainingJob, plan: Plan, data_shard: int) -> None:
        batch = job.flatten_batch(job.example_batch(plan.global_batch))
        self._rows = {k: v.chunk(plan.mesh.dp)[data_shard] for k, v in batch.items()}

    def shard(self, step: int) -> dict[str, torch.Tensor]:
        return self._rows


class Rows:
    """A map-style dataset, shuffled by seed."""

    def __init__(self, dataset: Any, job: TrainingJob, plan: Plan, data_shard: int) -> None:
        if len(dataset) < 1:
            raise InputError("the dataset is empty", "Give at least one sample")
        self.dataset, self.job, self.seed = dataset, job, plan.seed
        self.global_batch, self.rows = plan.global_batch, plan.global_batch // plan.mesh.dp
        self.first = data_shard * self.rows
        self._orders: dict[int, list[int]] = {}

    def shard(self, step: int) -> dict[str, torch.Tensor]:
        begin = step * self.global_batch + self.first
        samples = [self.dataset[self._index(i)] for i in range(begin, begin + self.rows)]
        batch = default_collate(samples)
        return self.job.flatten_batch(tuple(batch) if isinstance(batch, list) else batch)

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, len(self.dataset))
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order: list[int] = torch.randperm(len(self.dataset), generator=generator).tolist()
            self._orders = {e: o for e, o in self._orders.items() if e >= epoch - 1} | {epoch: order}
        return self._orders[epoch][place]


class Tokens:
    """A memory-mapped file of tokens cut into sequences: the bytes of a text, or the uint16 words of a ``.bin``."""

    def __init__(self, path: Path, graph: OpGraph) -> None:
        inputs = {n.op: n for n in graph.of_kind("input")}
        if set(inputs) != {"input_ids", "labels"} or len(inputs["input_ids"].meta.shape) != 2:
            raise InputError(
                f"--data {str(path)!r} holds tokens, the model takes {', '.join(inputs)}",
                "Define build_dataset(split) in model.py, or name the inputs input_ids and labels",
            )
        try:
            dtype = np.uint8 if path.suffix != ".bin" else np.uint16
            self.tokens = np.memmap(path, dtype=dtype, mode="r")
        except (OSError, ValueError) as error:
            raise InputError(f"--data {str(path)!r} cannot be read: {error}", "Give a text or .bin file") from None
        self.length = inputs["input_ids"].meta.shape[1]
        if len(self) < 1:
            raise InputError(f"--data {str(path)!r} has {len(self.tokens)} tokens", f"Give at least {self.length + 1}")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.tokens[index * self.length : (index + 1) * self.length + 1].astype(np.int64)
        return {"input_ids": torch.from_numpy(piece[:-1].copy()), "labels": torch.from_numpy(piece[1:].copy())}


def make_source(job: TrainingJob, plan: Plan, graph: OpGraph, data_shard: int, path: str | None) -> Source:
    """The data of a run: a file, else the job's training dataset, else its fixed example batch.

    Raises:
        InputError: the file is missing, unreadable, too short or not for this model.
    """
    if path is not None:
        if not Path(path).is_file():
            raise InputError(f"--data {path!r} does not exist", "Give a text file or a .bin of tokens")
        return Rows(Tokens(Path(path), graph), job, plan, data_shard)
    if job.build_dataset is not None:
        return Rows(job.build_dataset("train"), job, plan, data_shard)
    return FixedBatch(job, plan, data_shard)
