"""Launch: starts a run's processes on this machine, or joins those that torchrun started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from autopar.errors import AutoparError, PlanError, RunError
from autopar.model.capture import capture
from autopar.model.spec import load
from autopar.plan import Plan
from autopar.runtime.metrics import check_tensorboard
from autopar.runtime.parallelize import check_runnable
from autopar.runtime.pipeline import check_schedule
from autopar.runtime.trainer import Options
from autopar.runtime.worker import work
from autopar.sharding.resolve import resolve_plan

GRACE_S = 10.0  # between asking a process to stop and killing it
FOLLOW_S = 3.0  # in which processes end that waited for one that failed
CONSEQUENCES = ("Connection closed", "Connection reset", "Broken pipe", "Timed out waiting", "timed out")  # gloo, NCCL


def run(plan: Plan, source: str, options: Options, timeout_s: float = 300.0) -> dict[str, Any]:
    """Trains with a plan.

    Under torchrun (``WORLD_SIZE`` is set) this process is one of the run's; else the processes are started here.

    Args:
        plan: checked against the model before anything starts.
        source: the model, as :func:`autopar.model.spec.load` takes it.
        timeout_s: how long a process waits for its peers before it gives up.

    Returns:
        The run's summary (see :func:`autopar.runtime.trainer.train`).

    Raises:
        PlanError: the plan does not go with the model or the number of processes.
        RunError: a process failed; names its rank and its own error. All others have been stopped.
    """
    if options.tensorboard:
        check_tensorboard()
    check_plan(plan, source)
    world = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None
    if world is None:
        return _run_local(plan, source, options, timeout_s)
    if world != plan.mesh.devices:
        raise PlanError(
            f"the plan needs {plan.mesh.devices} processes ({plan.mesh.describe()}), there are {world}",
            f"Start it with torchrun --nproc-per-node {plan.mesh.devices}, or search a plan for {world}",
        )
    return work(plan, source, options, timeout_s)


def check_plan(plan: Plan, source: str) -> None:
    """Everything about a plan that can be known before a process is started.

    Raises:
        PlanError: it was made for another model, holds an impossible placement, or cannot run.
    """
    check_runnable(plan)
    graph = capture(load(source), plan.micro_batch)
    plan.check_model(graph.fingerprint, source)
    check_schedule(graph, plan)
    resolve_plan(graph, plan)


def _run_local(plan: Plan, source: str, options: Options, timeout_s: float) -> dict[str, Any]:
    world = plan.mesh.devices
    with tempfile.TemporaryDirectory(prefix="autopar-run-") as name:
        folder = Path(name)
        plan.save(folder / "plan.json")
        order = {
            "plan": str(folder / "plan.json"),
            "source": source,
            "options": options.to_json(),
            "timeout_s": timeout_s,
            "init_method": f"file://{folder / 'store'}",
            "threads": max(1, (os.cpu_count() or 1) // world),
            "parent": os.getpid(),
        }
        (folder / "order.json").write_text(json.dumps(order))
        with _processes(folder, world, int(order["threads"])) as processes:  # type: ignore[call-overload]
            return _wait(folder, processes)


@contextlib.contextmanager
def _processes(folder: Path, world: int, threads: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts the processes; however the block ends, none is left."""
    processes: list[subprocess.Popen[bytes]] = []

    asked: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        """The processes finish their step and save; a second Ctrl-C stops them at once."""
        asked.append(signum)
        if asked.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    main = _in_main_thread()
    previous = {n: signal.signal(n, forward) for n in (signal.SIGTERM, signal.SIGINT)} if main else {}
    try:
        for rank in range(world):
            env = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "OMP_NUM_THREADS": str(threads),
            }
            command = [sys.executable, "-m", "autopar.runtime.worker", str(folder / "order.json")]
            processes.append(
                subprocess.Popen(command, env=env, stdout=sys.stderr.fileno() if _real(sys.stderr) else None)
            )
        yield processes
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        _end(processes)


def _real(stream: Any) -> bool:
    try:
        return bool(stream.fileno() >= 0)
    except (AttributeError, OSError, ValueError):
        return False


def _in_main_thread() -> bool:
    import threading

    return threading.current_thread() is threading.main_thread()


def _wait(folder: Path, processes: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """Until all have ended well, or one has failed."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            _let_others_follow(processes)
            raise _failure(folder, processes)
        if all(code == 0 for code in codes):
            summary: dict[str, Any] = json.loads((folder / "result-0.json").read_text())["summary"]
            return summary
        time.sleep(0.05)


def _let_others_follow(processes: list[subprocess.Popen[bytes]]) -> None:
    """A process that waits for one that failed ends soon after it with an error of its own; one that hangs does not."""
    end = time.monotonic() + FOLLOW_S
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        time.sleep(0.05)


def _failure(folder: Path, processes: list[subprocess.Popen[bytes]]) -> AutoparError:
    """The error of the process that failed first; broken connections to it are consequences."""
    hanging = [rank for rank, process in enumerate(processes) if process.poll() is None]
    found: list[tuple[bool, float, int, dict[str, Any]]] = []
    for rank, process in enumerate(processes):
        code = process.poll()
        if code in (None, 0):
            continue
        path = folder / f"result-{rank}.json"
        if path.is_file():
            result = json.loads(path.read_text())
            follows = any(sign in result["what"] for sign in CONSEQUENCES)
            found.append((follows, path.stat().st_mtime, rank, result))
        else:
            how = (
                f"killed by {signal.Signals(-code).name}"
                if code is not None and code < 0
                else f"ended with code {code}"
            )
            found.append((False, 0.0, rank, {"what": f"the process was {how}", "remedy": "", "exit_code": 1}))
    follows, _, rank, result = min(found, key=lambda item: item[:3])
    if follows and hanging:
        ranks = f"rank{'s' * (len(hanging) > 1)} {', '.join(map(str, hanging))}"
        return RunError(
            f"{ranks} did not answer: rank {rank} waited in vain ({result['what']}); all processes were stopped",
            "Look at what that process was doing, or wait longer with --timeout",
        )
    if result["exit_code"] == 2:
        return PlanError(result["what"], result["remedy"])
    error = RunError(f"rank {rank} failed: {result['what']}; all other processes were stopped", result["remedy"])
    if "trace" in result:
        error.add_note(f"On rank {rank}:\n{result['trace']}")  # shown by --debug
    return error


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
