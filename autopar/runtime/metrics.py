"""Where the numbers of each step go: a JSONL file, TensorBoard and the console."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autopar.errors import InputError
from autopar.units import format_seconds


class Metrics:
    """The sinks of the first process.

    Args:
        jsonl: file that gets one JSON object a step, or None. Rows of steps to be done again are dropped from it.
        tensorboard: folder for TensorBoard, or None.
        begin: steps done before.

    Raises:
        InputError: a file cannot be written, or TensorBoard is not installed.
    """

    def __init__(self, jsonl: str | None, tensorboard: str | None, begin: int, say: Callable[[str], None]) -> None:
        self._say = say
        self._file = _open(Path(jsonl), begin) if jsonl else None
        self._board = _board_writer()(tensorboard, purge_step=begin + 1) if tensorboard else None

    def write(self, row: dict[str, Any], show: bool) -> None:
        """One step.

        Args:
            show: on the console too.
        """
        if self._file:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        if self._board:
            for key, value in row.items():
                if key != "step" and isinstance(value, int | float):
                    self._board.add_scalar(key, value, row["step"])
        if show:
            self._say(_line(row))

    def close(self) -> None:
        """Flushes and closes."""
        for sink in (self._file, self._board):
            if sink:
                sink.close()


def check_tensorboard() -> None:
    """Refuses ``--tensorboard`` where it is not installed.

    Raises:
        InputError: says how to install it.
    """
    _board_writer()


def _board_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError(
            "--tensorboard needs the package tensorboard, which is not installed", "pip install 'autopar[tensorboard]'"
        ) from None
    return SummaryWriter


def _open(path: Path, begin: int) -> Any:
    try:
        kept = []
        if begin and path.is_file():
            kept = [line for line in path.read_text().splitlines() if line and json.loads(line)["step"] <= begin]
        file = path.open("w")
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"--metrics {str(path)!r} cannot be written: {error}", "Name a new file") from None
    file.writelines(line + "\n" for line in kept)
    return file


def _line(row: dict[str, Any]) -> str:
    predicted = row["predicted_step_time_s"]
    words = [
        f"step {row['step']:>5}",
        f"loss {row['loss']:.4f}",
        f"grad norm {row['grad_norm']:.3f}",
        f"{format_seconds(row['step_time_s'])} (predicted {format_seconds(predicted or math.nan)})",
        f"{row['tokens_per_s']:,.0f} tokens/s",
        f"{row['peak_memory_gib']:.2f} GiB",
    ]
    if row["skipped"]:
        words.append("skipped: not finite")
    if row["slowest_rank"] is not None:
        words.append(f"rank {row['slowest_rank']} lags")
    return "  ".join(words)
