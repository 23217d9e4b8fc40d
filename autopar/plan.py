"""Plan: the one artefact between search and run. JSON on disk, checked on reading, editable by hand."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from autopar.errors import PlanError
from autopar.files import replacing

SCHEMA_VERSION = 1
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")  # outermost first
INTRA_AXES = ("cp", "tp", "ep")  # axes that placements of single operators are named on


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Mesh(_Strict):
    """Sizes of the device mesh; ranks are laid out in the order of the fields, the last one innermost."""

    pp: int = Field(1, ge=1)
    dp_replicate: int = Field(1, ge=1)
    dp_shard: int = Field(1, ge=1)
    cp: int = Field(1, ge=1)
    tp: int = Field(1, ge=1)
    ep: int = Field(1, ge=1)

    @property
    def devices(self) -> int:
        """Number of devices; expert parallelism re-uses data-parallel devices and adds none."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Number of data shards, replicated or sharded."""
        return self.dp_replicate * self.dp_shard

    def describe(self) -> str:
        """Axes above one, as ``dp=2 tp=4`` (``dp`` for ``dp_replicate``); ``single device`` when there is none."""
        named = [f"{k.removesuffix('_replicate')}={v}" for k, v in self.model_dump().items() if v > 1]
        return " ".join(named) or "single device"


class Layout(_Strict):
    """Placements inside one block, per mesh axis of :data:`INTRA_AXES`; what is not named is replicated.

    Attributes:
        operators: label of the operator (``attn.q.linear``) -> axis -> strategy, written as the placements of its
            tensor operands and results: ``"R S(0) S(0) -> S(2)"``. R replicated, S(d) sharded on dimension d,
            P partial sum.
        parameters: name of the parameter within the block -> axis -> placement it is stored with.
        inputs, outputs: placements of the block's input and output activations, in the block's order, per axis.
    """

    operators: dict[str, dict[str, str]] = {}
    parameters: dict[str, dict[str, str]] = {}
    inputs: list[dict[str, str]] = []
    outputs: list[dict[str, str]] = []


class BlockPlan(_Strict):
    """One block of the chain: which layout it uses and what it recomputes."""

    name: str
    layout: str
    recompute: Literal["none", "selective", "full"] = "none"


class ModelRef(_Strict):
    """Which model the plan was made for."""

    source: str
    fingerprint: str
    parameters: int = 0


class ClusterRef(_Strict):
    """Which cluster the plan was made for."""

    name: str
    devices: int = Field(ge=1)
    source: str = ""


class GradientReduction(_Strict):
    """How gradients are summed over the data-parallel axes."""

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    bucket_mib: float = Field(25.0, gt=0)
    compression: Literal["none"] = "none"


