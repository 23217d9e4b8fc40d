"""Capture of Llama 3 from 8B to 405B: traced one by one, with copied layers, and read from disk; CPU seconds, memory.

    PYTHONPATH=. python tests/benchmarks/bench_capture.py [8b 70b 405b]

Every capture runs in a process of its own, whose CPU seconds exclude imports and building the config.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from autopar.model.capture import capture
from autopar.model.huggingface import load_config
from autopar.model.store import VARIABLE
from tests.benchmarks.llama import LLAMA_8B, LLAMA_70B, LLAMA_405B

CONFIGS = {"8b": LLAMA_8B, "70b": LLAMA_70B, "405b": LLAMA_405B}


def measure(name: str, afresh: bool) -> dict[str, float]:
    """One capture in this process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(CONFIGS[name]))
        job = load_config(str(path))
        begun = time.process_time()
        graph = capture(job, 1, "cuda", afresh=afresh)
        seconds = time.process_time() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"cpu_s": seconds, "peak_gb": peak / 1e9, "operators": sum(1 for _ in graph.of_kind("op"))}


def main() -> None:
    """Captures each model in the three ways."""
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(sys.argv[2], sys.argv[3] == "traced")))
        return
    print(f"{'Llama 3':8} {'operators':>9} {'traced':>9} {'peak':>8} {'copied':>9} {'peak':>8} {'read':>9} {'peak':>8}")
    for name in sys.argv[1:] or list(CONFIGS):
        found = []
        with tempfile.TemporaryDirectory() as kept:
            for how in ("traced", "copied", "read"):
                command = [sys.executable, __file__, "--one", name, how]
                env = os.environ | {VARIABLE: kept}
                done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600, env=env)
                found.append(json.loads(done.stdout.splitlines()[-1]))
        columns = " ".join(f"{one['cpu_s']:7.2f} s {one['peak_gb']:5.2f} GB" for one in found)
        print(f"{name:8} {found[0]['operators']:9} {columns}")


if __name__ == "__main__":
    main()
