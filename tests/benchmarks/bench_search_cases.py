"""Searches of published models on the clusters that train them: CPU seconds, peak memory, the best plan and its gap.

    PYTHONPATH=. python tests/benchmarks/bench_search_cases.py [--time-limit S] [CASE ...]

Without cases the short ones run. Every case runs in its own process, so that its peak memory is its own; capturing
happens inside the search and its CPU seconds are printed apart.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.model.huggingface import load_config
from autopar.planner.planner import describe_plan
from tests.benchmarks.llama import LLAMA_8B, LLAMA_70B, LLAMA_405B, llama
from tests.benchmarks.timed_search import timed_search


@dataclass(frozen=True)
class Case:
    """One search.

    Attributes:
        config: as in a Hugging Face ``config.json``.
        cluster: a name in profiles/clusters.
        batch: samples a step; of ``length`` tokens.
    """

    config: dict[str, Any]
    cluster: str
    batch: int
    length: int = 2048


def gpt(layers: int, hidden: int, heads: int, positions: int = 2048) -> dict[str, Any]:
    """GPT-3's shapes (Brown et al. 2020, arXiv 2005.14165, table 2.1)."""
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "n_positions": positions,
        "vocab_size": 51200,
    }


GPT_175B = gpt(96, 12288, 96)
MIXTRAL = llama(56, 6144, 16384, 48, model_type="mixtral", architectures=["MixtralForCausalLM"], vocab_size=32768)
MIXTRAL |= {"num_local_experts": 8, "num_experts_per_tok": 2}
T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 1024, "d_ff": 65536}
T5 |= {"d_kv": 128, "num_heads": 128, "num_layers": 24, "vocab_size": 32128, "n_positions": 512}
DEEPSEEK_V3 = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}  # its defaults are V3's shapes
VIT_22B = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 6144}
VIT_22B |= {"num_hidden_layers": 48, "num_attention_heads": 48, "intermediate_size": 24576, "patch_size": 14}

CASES = {
    "gpt-1.3b-8-a100": Case(gpt(24, 2048, 16), "dgx-a100-8", 64),
    "gpt-7b-8-a100": Case(gpt(32, 4096, 32), "dgx-a100-8", 64),
    "llama-8b-8-h100": Case(LLAMA_8B, "dgx-h100-8", 64, 4096),
    "llama-8b-8-4090": Case(LLAMA_8B, "rtx-4090-8", 64, 4096),
    "llama-8b-a100-v100": Case(LLAMA_8B, "a100-v100-32", 64, 4096),
    "llama-70b-64-h100": Case(LLAMA_70B, "dgx-h100-64", 128, 4096),
    "gpt-175b-64-a100": Case(GPT_175B, "dgx-a100-64", 64),
    "gpt-175b-1024-a100": Case(GPT_175B, "dgx-a100-1024", 1536),
    "llama-405b-1024-h100": Case(LLAMA_405B, "dgx-h100-1024", 256, 8192),
    "mixtral-8x22b-256-h100": Case(MIXTRAL, "h100-rail-256", 256, 4096),
    "deepseek-v3-2048-h100": Case(DEEPSEEK_V3, "h100-3tier-2048", 2048, 4096),
    "t5-11b-8-v100": Case(T5, "dgx-v100-8", 64, 512),
    "vit-22b-64-a100": Case(VIT_22B, "dgx-a100-64", 1024),
}
SHORT = ("gpt-1.3b-8-a100", "gpt-7b-8-a100", "llama-8b-8-h100", "llama-8b-8-4090")


def run(name: str, limit: float | None) -> dict[str, Any]:
    """One case in this process."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case.config))
        length = None if case.config["model_type"] == "vit" else case.length
        job, cluster = load_config(folder, length), Cluster.load(case.cluster)
        precision = "bf16" if "v100" not in cluster.device.name else "fp16"
        try:
            found, capturing, searching = timed_search(job, cluster, case.batch, precision, time_limit_s=limit)
        except AutoparError as error:
            return {"plan": f"{error.what} {error.remedy}"}
    best = found.plans[0]
    return {
        "capture_s": round(capturing, 1),
        "search_s": round(searching, 1),
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "step_s": round(best.estimate["step_time_s"], 4),
        "bound_s": round(found.lower_bound_s, 4),
        "gap_pct": round(100 * (best.optimality_gap or 0.0), 2),
        "complete": found.complete,
        "plan": f"{describe_plan(best)} x {best.micro_batches}, {best.schedule}",
    }


def main() -> None:
    """Runs cases one after the other and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--time-limit", type=float)
    parser.add_argument("--here", action="store_true", help="one case in this process, printed as JSON")
    args = parser.parse_args()
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"unknown {', '.join(sorted(unknown))}; known: {', '.join(CASES)}")
    if args.here:
        print(json.dumps(run(args.cases[0], args.time_limit)))
        return
    columns = ("capture_s", "search_s", "memory_mib", "step_s", "bound_s", "gap_pct", "complete", "plan")
    table = Table("case", *columns)
    for name in args.cases or SHORT:
        limit = [] if args.time_limit is None else ["--time-limit", str(args.time_limit)]
        done = subprocess.run([sys.executable, __file__, "--here", name, *limit], stdout=subprocess.PIPE, text=True)
        lines = done.stdout.splitlines()
        result = json.loads(lines[-1]) if done.returncode == 0 and lines else {"plan": f"failed ({done.returncode})"}
        table.add_row(name, *(str(result.get(column, "")) for column in columns))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
