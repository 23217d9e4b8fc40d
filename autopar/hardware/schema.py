"""The file formats of devices (JSON) and clusters (TOML), checked field by field."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from autopar.errors import ProfileError
from autopar.hardware.fabrics import completed

DEVICE_SCHEMA = 1
CLUSTER_SCHEMA = 1

Positive = Field(gt=0, allow_inf_nan=False)
NotNegative = Field(ge=0, allow_inf_nan=False)
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
T = TypeVar("T", bound=BaseModel)
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class MatmulSpec(_Strict):
    """Parameters of :class:`autopar.hardware.efficiency.MatmulSurface`."""

    peak_fraction: float = Field(gt=0, le=1.05)
    k_overhead: float = NotNegative
    tile_intensity: float = Field(0.0, ge=0)
    wave_smoothing: float = Field(1.0, ge=0, le=1)
    tiles: list[tuple[int, int]] = Field([(1, 1)], min_length=1)
    layout_time: dict[Literal["TN", "NN", "NT"], float] = {}
    fixed_us: float = Field(0.0, ge=0)
    rate_cap: float | None = Field(None, gt=0, le=1)
    grouped_fixed_us: float = Field(0.0, ge=0)


class PowerSpec(_Strict):
    """Parameters of :func:`autopar.hardware.efficiency.power_limited_fraction`."""

    limit_w: float = Positive
    static_w: float = NotNegative
    reference_w: float = Positive
    reference_fraction: float = Field(gt=0, le=1)

    @model_validator(mode="after")
    def _ordered(self) -> PowerSpec:
        if self.static_w >= min(self.limit_w, self.reference_w):
            raise ValueError(f"static_w: {self.static_w} is not below limit_w and reference_w")
        return self


class AttentionSpec(_Strict):
    """Parameters of :class:`autopar.hardware.efficiency.AttentionSurface`."""

    forward_fraction: float = Field(gt=0, le=1)
    backward_fraction: float = Field(gt=0, le=1)
    half_length: float = Field(0.0, ge=0)
    query_tile: int = Field(128, ge=1)
    fixed_us: float = Field(0.0, ge=0)


class DeviceFile(_Strict):
    """One device.

    Rates are in the units of data sheets; ``memory_efficiency`` gives the fraction of ``memory_bandwidth_gb_s`` that
    a class of memory-bound operators reaches (``pointwise``, ``reduction``, ``gather``, ``cross_entropy``, ``copy``,
    ``optimizer``, ``transcendental`` for gelu and the like, ``product`` for the operands of matrix products).
    ``attention`` is that of PyTorch's own kernel; ``attention_kernels`` gives those of other libraries by name
    (``flash_attention_1``, ``transformer_engine``). ``in_step_slowdown`` is how much longer products and attention take
    in a step than alone: power limits bind for longer, and caches are shared with what runs between.
    ``operator_table`` is a CSV of measured products, named relative to the file. ``inherits`` says in words whose
    efficiency was taken where none was measured.
    """

    schema_version: Literal[1]
    name: str = Field(min_length=1)
    description: str = ""
    kind: Literal["cpu", "cuda", "rocm"]
    sources: list[str] = Field(min_length=1)
    inherits: str = ""
    memory_gib: float = Positive
    memory_bandwidth_gb_s: float = Positive
    peak_tflops: dict[Precision, float] = Field(min_length=1)
    compute_units: int = Field(ge=1)
    power: PowerSpec | None = None
    launch_overhead_us: float = NotNegative
    host_overhead_us: float = Field(0.0, ge=0)
    context_gib: float = Field(0.0, ge=0)
    allocator_overhead_fraction: float = Field(0.0, ge=0, lt=1)
    matmul: MatmulSpec
    attention: AttentionSpec
    attention_kernels: dict[str, AttentionSpec] = {}
    in_step_slowdown: float = Field(1.0, ge=1, le=2)
    memory_efficiency: dict[str, float] = {}
    operator_table: str | None = None

    @model_validator(mode="after")
    def _rates(self) -> DeviceFile:
        for precision, value in self.peak_tflops.items():
            if not value > 0:
                raise ValueError(f"peak_tflops.{precision}: must be greater than 0, not {value}")
        for name, value in self.memory_efficiency.items():
            if not 0 < value <= 1:
                raise ValueError(f"memory_efficiency.{name}: must lie between 0 and 1, not {value}")
        return self


class LinkFile(_Strict):
    """One level of the network: what connects the domains of the level below.

    In a file, ``type`` names a kind of link whose fields are taken where unset (see autopar.hardware.fabrics).

    ``devices`` counts the devices in one domain of this level; unset, it is one node for ``scope = "node"`` and the
    whole cluster otherwise. ``efficiency`` is the fraction of the bandwidth that a collective reaches, and
    ``overhead_us`` the fixed time of one call. ``in_switch`` is the fraction reached when switches do the reduction.
    ``shared`` says that the devices of one lower domain share the bandwidth (processes on one loopback), rather than
    having it each.
    """

    scope: str = Field(min_length=1)
    devices: int | None = Field(None, ge=1)
    bandwidth_gbps: float = Positive
    latency_us: float = NotNegative
    oversubscription: float = Field(1.0, ge=1)
    efficiency: dict[CollectiveKind, float] = {}
    overhead_us: float = Field(0.0, ge=0)
    in_switch: float | None = Field(None, gt=0, le=1)
    shared: bool = False

    @model_validator(mode="after")
    def _fractions(self) -> LinkFile:
        for kind, value in self.efficiency.items():
            if not 0 < value <= 1:
                raise ValueError(f"efficiency.{kind}: must lie between 0 and 1, not {value}")
        return self


class GroupFile(_Strict):
    """A group of like nodes in a cluster of unlike ones."""

    name: str = Field(min_length=1)
    device: str = Field(min_length=1)
    nodes: int = Field(ge=1)
    devices_per_node: int = Field(ge=1)


class ClusterFile(_Strict):
    """One cluster; either ``device, nodes, devices_per_node`` or two or more ``[[group]]`` tables."""

    schema_version: Literal[1] = 1
    name: str = Field(min_length=1)
    description: str = ""
    sources: list[str] = []
    device: str = ""
    nodes: int | None = Field(None, ge=1)
    devices_per_node: int | None = Field(None, ge=1)
    memory_reserve_gib: float = Field(0.0, ge=0)
    memory_per_device_gib: float | None = Field(None, gt=0)
    profile: str = ""
    link: list[LinkFile] = []
    group: list[GroupFile] = []

    @model_validator(mode="after")
    def _whole(self) -> ClusterFile:
        plain = [self.device, self.nodes, self.devices_per_node]
        if self.group and any(plain):
            raise ValueError("group: give either [[group]] tables or device, nodes and devices_per_node, not both")
        if not self.group:
            for field, value in zip(("device", "nodes", "devices_per_node"), plain, strict=True):
                if not value:
                    raise ValueError(f"{field}: is missing")
        return self


def read_device(path: Path) -> DeviceFile:
    """Reads a device file.

    Raises:
        ProfileError: it is unreadable or a field is wrong; file and field are named.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ProfileError(f"device file {str(path)!r} cannot be read as JSON: {error}") from None
    return _checked(DeviceFile, data, f"device file {str(path)!r}")


