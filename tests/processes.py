"""Real gloo process groups for tests: started quickly, kept for as many calls as wanted, timed out and reaped.

A fork server imports torch and the runtime once; every group is forked from it.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.network_namespaces import enter

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch.distributed.pipelining", "autopar.runtime.trainer"])
START_S, CALL_S = 120.0, 280.0


class Group:
    """Processes of one gloo group that answer call after call; leave with ``with``.

    Args:
        world: number of processes.
        prepare: runs once before the processes are forked; what it caches, all of them have.
        hosts: network namespaces that the processes are dealt over, or none to stay in this one.
    """

    def __init__(self, world: int, prepare: Callable[[], object] | None = None, hosts: tuple[str, ...] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory()
        pipes = [_SERVER.Pipe() for _ in range(world)]
        self._ranks = [mine for mine, _ in pipes]
        theirs = [other for _, other in pipes]
        self._leader = _SERVER.Process(target=_lead, args=(self._folder.name, theirs, prepare, hosts))
        self._leader.start()
        for other in theirs:
            other.close()
        self._pids: list[int] = []
        self._pids = self._answers(START_S)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls ``function(*args)`` in every process.

        Returns:
            The results by rank.

        Raises:
            AssertionError: a process raised or died; has its traceback. The group is ended.
        """
        for rank in self._ranks:
            rank.send((function, args))
        return self._answers(CALL_S)

    def _answers(self, seconds: float) -> list[Any]:
        end, answers = time.monotonic() + seconds, dict[int, Any]()
        while len(answers) < len(self._ranks):
            waiting = {r: i for i, r in enumerate(self._ranks) if i not in answers}
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, end - time.monotonic()))
            failed = None if ready else f"no answer of ranks {list(waiting.values())} within {seconds} s"
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    ok, answers[rank] = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    ok, answers[rank] = False, "it died"
                if not ok:
                    failed = failed or f"rank {rank}: {answers[rank]}"
            if failed:
                self._end(signal.SIGKILL)
                raise AssertionError(failed)
        return [answers[i] for i in range(len(self._ranks))]

    @property
    def alive(self) -> bool:
        """Whether it can be called."""
        return bool(self._pids)

    def close(self) -> None:
        """Ends the processes in an orderly way, then at all events."""
        with contextlib.suppress(OSError):
            for rank in self._ranks if self._pids else []:
                rank.send(None)
        self._leader.join(20)
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        for pid in self._pids if self._leader.is_alive() else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        self._pids = []
        self._leader.join(10)
        self._leader.kill()
        self._folder.cleanup()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def spawn(world: int, function: Callable[..., Any], *args: Any, hosts: tuple[str, ...] = ()) -> list[Any]:
    """Runs ``function(*args)`` in ``world`` processes of one gloo group; a failure in any is raised here."""
    with Group(world, hosts=hosts) as group:
        return group.run(function, *args)


def _lead(
    folder: str, connections: list[Connection], prepare: Callable[[], object] | None, hosts: tuple[str, ...]
) -> None:
    """Forks the processes and waits for them."""
    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    children = []
    for rank in range(len(connections)):
        pid = os.fork()
        if pid == 0:
            _serve(rank, folder, connections, hosts)
        children.append(pid)
    for connection in connections:
        connection.close()
    for pid in children:
        os.waitpid(pid, 0)


def _serve(rank: int, folder: str, connections: list[Connection], hosts: tuple[str, ...]) -> None:
    """One process: answers calls until it is told to end. Never returns."""
    mine = connections[rank]
    for other in connections:
        if other is not mine:
            other.close()
    _end_with(os.getppid())
    store, world = f"file://{Path(folder) / 'store'}", len(connections)
    try:
        if hosts:
            enter(hosts[rank % len(hosts)])
        dist.init_process_group("gloo", rank=rank, world_size=world, init_method=store, timeout=timedelta(seconds=60))
        mine.send((True, os.getpid()))
        while (call := mine.recv()) is not None:
            function, args = call
            mine.send((True, function(*args)))
        gc.collect()  # models in reference cycles hold tensors and subgroups
        dist.destroy_process_group()
    except EOFError:
        pass
    except BaseException:
        mine.send((False, traceback.format_exc()))
        time.sleep(30)  # the peers' own errors would follow from this one's end
    sys.stdout.flush()
    sys.stderr.flush()
    # A gloo thread that frees a tensor while Python finalizes aborts the process (pytorch/pytorch#179291).
    os._exit(0)


def _end_with(parent: int) -> None:
    """No process outlives the leader, which the fork server's end ends."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