class Plan(_Strict):
    """How to train one model on one cluster.

    Attributes:
        stages: for each pipeline stage (virtual ones included, in the order of the chain) the name of its first block.
        blocks: every block of the chain, in order.
        layouts: placements by layout name; blocks alike share one.
        zero_stage: 0 gradients, optimizer states and parameters replicated over data; 1 optimizer states sharded;
            2 gradients too; 3 parameters too (FSDP). Shards lie over ``mesh.dp_shard``.
        micro_batch: samples of one micro-batch on one data shard; ``micro_batch * micro_batches * mesh.dp`` is
            ``global_batch``.
        virtual_stages: pipeline stages per device.
        estimate: what the cost engine predicted (see :class:`autopar.cost.Estimate`), as JSON.
        optimality_gap: how far at most the plan's step time is above the proven lower bound, as a fraction.
    """

    schema_version: int = SCHEMA_VERSION
    model: ModelRef
    cluster: ClusterRef
    global_batch: int = Field(ge=1)
    mesh: Mesh
    stages: list[str]
    blocks: list[BlockPlan]
    layouts: dict[str, Layout]
    zero_stage: Literal[0, 1, 2, 3] = 0
    offload: Literal["none", "optimizer", "activations"] = "none"
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"] = "1f1b"
    virtual_stages: int = Field(1, ge=1)
    micro_batch: int = Field(ge=1)
    micro_batches: int = Field(ge=1)
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    gradient_reduction: GradientReduction = GradientReduction()
    compile: Literal["none", "aot_eager", "inductor"] = "none"
    seed: int = 0
    estimate: dict[str, Any] = {}
    optimality_gap: float | None = None
    search: dict[str, Any] = {}

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        names = [b.name for b in self.blocks]
        if len(set(names)) != len(names):
            raise ValueError("blocks: two blocks have the same name")
        for block in self.blocks:
            if block.layout not in self.layouts:
                raise ValueError(f"blocks: {block.name} uses the layout {block.layout!r}, which layouts does not name")
        want = self.mesh.pp * self.virtual_stages
        if len(self.stages) != want:
            raise ValueError(f"stages: {len(self.stages)} named, mesh.pp x virtual_stages = {want} needed")
        cuts = [names.index(s) if s in names else -1 for s in self.stages]
        if -1 in cuts:
            raise ValueError(f"stages: {self.stages[cuts.index(-1)]!r} is not one of the blocks")
        if cuts[0] != 0 or cuts != sorted(set(cuts)):
            raise ValueError("stages: must name the first block of each stage, in the order of the chain")
        shards = self.micro_batch * self.micro_batches * self.mesh.dp
        if shards != self.global_batch:
            raise ValueError(
                f"global_batch: {self.global_batch}, but micro_batch x micro_batches x data shards = "
                f"{self.micro_batch} x {self.micro_batches} x {self.mesh.dp} = {shards}"
            )
        if self.mesh.devices != self.cluster.devices:
            raise ValueError(
                f"mesh: needs {self.mesh.devices} devices ({self.mesh.describe()}), "
                f"the cluster {self.cluster.name!r} of the plan has {self.cluster.devices}"
            )
        return self

    def check_model(self, fingerprint: str, source: str) -> None:
        """Refuses a model that the plan was not made for.

        Args:
            fingerprint: of the captured model.
            source: where it came from, for the message.

        Raises:
            PlanError: names both fingerprints.
        """
        if fingerprint != self.model.fingerprint:
            raise PlanError(
                f"the plan was made for a model with fingerprint {self.model.fingerprint}, {source} has {fingerprint}",
                "Search again for this model",
            )

    def stage_blocks(self) -> list[list[BlockPlan]]:
        """The blocks of each stage, in order."""
        names = [b.name for b in self.blocks]
        cuts = [names.index(s) for s in self.stages] + [len(names)]
        return [self.blocks[a:b] for a, b in pairwise(cuts)]

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, under a temporary name first.

        Raises:
            PlanError: the folder cannot be written.
        """
        write_text(Path(path), self.model_dump_json(indent=2) + "\n")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Reads and checks a plan.

        Raises:
            PlanError: the file is missing, is not a plan, or contradicts itself; the field is named.
        """
        path = Path(path)
        try:
            data = json.loads(path.read_text())
        except FileNotFoundError:
            raise PlanError(f"plan file {str(path)!r} does not exist", "Make one with 'autopar search'") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise PlanError(f"plan file {str(path)!r} cannot be read as JSON: {error}") from None
        if not isinstance(data, dict):
            raise PlanError(f"plan file {str(path)!r} holds no JSON object", "Make one with 'autopar search'")
        if data.get("schema_version") != SCHEMA_VERSION:
            raise PlanError(
                f"plan file {str(path)!r} has schema_version {data.get('schema_version')!r}",
                f"This autopar reads version {SCHEMA_VERSION}; search again to make a new plan",
            )
        try:
            return Plan.model_validate(data)
        except ValidationError as error:
            raise PlanError(f"plan file {str(path)!r}: {first_fault(error)}") from None


def first_fault(error: ValidationError) -> str:
    """The first fault of a pydantic error in one line: field, what is wrong, the value."""
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"])
    value = fault["input"]
    shown = f" (value: {value!r})" if where and not isinstance(value, dict | list) else ""
    return f"{where + ': ' if where else ''}{fault['msg'].removeprefix('Value error, ')}{shown}"


def write_text(path: Path, text: str) -> None:
    """Writes a file under a temporary name beside it and renames it, so that a reader never sees half of it.

    Raises:
        PlanError: the folder does not exist or cannot be written.
    """
    with replacing(path, PlanError) as aside:
        aside.write_text(text)
