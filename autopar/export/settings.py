"""Settings: what a user's present trainer is told, read back from its flags or its file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

from autopar.errors import InputError
from autopar.export.words import text_of
from autopar.plan import Mesh

READABLE = ("torchtitan", "megatron")
Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]
Precision = Literal["fp32", "bf16", "fp16", "fp8"]


@dataclass(frozen=True)
class Settings:
    """How another trainer is told to train.

    Attributes:
        dp_replicate, dp_shard: 0 where it follows from the number of devices.
        micro_batch: samples of one data shard in one forward pass.
        global_batch: None where it is not said.
        recompute: of every layer, or of the first ``recompute_first`` layers of each stage.
        layers: number of layers in each stage of the chain; empty where the trainer cuts.
        notes: what is said and not priced, one sentence each.
    """

    trainer: str
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 0
    cp: int = 1
    tp: int = 1
    ep: int = 1
    zero_stage: Literal[0, 1, 2, 3] = 0
    micro_batch: int = 1
    global_batch: int | None = None
    precision: Precision = "fp32"
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_first: int | None = None
    schedule: Schedule = "1f1b"
    virtual_stages: int = 1
    layers: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def mesh_on(self, devices: int) -> Mesh:
        """The mesh on so many devices.

        Raises:
            InputError: a size is not positive, or the sizes do not make that number of devices.
        """
        for axis in ("pp", "cp", "tp", "ep", "micro_batch"):
            if getattr(self, axis) < 1:
                raise InputError(f"{self.trainer} settings have {axis}={getattr(self, axis)}", "Give at least 1")
        inside = self.pp * self.cp * self.tp
        replicate, shard = self.dp_replicate, self.dp_shard
        if replicate <= 0:
            replicate = devices // (inside * max(shard, 1))
        elif shard <= 0:
            shard = devices // (inside * replicate)
        if inside * replicate * shard != devices or min(replicate, shard) < 1:
            raise InputError(
                f"{self.trainer} settings pp={self.pp} cp={self.cp} tp={self.tp} dp_replicate={replicate} "
                f"dp_shard={shard} do not make the {devices} devices of the cluster",
                "Name the cluster that they are for",
            )
        return Mesh(pp=self.pp, dp_replicate=replicate, dp_shard=shard, cp=self.cp, tp=self.tp, ep=self.ep)


def read_settings(trainer: str, given: str) -> Settings:
    """Reads the settings of a trainer.

    Args:
        trainer: one of :data:`READABLE`.
        given: flags, or the path of a file: a script with flags, for torchtitan also a TOML file.

    Raises:
        InputError: the trainer is unknown, the file is missing, or a value makes no sense.
    """
    if trainer not in READABLE:
        raise InputError(f"--from {trainer!r} is unknown", f"Use one of {', '.join(READABLE)}")
    read: Callable[[str], Settings] = import_module(f"autopar.export.read_{trainer}").read
    return read(text_of(given, trainer))


def batch_of(settings: Settings, asked: int | None) -> int:
    """Samples per optimizer step.

    Raises:
        InputError: neither the settings nor the user say it, or they say different ones.
    """
    said = settings.global_batch
    if asked is None and said is None:
        raise InputError(f"the {settings.trainer} settings do not say a global batch", "Give --global-batch")
    if asked is not None and said is not None and asked != said:
        raise InputError(
            f"--global-batch {asked} is not that of the {settings.trainer} settings, {said}", "Leave --global-batch out"
        )
    return asked or said or 0
