"""The measuring processes: started, fed and heard by one parent."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from autopar.errors import RunError
from autopar.profiler.tasks import OperatorTask

ORDER_FILE, SOCKET_FILE = "order", "socket"
Message = tuple[str, Any]


@dataclass(frozen=True)
class Order:
    """What the processes are to measure.

    Attributes:
        device: ``cpu`` or ``cuda``.
        threads: of each process.
        scope: link level that joins the processes.
        collectives, overheads: whether to measure them.
        tasks: operators, the most important first.
        budget_s: for everything, counted from when all processes have started.
        model: source of the model whose optimizer is timed, or None for AdamW.
        micro_batches: sizes at which the whole graph of the model is timed.
    """

    processes: int
    device: str
    threads: int
    scope: str
    collectives: bool
    overheads: bool
    tasks: tuple[OperatorTask, ...]
    budget_s: float
    model: str | None = None
    micro_batches: tuple[int, ...] = ()


def run_workers(order: Order, hear: Callable[[str, Any], None]) -> None:
    """Runs an order to its end; ``hear(kind, result)`` is called in this process with each result as it comes.

    The processes are fresh interpreters rather than copies of this one, so that any program may call this, guarded
    main module or not.

    Raises:
        RunError: a process died; its rank and error are given, the others are stopped.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-") as name:
        folder = Path(name)
        (folder / ORDER_FILE).write_bytes(pickle.dumps(order))
        with Listener(str(folder / SOCKET_FILE), "AF_UNIX", backlog=order.processes) as listener:
            workers = [_start(folder, rank, order.threads) for rank in range(order.processes)]
            messages: Queue[Message] = Queue()
            threading.Thread(target=_accept, args=(listener, order.processes, messages), daemon=True).start()
            try:
                _listen(messages, workers, hear, folder)
            finally:
                _stop(workers)


def _start(folder: Path, rank: int, threads: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-W", "ignore", "-m", "autopar.profiler.worker", str(folder), str(rank)]
    with (folder / f"stderr-{rank}").open("wb") as errors:
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)


def _stop(workers: list[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        try:
            worker.wait(timeout=3 if worker.returncode is None else 0)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def _accept(listener: Listener, count: int, messages: Queue[Message]) -> None:
    """Hands on what every process sends, until the listener is closed."""
    for _ in range(count):
        try:
            connection = listener.accept()
        except OSError:  # closed: the run is over
            return
        threading.Thread(target=_forward, args=(connection, messages), daemon=True).start()


def _forward(connection: Connection[Any, Any], messages: Queue[Message]) -> None:
    while True:
        try:
            messages.put(connection.recv())
        except (EOFError, OSError):
            return


def _listen(
    messages: Queue[Message],
    workers: list[subprocess.Popen[bytes]],
    hear: Callable[[str, Any], None],
    folder: Path,
) -> None:
    while True:
        try:
            kind, result = messages.get(timeout=0.2)
        except Empty:
            _check(workers, folder)
            continue
        if kind == "failed":
            rank, text = result
            raise RunError(f"measuring process {rank} failed: {text.strip().splitlines()[-1]}", text)
        if kind == "done":
            return
        hear(kind, result)


def _check(workers: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """A process that has ended without a word was killed, most often for memory, or could not start."""
    for rank, worker in enumerate(workers):
        if worker.poll() not in (None, 0):
            said = (folder / f"stderr-{rank}").read_text(errors="replace").strip().splitlines()
            raise RunError(
                f"measuring process {rank} ended with exit code {worker.returncode}"
                + (f": {said[-1]}" if said else ""),
                "" if said else "Out of memory? Measure fewer shapes or processes",
            )
    if all(worker.returncode == 0 for worker in workers):
        raise RunError("the measuring processes ended without a result", "Measure again with a larger --budget")
