"""Capture of Llama 3 from 8B to 405B: CPU seconds and peak memory with copied layers, and traced one by one.

    PYTHONPATH=. python tests/benchmarks/bench_capture.py [8b 70b 405b]

Every capture runs in a process of its own, whose CPU seconds exclude imports and building the config.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from autopar.model.capture import capture
from autopar.model.huggingface import load_config
from tests.benchmarks.llama import LLAMA_8B, LLAMA_70B, LLAMA_405B

CONFIGS = {"8b": LLAMA_8B, "70b": LLAMA_70B, "405b": LLAMA_405B}


def measure(name: str, copied: bool) -> dict[str, float]:
    """One capture in this process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(CONFIGS[name]))
        job = load_config(str(path))
        begun = time.process_time()
        graph = capture(job, 1, "cuda", copy_layers=copied)
        seconds = time.process_time() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"cpu_s": seconds, "peak_gb": peak / 1e9, "operators": sum(1 for _ in graph.of_kind("op"))}


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(sys.argv[2], sys.argv[3] == "copied")))
        return
    print(f"{'Llama 3':8} {'operators':>9} {'copied':>9} {'peak':>8} {'traced':>9} {'peak':>8} {'ratio':>6}")
    for name in sys.argv[1:] or list(CONFIGS):
        found = []
        for how in ("copied", "traced"):
            command = [sys.executable, __file__, "--one", name, how]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
            found.append(json.loads(done.stdout.splitlines()[-1]))
        one, other = found
        print(
            f"{name:8} {one['operators']:9} {one['cpu_s']:7.2f} s {one['peak_gb']:5.2f} GB {other['cpu_s']:7.2f} s "
            f"{other['peak_gb']:5.2f} GB {other['cpu_s'] / one['cpu_s']:5.1f}x"
        )


if __name__ == "__main__":
    main()
