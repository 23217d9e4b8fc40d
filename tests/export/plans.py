"""Plans to export: stacks of layers under any mesh, without a model behind them."""

from __future__ import annotations

from typing import Any

from autopar.plan import BlockPlan, ClusterRef, Layout, Mesh, ModelRef, Plan

EVEN = ("embed", "layers.2")


def plan_of(mesh: Mesh, recompute: dict[str, str] | None = None, cluster: str = "dgx-h100-8", **changes: Any) -> Plan:
    """A plan of four layers between embedding and head; ``recompute`` by name of the block."""
    names = ["embed", *(f"layers.{i}" for i in range(4)), "head"]
    again = recompute or {}
    blocks = [BlockPlan(name=n, layout="any", recompute=again.get(n, "none")) for n in names]  # type: ignore[arg-type]
    cut = "S(1)" if mesh.tp > 1 else "R"
    settings: dict[str, Any] = {
        "stages": ["embed"] if mesh.pp == 1 else list(EVEN),
        "micro_batch": 2,
        "micro_batches": 4,
        "zero_stage": 3 if mesh.dp_shard > 1 else 0,
        "precision": "bf16",
        **changes,
    }
    return Plan(
        model=ModelRef(source="model.py", fingerprint="0"),
        cluster=ClusterRef(name=cluster, devices=mesh.devices),
        global_batch=settings["micro_batch"] * settings["micro_batches"] * mesh.dp,
        mesh=mesh,
        blocks=blocks,
        layouts={"any": Layout(outputs=[{"tp": cut}])},
        **settings,
    )


ALL_FULL = {f"layers.{i}": "full" for i in range(4)}
PLANS = {
    "data": plan_of(Mesh(dp_replicate=8)),
    "hybrid": plan_of(Mesh(dp_replicate=2, dp_shard=4), ALL_FULL),
    "tensor": plan_of(Mesh(tp=4, dp_replicate=2), precision="fp32"),
    "pipeline": plan_of(Mesh(pp=2, tp=2, dp_shard=2), {"layers.0": "full", "layers.2": "full"}),
    "virtual": plan_of(
        Mesh(pp=2, dp_replicate=4),
        stages=["embed", "layers.1", "layers.2", "layers.3"],
        schedule="interleaved_1f1b",
        virtual_stages=2,
    ),
    "zero1": plan_of(Mesh(dp_shard=8), zero_stage=1, offload="optimizer"),
}
