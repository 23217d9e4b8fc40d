"""Exports say what the plan says, or name what they leave out."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.errors import InputError
from autopar.export import TARGETS, export
from autopar.export.exported import Exported
from autopar.plan import Mesh, Plan
from tests.cli.command import GPT, autopar, refuse, succeed
from tests.export.plans import ALL_FULL, PLANS, plan_of


def flags(made: Exported) -> dict[str, list[str]]:
    """The flags of a script and their values."""
    inside = made.text.split("ARGS=(\n")[1].split("\n)\n")[0]
    words = [shlex.split(line) for line in inside.splitlines()]
    return {line[0]: line[1:] for line in words}


def mentions(made: Exported, word: str) -> bool:
    return any(word in sentence for sentence in made.not_expressed)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_goes_to_every_target(name: str, target: str) -> None:
    made = export(PLANS[name], target)
    assert made.target == target
    assert "8" in made.text or "4" in made.text
    if made.text.startswith("#!"):
        subprocess.run(["bash", "-n"], input=made.text, text=True, check=True, timeout=20)


def test_torchtitan_counts_a_local_batch_over_the_pipeline() -> None:
    piped, plain = flags(export(PLANS["pipeline"], "torchtitan")), flags(export(PLANS["hybrid"], "torchtitan"))
    assert piped["--training.local_batch_size"] == ["8"]  # 4 micro-batches of 2
    assert piped["--parallelism.pipeline_parallel_microbatch_size"] == ["2"]
    parts = piped["--parallelism.module_fqns_per_model_part"]
    assert parts == ["tok_embeddings,layers.0,layers.1", "layers.2,layers.3,norm,lm_head"]
    assert plain["--training.local_batch_size"] == ["2"]  # accumulated 4 times
    assert plain["--training.global_batch_size"] == ["64"]
    assert "activation-checkpoint:full" in plain


def test_megatron_stages_and_recomputation() -> None:
    made = flags(export(PLANS["pipeline"], "megatron"))
    assert made["--pipeline-model-parallel-layout"] == ["Et*2|t*2L"]
    assert made["--recompute-num-layers"] == ["1"]
    assert made["--data-parallel-sharding-strategy"] == ["optim_grads_params"]
    assert "--sequence-parallel" in made
    uneven = plan_of(Mesh(pp=2), {"layers.3": "full"}, stages=["embed", "layers.1"])
    said = export(uneven, "megatron")
    assert flags(said)["--pipeline-model-parallel-layout"] == ["Et|t*3L"]
    assert mentions(said, "which layers are recomputed")


def test_what_cannot_be_said_is_named() -> None:
    assert mentions(export(PLANS["zero1"], "torchtitan"), "zero_stage 1")
    assert mentions(export(PLANS["pipeline"], "deepspeed"), "PipelineModule(num_stages=2)")
    assert mentions(export(PLANS["pipeline"], "accelerate"), "pp=2")
    assert mentions(export(PLANS["tensor"], "fsdp"), "tp=4")
    cut_in_head = plan_of(Mesh(pp=2), stages=["embed", "head"], schedule="gpipe")
    assert mentions(export(cut_in_head, "megatron"), "schedule gpipe")
    mixed = plan_of(Mesh(dp_replicate=8), {"layers.0": "full"})
    assert mentions(export(mixed, "torchtitan"), "recompute differs")


def test_unknown_targets_and_nodes_are_refused() -> None:
    with pytest.raises(InputError, match="torchtitan, megatron"):
        export(PLANS["data"], "horovod")
    with pytest.raises(InputError, match="does not divide"):
        export(PLANS["data"], "slurm", devices_per_node=3)
    with pytest.raises(InputError, match="--devices-per-node"):
        export(plan_of(Mesh(dp_replicate=8), cluster="nowhere"), "slurm")


def test_command_writes_the_file_and_says_how_to_use_it(tmp_path: Path) -> None:
    PLANS["data"].save(tmp_path / "plan.json")
    document = succeed("export", "plan.json", "--to", "deepspeed", "-o", "ds.json", cwd=tmp_path)
    assert json.loads((tmp_path / "ds.json").read_text())["train_batch_size"] == 64
    assert "ds.json" in document["use"]
    assert document["not_expressed"]
    refuse("export", "plan.json", "--to", "jax", cwd=tmp_path)


def test_fsdp_module_shards_a_real_model(tmp_path: Path) -> None:
    plan = plan_of(Mesh(dp_shard=2), {"blocks.1": "full"}, precision="fp32", cluster="local-cpu-2")
    renamed = plan.model_dump_json().replace("layers.", "blocks.")
    plan = Plan.model_validate_json(renamed)
    blocks = [b.model_copy(update={"recompute": "full"}) if b.name == "blocks.1" else b for b in plan.blocks]
    made = export(plan.model_copy(update={"blocks": blocks}), "fsdp")
    (tmp_path / "settings.py").write_text(made.text)
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist, settings, autopar\n"
        "from torch.distributed.tensor import DTensor\n"
        "dist.init_process_group('gloo')\n"
        f"job = autopar.load({GPT!r})\n"
        "torch.manual_seed(0)\n"
        "whole = job.build_model()\n"
        "batch = job.example_batch(2)\n"
        "expected = job.compute_loss(whole(batch['input_ids']), batch)\n"
        "model = settings.apply(whole)\n"
        "loss = job.compute_loss(model(batch['input_ids']), batch)\n"
        "loss.backward()\n"
        "assert torch.allclose(loss, expected)\n"
        "assert all(isinstance(p, DTensor) and p.grad is not None for p in model.parameters())\n"
        "assert any('_checkpoint_wrapped_module' in n for n, _ in model.named_modules())\n"
        "print('sharded', flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("sharded") == 2, done.stderr


def test_slurm_script_trains(tmp_path: Path) -> None:
    """The script itself, with srun and scontrol of a cluster of one node: this one."""
    searched = ["search", GPT, "--cluster", "local-cpu-2", "--global-batch", "8", "--pin", "dp=2", "--pin"]
    assert autopar(*searched, "micro_batch=4", "-o", "plan.json", cwd=tmp_path).returncode == 0
    assert autopar("export", "plan.json", "--to", "slurm", "-o", "job.sh", cwd=tmp_path).returncode == 0
    for name, body in {"srun": 'exec "${@:2}"', "scontrol": "echo localhost"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    root = str(Path(__file__).parents[2])
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": root,
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "here",
        "MASTER_PORT": "0",
    }
    words = ["bash", "job.sh", "--steps", "2", "--json"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    assert (summary["steps"], summary["processes"]) == (2, 2)


def test_full_recomputation_of_a_sharded_stack() -> None:
    text = export(plan_of(Mesh(dp_shard=8), ALL_FULL), "fsdp").text
    assert 'RECOMPUTE = ["layers.0", "layers.1", "layers.2", "layers.3"]' in text
    assert "param_dtype=torch.bfloat16, reduce_dtype=torch.float32" in text
