"""Exports read by the packages they are for, where these are installed."""

from __future__ import annotations

import json
import re
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import Any

import pytest

from autopar.export import export
from autopar.plan import Plan
from tests.export.plans import PLANS
from tests.export.test_export import flags

each = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


@each
def test_torchtitan_parses_the_flags(plan: Plan) -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    tyro = pytest.importorskip("tyro", reason="tyro is not installed")
    from torch.distributed.pipelining.schedules import get_schedule_class
    from torchtitan.config import configs
    from torchtitan.config.manager import ConfigManager, custom_registry
    from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig, FullAC

    ConfigManager()  # registers the rules of its command line

    sections = {
        "training": configs.TrainingConfig,
        "parallelism": configs.ParallelismConfig,
        "compile": configs.CompileConfig,
        "debug": configs.DebugConfig,
    }
    named = [(n, kind, field(default_factory=kind)) for n, kind in sections.items()]
    named.append(("activation_checkpoint", ActivationCheckpointingConfig, field(default_factory=FullAC.Config)))
    config = make_dataclass("Config", named)
    words = [word for name, values in flags(export(plan, "torchtitan")).items() for word in (name, *values)]
    read: Any = tyro.cli(config, args=words, registry=custom_registry)
    assert read.parallelism.tensor_parallel_degree == plan.mesh.tp
    assert read.parallelism.data_parallel_shard_degree == plan.mesh.dp_shard
    assert read.training.global_batch_size == plan.global_batch
    if plan.mesh.pp > 1:
        assert len(read.parallelism.module_fqns_per_model_part) == len(plan.stages)
        assert get_schedule_class(read.parallelism.pipeline_parallel_schedule)
    assert (read.activation_checkpoint is None) == (not any(b.recompute != "none" for b in plan.blocks))


@each
def test_megatron_core_has_every_setting(plan: Plan) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_config import TransformerConfig

    made = flags(export(plan, "megatron"))
    of_the_program = {
        "micro_batch_size",
        "global_batch_size",
        "seed",
        "accumulate_allreduce_grads_in_fp32",
        "ddp_bucket_size",
        "fp8_format",
        "ckpt_format",
        "no_gradient_accumulation_fusion",
    }
    known = {
        f.name for config in (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig) for f in fields(config)
    }
    assert {name[2:].replace("-", "_") for name in made} - of_the_program <= known
    layout = made.get("--pipeline-model-parallel-layout")
    settings: dict[str, Any] = {}
    if layout:
        PipelineParallelLayerLayout(layout[0], plan.mesh.pp).validate_layer_layout(4, 0)
        settings["pipeline_model_parallel_layout"] = layout[0]
    if "--recompute-granularity" in made:
        settings["recompute_granularity"] = made["--recompute-granularity"][0]
        settings["recompute_method"] = made["--recompute-method"][0]
        settings["recompute_num_layers"] = int(made["--recompute-num-layers"][0])
    import torch

    read = TransformerConfig(
        num_layers=int(made["--num-layers"][0]),
        hidden_size=64,
        num_attention_heads=4,
        tensor_model_parallel_size=int(made["--tensor-model-parallel-size"][0]),
        pipeline_model_parallel_size=int(made["--pipeline-model-parallel-size"][0]),
        sequence_parallel="--sequence-parallel" in made,
        pipeline_dtype=torch.bfloat16,
        **settings,
    )
    assert read.tensor_model_parallel_size == plan.mesh.tp
    if plan.virtual_stages > 1:
        assert read.virtual_pipeline_model_parallel_size == plan.virtual_stages


@each
def test_deepspeed_reads_the_configuration(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    from deepspeed.runtime.config import DeepSpeedConfig

    class Ranks:
        """The process groups of the plan, as DeepSpeed asks for them."""

        def get_data_parallel_world_size(self) -> int:
            return plan.mesh.dp

    from deepspeed import comm

    monkeypatch.setattr(comm, "get_rank", lambda *a: 0)
    read = DeepSpeedConfig(json.loads(export(plan, "deepspeed").text), mpu=Ranks())
    assert read.zero_config.stage == plan.zero_stage
    assert read.train_micro_batch_size_per_gpu == plan.micro_batch
    assert read.gradient_accumulation_steps == plan.micro_batches


@each
def test_accelerate_reads_the_configuration(plan: Plan, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    path = tmp_path / "accelerate.yaml"
    path.write_text(export(plan, "accelerate").text)
    read = load_config_from_file(str(path))
    assert read.num_processes == plan.mesh.devices
    known = {action.dest for action in launch_command_parser()._actions}
    assert {*read.fsdp_config, *read.parallelism_config} <= known
    if read.parallelism_config:
        sizes = [v for k, v in read.parallelism_config.items() if re.search("size$", k)]
        product = 1
        for size in sizes:
            product *= size
        assert product * plan.mesh.pp == plan.mesh.devices
