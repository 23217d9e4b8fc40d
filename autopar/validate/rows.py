"""Measured runs: one row of the CSV, typed; an empty cell is None."""

from __future__ import annotations

import csv
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from autopar.errors import InputError


class Row(BaseModel):
    """One training run; sizes in elements, memory in GiB, ``step_time_s`` of one step of ``global_batch``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    source: str = ""
    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    vocab: int
    tied_embeddings: int | None = None
    experts: int | None = None
    top_k: int | None = None
    moe_ffn: int | None = None
    shared_expert_ffn: int | None = None
    dense_layers: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    seq_len: int
    gpu: str
    gpu_memory_gib: float | None = None
    gpus: int
    gpus_per_node: int
    intra_node: str | None = None
    inter_node_gbps_per_gpu: float | None = None
    precision: str
    dp: int | None = None
    zero_stage: int | None = None
    tp: int | None = None
    sequence_parallel: int | None = None
    cp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    ep: int | None = None
    micro_batch: int | None = None
    global_batch: int
    recompute: str | None = None
    flash_attention: int | None = None
    compile: int | None = None
    overlap: str | None = None
    step_time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    peak_allocated_gib: float | None = None
    peak_reserved_gib: float | None = None

    @field_validator("*", mode="before")
    @classmethod
    def _empty(cls, value: object) -> object:
        return None if value == "" else value

    @property
    def group(self) -> str:
        """The part of the id before the first dash."""
        return self.id.split("-", 1)[0]

    @property
    def measured_s(self) -> float | None:
        """The step time, as published or from the throughput."""
        if self.step_time_s is not None:
            return self.step_time_s
        if self.tokens_per_s_per_gpu:
            return self.global_batch * self.seq_len / self.gpus / self.tokens_per_s_per_gpu
        return None


def read_rows(path: str | Path) -> tuple[list[Row], list[tuple[str, str]]]:
    """Reads a table of runs.

    Returns:
        The rows, and (id, fault) of the rows that have a faulty cell.

    Raises:
        InputError: the file is missing, or lacks the columns ``id`` and ``family``.
    """
    try:
        with open(path, newline="") as file:
            raw = list(csv.DictReader(file))
    except OSError as error:
        raise InputError(f"table {str(path)!r} cannot be read: {error.strerror}", "Name a CSV file of runs") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"table {str(path)!r} is no CSV file: {error}", "Name a CSV file of runs") from None
    missing = [c for c in ("id", "family", "layers", "hidden", "gpu", "gpus") if raw and c not in raw[0]]
    if not raw or missing:
        raise InputError(
            f"table {str(path)!r} has {'no rows' if not raw else 'no column ' + missing[0]}",
            "See profiles/measured/training_runs.csv for the columns",
        )
    rows, faults = [], []
    for number, cells in enumerate(raw, 2):
        try:
            rows.append(Row.model_validate({k: v for k, v in cells.items() if k is not None}))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            faults.append((cells.get("id") or f"line {number}", f"{where}: {first['msg']} (value {first['input']!r})"))
    return rows, faults