def read_cluster(path: Path) -> ClusterFile:
    """Reads a cluster file.

    Raises:
        ProfileError: it is unreadable or a field is wrong; file and field are named.
    """
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ProfileError(f"cluster file {str(path)!r} cannot be read as TOML: {error}") from None
    return check_cluster(data, f"cluster file {str(path)!r}", path.parent)


def check_cluster(data: dict[str, Any], where: str, beside: Path | None = None) -> ClusterFile:
    """Checks a cluster's tables; fields of a named link type are filled in first.

    Raises:
        ProfileError: a field is wrong; ``where`` and the field are named.
    """
    links = data.get("link")
    if isinstance(links, list) and all(isinstance(link, dict) for link in links):
        try:
            data = {**data, "link": [completed(link, beside) for link in links]}
        except ProfileError as error:
            raise ProfileError(f"{where}: {error.what}", error.remedy) from None
    return _checked(ClusterFile, data, where)


def _checked(model: type[T], data: Any, where: str) -> T:
    if not isinstance(data, dict):
        raise ProfileError(f"{where} holds no table of fields", "See profiles/ for examples")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ProfileError(f"{where}: {fault_of(error, model)}") from None


def fault_of(error: ValidationError, model: type[BaseModel]) -> str:
    """The first fault in one line: field, what is wrong, the value, and for an unknown field those that exist."""
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        known = f"; known fields: {', '.join(model.model_fields)}" if len(fault["loc"]) == 1 else ""
        return f"unknown field {where!r}{known}"
    if fault["type"] == "missing":
        return f"field {where!r} is missing"
    value = fault["input"]
    shown = f" (value: {value!r})" if where and not isinstance(value, dict | list) else ""
    return f"{where + ': ' if where else ''}{fault['msg'].removeprefix('Value error, ')}{shown}"
