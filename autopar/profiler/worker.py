"""One measuring process: ``python -m autopar.profiler.worker FOLDER RANK``; started by autopar.profiler.workers."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.hardware.profiles import MeasuredCollective, MeasuredGraph, MeasuredOperator
from autopar.model.capture import capture
from autopar.model.graph import OpGraph
from autopar.model.spec import TrainingJob, load
from autopar.profiler.collectives import measure_collectives
from autopar.profiler.operators import engine_call_time, measure
from autopar.profiler.overheads import measure_memory, measure_overheads
from autopar.profiler.tasks import OperatorTask
from autopar.profiler.whole import LARGEST_BYTES, measure_graph
from autopar.profiler.workers import ORDER_FILE, SOCKET_FILE, Order


def main(folder: Path, rank: int) -> None:
    """Carries out the order in a folder and sends what is found to the parent."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    order: Order = pickle.loads((folder / ORDER_FILE).read_bytes())
    with Client(str(folder / SOCKET_FILE), "AF_UNIX") as sender:
        try:
            _measure_all(rank, order, str(folder / "store"), sender)
            if rank == 0:
                sender.send(("done", None))
        except Exception:
            sender.send(("failed", (rank, traceback.format_exc())))
            sys.exit(1)


def _end_with_parent(parent: int) -> None:
    """Ends this process when its parent is gone, so that none is left measuring for nobody."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _measure_all(rank: int, order: Order, store: str, sender: Connection[Any, Any]) -> None:
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
        graphs = _Graphs(order, device)
        graphs.measure()
        _measure_operators(order, device, start, tell)
        for _ in range(2):
            graphs.measure()
        for graph in graphs.least.values():
            tell("graph", graph)
        if order.overheads:
            tell("memory", measure_memory(device))
        dist.barrier()
    finally:
        dist.destroy_process_group()


class _Graphs:
    """Times the whole graphs of a model on several occasions and keeps the least, so that a busy moment of the machine
    is not taken for the cost of running operators together."""

    def __init__(self, order: Order, device: torch.device) -> None:
        self.window_s = min(0.6, 0.02 * order.budget_s)
        self.device, self.processes = device, order.processes
        self.made: list[tuple[TrainingJob, OpGraph]] = []
        self.least: dict[int, MeasuredGraph] = {}
        if order.model is None:
            return
        job = load(order.model)
        for micro_batch in order.micro_batches:
            graph = capture(job, micro_batch)
            if sum(node.meta.nbytes for node in graph.of_kind("parameter")) <= LARGEST_BYTES:
                self.made.append((job, graph))

    def measure(self) -> None:
        for job, graph in self.made:
            dist.barrier()
            result = measure_graph(job, graph, self.device, self.window_s)
            times = torch.tensor([result.forward_s, result.backward_s], device=self.device)
            dist.all_reduce(times)
            forward, backward = (times / self.processes).tolist()
            before = self.least.get(graph.batch_size)
            if before is not None:
                forward, backward = min(forward, before.forward_s), min(backward, before.backward_s)
            self.least[graph.batch_size] = replace(result, forward_s=forward, backward_s=backward)


def _optimizer_of(model: str | None) -> Any:
    if model is None:
        return None
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
