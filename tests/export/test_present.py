"""Settings of other trainers, read back: what an export says is what is read, and it is priced as the plan was."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import InputError
from autopar.export import export
from autopar.export.layers import stack_of
from autopar.export.read_megatron import layers_of
from autopar.export.settings import Settings, read_settings
from autopar.plan import Mesh, Plan
from tests.cli.command import GPT, autopar, refuse, succeed
from tests.export.plans import PLANS, plan_of

MEGATRON = "--tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 8 "


def back(plan: Plan, target: str, folder: Path) -> Settings:
    path = folder / "settings"
    path.write_text(export(plan, target).text)
    return read_settings(target, str(path))


@pytest.mark.parametrize("target", ["torchtitan", "megatron"])
@pytest.mark.parametrize("name", PLANS)
def test_what_an_export_says_is_read(name: str, target: str, tmp_path: Path) -> None:
    plan = PLANS[name]
    read = back(plan, target, tmp_path)
    assert read.mesh_on(plan.mesh.devices) == plan.mesh
    assert (read.micro_batch, read.global_batch) == (plan.micro_batch, plan.global_batch)
    assert read.precision == plan.precision
    assert (read.schedule, read.virtual_stages) == (plan.schedule, plan.virtual_stages)
    if plan.mesh.pp > 1:
        assert read.layers == tuple(map(len, stack_of(plan).stages))
    if target == "megatron" or plan.zero_stage != 1:  # torchtitan's shards divide gradients too
        assert read.zero_stage == plan.zero_stage
    kinds = {b.recompute for b in plan.blocks if b.name.startswith("layers.")}
    assert (read.recompute == "none") == (kinds == {"none"})


def test_a_toml_file_of_torchtitan(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text(
        "[training]\nlocal_batch_size = 4\n[parallelism]\ntensor_parallel_degree = 2\ndata_parallel_shard_degree = -1\n"
        '[activation_checkpoint]\nmode = "full"\n'
    )
    read = read_settings("torchtitan", str(tmp_path / "train.toml"))
    assert read.mesh_on(8) == Mesh(tp=2, dp_shard=4)
    assert (read.micro_batch, read.zero_stage, read.recompute, read.precision) == (4, 3, "full", "bf16")
    assert read.global_batch is None


def test_megatron_words() -> None:
    assert layers_of("Et*3|(tt|)*2tL") == (3, 2, 2, 1)
    read = read_settings("megatron", "--pipeline-model-parallel-size=2 --num-layers 8 --use-distributed-optimizer")
    assert (read.layers, read.zero_stage) == ((4, 4), 1)
    virtual = "--pipeline-model-parallel-size 2 --num-layers 8 --num-layers-per-virtual-pipeline-stage 2"
    assert read_settings("megatron", virtual).layers == (2, 2, 2, 2)
    assert read_settings("megatron", "--overlap-grad-reduce").notes


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--tensor-model-parallel-size two", "two"),
        ("--tensor-model-parallel-size '2", "quote"),
        ("--data-parallel-sharding-strategy all", "all"),
        ("--recompute-granularity some", "some"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout xy", "xy"),
    ],
)
def test_wrong_values_are_named(flags: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        read_settings("megatron", flags)


def test_settings_must_make_the_devices() -> None:
    with pytest.raises(InputError, match="8 devices"):
        read_settings("megatron", "--tensor-model-parallel-size 3").mesh_on(8)


def test_a_plan_comes_back_with_its_estimate(tmp_path: Path) -> None:
    searched = ["search", GPT, "--cluster", "local-cpu-4", "--global-batch", "8", "--pin", "pp=2", "--pin", "dp=2"]
    assert autopar(*searched, "--pin", "micro_batch=1", "-o", "plan.json", cwd=tmp_path).returncode == 0
    plan = Plan.load(tmp_path / "plan.json")
    for target in ("megatron", "torchtitan"):
        assert autopar("export", "plan.json", "--to", target, "-o", target, cwd=tmp_path).returncode == 0
        found = succeed("estimate", GPT, "--cluster", "local-cpu-4", "--from", target, target, cwd=tmp_path)
        if plan.schedule == "1f1b" or target == "torchtitan":  # Megatron-LM knows no GPipe
            assert found["step_time_s"] == pytest.approx(plan.estimate["step_time_s"])
        assert found["plan"]["stages"] == plan.stages
        assert found["plans"][0]["step_time_s"] <= found["step_time_s"]


def test_bad_settings_end_in_one_line(tmp_path: Path) -> None:
    place = ["estimate", GPT, "--cluster", "local-cpu-2"]
    assert "jax" in refuse(*place, "--from", "jax", MEGATRON, cwd=tmp_path)
    assert "nope.sh" in refuse(*place, "--from", "megatron", "nope.sh", cwd=tmp_path)
    assert "--global-batch 9" in refuse(*place, "--global-batch", "9", "--from", "megatron", MEGATRON, cwd=tmp_path)
    assert "--pin" in refuse(*place, "--pin", "tp=2", "--from", "megatron", MEGATRON, cwd=tmp_path)
    assert "--global-batch" in refuse(*place, cwd=tmp_path)


def test_uneven_stages_come_back(tmp_path: Path) -> None:
    assert back(plan_of(Mesh(pp=2), stages=["embed", "layers.1"]), "megatron", tmp_path).layers == (1, 3)
