"""torchtitan's flags (0.3: ``--parallelism.tensor_parallel_degree 2``), or its TOML file with the same names."""

from __future__ import annotations

import re
import tomllib
from typing import Any, Literal

from autopar.errors import InputError
from autopar.export.settings import Schedule, Settings
from autopar.export.torchtitan import SCHEDULES
from autopar.export.words import Words, flags_in, text, whole

NAMES: dict[str, Schedule] = {theirs.lower(): ours for ours, theirs in SCHEDULES.items()}  # type: ignore[misc]
TWO_STAGES = ("interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")


def read(given: str) -> Settings:
    """Settings from flags or from a TOML file.

    Raises:
        InputError: a value makes no sense.
    """
    words = flags_in(given) if "--" in given and not re.search(r"^\s*\[\w+\]", given, re.MULTILINE) else _toml(given)
    pp = whole(words, "parallelism.pipeline_parallel_degree", 1)
    shard = max(whole(words, "parallelism.data_parallel_shard_degree", -1), 0)
    replicate = whole(words, "parallelism.data_parallel_replicate_degree", 1)
    name = text(words, "parallelism.pipeline_parallel_schedule", "1F1B")
    if name.lower() not in NAMES:
        raise InputError(
            f"pipeline_parallel_schedule {name!r} is not one that autopar knows",
            f"Use one of {', '.join(SCHEDULES.values())}",
        )
    schedule = NAMES[name.lower()] if pp > 1 else "1f1b"
    layers = _layers(words) if pp > 1 else ()
    local = whole(words, "training.local_batch_size", whole(words, "training.batch_size", 1))
    micro = whole(words, "parallelism.pipeline_parallel_microbatch_size", 1) if pp > 1 else local
    total = whole(words, "training.global_batch_size", -1)
    notes = []
    if text(words, "parallelism.enable_async_tensor_parallel", "false").lower() == "true":
        notes.append("enable_async_tensor_parallel: collectives beside products")
    if total <= 0 and shard > 0:
        total = local * replicate * shard
    elif total <= 0:
        notes.append("global_batch_size is not set: give --global-batch")
    never = text(words, "parallelism.fsdp_reshard_after_forward", "default") == "never"
    return Settings(
        trainer="torchtitan",
        pp=pp,
        dp_replicate=replicate,
        dp_shard=shard,
        cp=whole(words, "parallelism.context_parallel_degree", 1),
        tp=whole(words, "parallelism.tensor_parallel_degree", 1),
        ep=whole(words, "parallelism.expert_parallel_degree", 1),
        zero_stage=0 if shard == 1 else 2 if never else 3,
        micro_batch=micro,
        global_batch=total if total > 0 else None,
        precision="fp32" if text(words, "training.mixed_precision_param", "bfloat16") == "float32" else "bf16",
        recompute=_recompute(given, words),
        schedule=schedule,
        virtual_stages=max(1, len(layers) // pp) if layers else 2 if schedule in TWO_STAGES else 1,
        layers=layers,
        notes=tuple(notes),
    )


def _toml(given: str) -> Words:
    try:
        data: dict[str, Any] = tomllib.loads(given)
    except tomllib.TOMLDecodeError as error:
        raise InputError(
            f"the torchtitan settings are neither flags nor TOML: {error}", "Give a .toml file or a script with flags"
        ) from None
    sections = {name: table for name, table in data.items() if isinstance(table, dict)}
    return {f"{name}.{key}": _values(value) for name, table in sections.items() for key, value in table.items()}


def _values(value: Any) -> tuple[str, ...]:
    if isinstance(value, list):
        return tuple(",".join(map(str, v)) if isinstance(v, list) else str(v) for v in value)
    return (str(value),)


def _recompute(given: str, words: Words) -> Literal["none", "selective", "full"]:
    """The mode, of a file or of the subcommand."""
    subcommand = re.findall(r"\bactivation-checkpoint:(\w+)", given)
    mode = subcommand[-1] if subcommand else text(words, "activation_checkpoint.mode", "none")
    known: dict[str, Literal["none", "selective", "full"]] = {"none": "none", "selective": "selective", "full": "full"}
    if mode not in known:
        raise InputError(f"activation checkpoint mode {mode!r} is not one that autopar prices", "Use none or full")
    return known[mode]


def _layers(words: Words) -> tuple[int, ...]:
    """Layers of each stage, from the modules that are named for it."""
    parts = words.get("parallelism.module_fqns_per_model_part", ())
    return tuple(len(re.findall(r"\blayers\.\w+", part)) for part in parts if "." in part or "," in part)
