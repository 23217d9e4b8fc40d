"""Parsing and printing of bytes, seconds, rates and counts. Internally: seconds, bytes, bytes/s, FLOPs."""

from __future__ import annotations

GIB = 2**30
MIB = 2**20
GBPS = 1e9 / 8  # one gigabit per second, in bytes per second


def format_bytes(n: float) -> str:
    """Bytes as a person reads them: ``1.5 GiB``."""
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if abs(n) >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n:.0f} B"


def format_seconds(t: float) -> str:
    """Seconds as a person reads them: ``12.3 ms``."""
    if t >= 1:
        return f"{t:.3f} s"
    if t >= 1e-3:
        return f"{t * 1e3:.2f} ms"
    return f"{t * 1e6:.1f} us"


def format_count(n: float) -> str:
    """A count with a decimal prefix: ``7.24 G``."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(n) >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n:.0f}"
