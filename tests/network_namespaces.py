"""Two network namespaces joined by a link of a chosen bandwidth: for gloo, two hosts. Needs root, ``ip`` and ``tc``."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

INTERFACE = "wire"  # its name inside each namespace
CLONE_NEWNET = 0x40000000  # linux/sched.h
QUEUE_MS = 50


def available() -> str:
    """Why namespaces cannot be made here, or an empty text."""
    if os.geteuid() != 0:
        return "not root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{missing[0]} is not installed"
    name = f"autopar-{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=10)
    if tried.returncode:
        return tried.stderr.strip()
    _run("ip", "netns", "del", name)
    return ""


@contextmanager
def two_hosts(megabit_s: int) -> Iterator[tuple[str, str]]:
    """Names of two namespaces, each limited to send ``megabit_s`` to the other; removed at the end."""
    names = (f"autopar-{os.getpid()}-a", f"autopar-{os.getpid()}-b")
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        ends = [["name", INTERFACE, "netns", name] for name in names]
        _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for number, name in enumerate(names, 1):
            _run("ip", "-n", name, "address", "add", f"10.213.0.{number}/30", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            burst = max(32_000, megabit_s * 1_000_000 // 8 // 200)  # what 5 ms carry: timers are coarser than packets
            limit = ["burst", str(burst), "latency", f"{QUEUE_MS}ms"]
            _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", f"{megabit_s}mbit", *limit)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10)


def enter(name: str) -> None:
    """Moves this thread, and those that it starts from now on, into a namespace and points gloo at its link."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"namespace {name!r} cannot be entered")
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=10)
