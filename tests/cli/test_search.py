"""``search --compare``: one's own plan stands beside the ranked ones, priced on the same cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.cost.estimate import estimate
from autopar.hardware.cluster import Cluster
from autopar.plan import Plan
from autopar.planner.planner import search
from tests.cli.command import GPT, refuse, succeed
from tests.cost.plans import gpt


def test_compare_shows_ones_own_plan(tmp_path: Path) -> None:
    cluster = Cluster.load("local-cpu-2")
    mine = search(gpt(), cluster, 8, pins={"tp": 2, "micro_batch": 1, "recompute": "full"}, top=1).plans[0]
    mine.model_copy(update={"estimate": {}}).save(tmp_path / "mine.json")
    common = ["search", GPT, "--global-batch", "8", "--pin", "dp=2", "--compare", str(tmp_path / "mine.json")]
    found = succeed(*common, "--cluster", "local-cpu-2", "-o", str(tmp_path / "best.json"))
    beside = found["baselines"][-1]
    assert beside["name"] == "mine"
    assert beside["step_time_s"] == pytest.approx(estimate(gpt(), mine, cluster).step_time_s)
    assert beside["recompute"] == "full"
    assert beside["step_time_s"] > found["step_time_s"]
    assert Plan.load(tmp_path / "best.json").mesh.dp == 2
    assert "was made for a model with fingerprint" in refuse(
        "search", str(Path(GPT).with_name("mlp.py")), *common[2:], "--cluster", "local-cpu-2"
    )


def test_baselines_of_several_nodes() -> None:
    cluster = Cluster.build("cpu-local", 2, 2, "pcie4-switch", "ethernet")
    found = search(gpt(), cluster, 8, pins={"dp_replicate": 4, "micro_batch": 2}, top=1)
    plans = {name: plan for name, plan, _ in found.baselines}
    assert list(plans) == ["data", "FSDP", "tensor", "pipeline", "Megatron"]
    assert plans["Megatron"] is not None
    assert plans["Megatron"].mesh.describe() == "pp=2 tp=2"
