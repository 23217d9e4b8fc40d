"""The measuring processes: started, fed and heard by one parent."""

from __future__ import annotations

import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from autopar.errors import RunError
from autopar.hardware.profiles import MeasuredCollective, MeasuredOperator
from autopar.profiler.collectives import measure_collectives
from autopar.profiler.operators import engine_call_time, measure
from autopar.profiler.overheads import measure_memory, measure_overheads
from autopar.profiler.tasks import OperatorTask
from autopar.profiler.whole import LARGEST_BYTES, measure_graph


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

    Raises:
        RunError: a process died; its rank and error are given, the others are stopped.
    """
    context = mp.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=_worker, args=(rank, order, str(Path(folder) / "store"), sender), daemon=True)
            for rank in range(order.processes)
        ]
        with _one_thread(order.threads):
            for worker in workers:
                worker.start()
        sender.close()
        try:
            _listen(receiver, workers, hear)
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.terminate()
            for worker in workers:
                worker.join(5)
                if worker.is_alive():
                    worker.kill()
                    worker.join()


class _one_thread:  # noqa: N801  (reads as a statement)
    """Children read the number of OpenMP threads when they start; set it for them, and back."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def __enter__(self) -> None:
        self.before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = str(self.threads)

    def __exit__(self, *exc: object) -> None:
        if self.before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = self.before


def _listen(
    receiver: multiprocessing.connection.Connection,
    workers: list[Any],
    hear: Callable[[str, Any], None],
) -> None:
    while True:
        if receiver.poll(0.2):
            try:
                kind, result = receiver.recv()
            except EOFError:
                kind, result = "gone", None
            if kind == "failed":
                rank, text = result
                raise RunError(f"measuring process {rank} failed: {text.strip().splitlines()[-1]}", text)
            if kind == "done":
                return
            if kind != "gone":
                hear(kind, result)
                continue
        for rank, worker in enumerate(workers):
            if worker.exitcode not in (None, 0):
                raise RunError(
                    f"measuring process {rank} ended with exit code {worker.exitcode}",
                    "Out of memory? Measure fewer shapes or processes",
                )
        if all(worker.exitcode == 0 for worker in workers):
            return


def _worker(rank: int, order: Order, store: str, sender: multiprocessing.connection.Connection) -> None:
    try:
        _measure_all(rank, order, store, sender)
        if rank == 0:
            sender.send(("done", None))
    except BaseException:
        sender.send(("failed", (rank, traceback.format_exc())))
        raise


def _measure_all(rank: int, order: Order, store: str, sender: multiprocessing.connection.Connection) -> None:
    torch.set_num_threads(order.threads)
    device = torch.device(order.device, rank) if order.device == "cuda" else torch.device("cpu")
    backend = "nccl" if order.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=order.processes)
    start = time.perf_counter()

    def tell(kind: str, result: Any) -> None:
        if rank == 0:
            sender.send((kind, result))

    try:
        if order.collectives:
            window = min(0.1, 0.12 * order.budget_s / 45)

            def report(result: MeasuredCollective) -> None:
                tell("collective", result)

            measure_collectives(device, order.scope, window, report)
        if order.overheads:
            tell("overheads", measure_overheads(device, _optimizer_of(order.model)))
        _measure_operators(order, device, start, tell)
        _measure_graphs(order, device, tell)
        if order.overheads:
            tell("memory", measure_memory(device))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _measure_graphs(order: Order, device: torch.device, tell: Callable[[str, Any], None]) -> None:
    if order.model is None or not order.micro_batches:
        return
    from autopar.model.capture import capture
    from autopar.model.spec import load

    job = load(order.model)
    for micro_batch in order.micro_batches:
        graph = capture(job, micro_batch)
        if sum(node.meta.nbytes for node in graph.of_kind("parameter")) > LARGEST_BYTES:
            return
        dist.barrier()
        result = measure_graph(job, graph, device, min(1.5, 0.05 * order.budget_s))
        times = torch.tensor([result.forward_s, result.backward_s], device=device)
        dist.all_reduce(times)
        times /= order.processes
        tell("graph", replace(result, forward_s=float(times[0]), backward_s=float(times[1])))


def _optimizer_of(model: str | None) -> Any:
    if model is None:
        return None
    from autopar.model.spec import load

    return load(model).build_optimizer


def _measure_operators(order: Order, device: torch.device, start: float, tell: Callable[[str, Any], None]) -> None:
    if not order.tasks:
        return
    engine = engine_call_time(device)
    for index, task in enumerate(order.tasks):
        left = order.budget_s - (time.perf_counter() - start)
        flag = torch.tensor([float(left)], device=device)
        dist.broadcast(flag, 0)
        left = float(flag)
        if left <= 0:
            tell("unmeasured", len(order.tasks) - index)
            return
        window = max(0.02, min(0.4, 0.6 * left / (len(order.tasks) - index)))
        result, problem = _try(task, device, window, engine)
        good = torch.tensor([0.0 if problem else 1.0], device=device)
        dist.all_reduce(good, op=dist.ReduceOp.MIN)
        if float(good) < 1 or result is None:
            tell("skipped", (task.op, problem or "failed in another process"))
            continue
        times = torch.tensor([result.forward_s, result.backward_s or 0.0], dtype=torch.float64).to(device)
        dist.all_reduce(times)
        times /= order.processes
        backward = float(times[1]) if result.backward_s is not None else None
        tell("operator", replace(result, forward_s=float(times[0]), backward_s=backward))


def _try(task: OperatorTask, device: torch.device, window: float, engine: float) -> tuple[MeasuredOperator | None, str]:
    """The measurement, or why there is none: an operator that fails or runs out of memory is a fact about its shape.

    ``measure`` is not given a barrier: an operator that fails in one process must not leave the others waiting.
    """
    try:
        return measure(task, device, window, engine), ""
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
