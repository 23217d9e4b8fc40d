"""Profile: what was measured on one machine; JSON on disk, with fingerprint, date and method."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autopar.errors import ProfileError
from autopar.hardware.locations import find
from autopar.hardware.schema import CollectiveKind, fault_of
from autopar.model.graph import TensorMeta
from autopar.plan import write_text

PROFILE_SCHEMA = 1
Signature = tuple[str, tuple[TensorMeta, ...], tuple[TensorMeta, ...]]


def signature(op: str, inputs: Iterable[TensorMeta], outputs: Iterable[TensorMeta]) -> Signature:
    """What a measurement is looked up by: operator and local shapes and dtypes."""
    return op, tuple(inputs), tuple(outputs)


@dataclass(frozen=True)
class MeasuredOperator:
    """Times of one operator at one local shape.

    Attributes:
        forward_s: one forward call, seconds.
        backward_s: its backward through autograd, or None where it has none.
        forward_flops, backward_flops: as torch.utils.flop_counter counts.
        peak_bytes: most memory that the call had allocated beyond its operands.
        samples: number of timed calls.
    """

    op: str
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]
    attributes: str
    forward_s: float
    backward_s: float | None
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    peak_bytes: int = 0
    samples: int = 1


@dataclass(frozen=True)
class MeasuredOperators:
    """All measured operators of a device, found by signature or by operator."""

    entries: tuple[MeasuredOperator, ...] = ()
    _by_signature: dict[Signature, list[MeasuredOperator]] = field(default_factory=dict, compare=False, repr=False)
    _by_op: dict[str, list[MeasuredOperator]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for entry in self.entries:
            self._by_signature.setdefault(signature(entry.op, entry.inputs, entry.outputs), []).append(entry)
            self._by_op.setdefault(entry.op, []).append(entry)

    def exact(self, op: str, inputs: Sequence[TensorMeta], outputs: Sequence[TensorMeta]) -> list[MeasuredOperator]:
        """Entries of just this operator and these shapes; several where only attributes differ."""
        return self._by_signature.get(signature(op, inputs, outputs), [])

    def of_operator(self, op: str) -> list[MeasuredOperator]:
        """Entries of an operator at any shape."""
        return self._by_op.get(op, [])


@dataclass(frozen=True)
class MeasuredCollective:
    """Median time of one collective.

    Attributes:
        size: processes in the group.
        scope: link level that the group spans (``node``, ``cluster``, ...).
        nbytes: size of the whole tensor (that every process holds before an all-reduce, after an all-gather).
    """

    kind: str
    size: int
    scope: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class MeasuredGraph:
    """Times of one micro-batch of a whole captured graph, run operator by operator.

    Attributes:
        operators: how many it calls.
        operators_forward_s, operators_backward_s: the sum of their own measured times.
    """

    micro_batch: int
    operators: int
    forward_s: float
    backward_s: float
    operators_forward_s: float = 0.0
    operators_backward_s: float = 0.0


@dataclass(frozen=True)
class MeasuredMemory:
    """What a process takes beside its tensors."""

    context_bytes: int | None = None
    allocator_overhead_fraction: float | None = None


@dataclass(frozen=True)
class Overheads:
    """Measured costs that belong to no operator.

    Attributes:
        optimizer_s_per_byte: seconds of one AdamW step per byte of parameters (states in fp32).
        optimizer_s_per_tensor: seconds of one AdamW step per parameter tensor, beside its bytes.
        accumulate_s_per_byte: adding one micro-batch's gradient into the accumulated one, per byte.
        copy_bandwidth: bytes/s of a copy, read and write counted once each.
        communication_slowdown: by what factor compute slows down while a collective runs beside it.
        dispatch_forward_s, dispatch_backward_s: what a whole graph takes beyond the sum of its operators, per operator
            call: the interpreter, the autograd engine, gradients put in place.
        concurrency_slowdown: by what factor compute is slower when all processes of a node compute at once (the
            operator times of the profile include it).
    """

    optimizer_s_per_byte: float | None = None
    optimizer_s_per_tensor: float | None = None
    accumulate_s_per_byte: float | None = None
    copy_bandwidth: float | None = None
    communication_slowdown: float | None = None
    concurrency_slowdown: float | None = None
    dispatch_forward_s: float | None = None
    dispatch_backward_s: float | None = None


@dataclass(frozen=True)
class Fingerprint:
    """What a measurement depends on; a profile with another fingerprint is foreign."""

    processor: str
    cores: int
    processes: int
    threads: int
    torch: str

    def differences(self, other: Fingerprint) -> list[str]:
        """Human-readable differences, as ``torch 2.13.0 (here 2.12.1)``."""
        return [
            f"{name} {mine!r} (here {theirs!r})"
            for name, mine in vars(self).items()
            if mine != (theirs := getattr(other, name))
        ]


@dataclass(frozen=True)
class Profile:
    """Everything measured on one machine for one cluster; see the module docstring of autopar.profiler for how."""

    device: str
    cluster: str
    fingerprint: Fingerprint
    date: str
    method: str
    operators: MeasuredOperators = field(default_factory=MeasuredOperators)
    collectives: tuple[MeasuredCollective, ...] = ()
    memory: MeasuredMemory = field(default_factory=MeasuredMemory)
    overheads: Overheads = field(default_factory=Overheads)
    graphs: tuple[MeasuredGraph, ...] = ()

    @staticmethod
    def load(name_or_path: str | Path) -> Profile:
        """Reads and checks a profile.

        Raises:
            ProfileError: it does not exist, or a field is wrong.
        """
        path = find("measured", str(name_or_path))
        try:
            data = json.loads(path.read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ProfileError(f"profile {str(path)!r} cannot be read as JSON: {error}") from None
        if not isinstance(data, dict) or data.get("schema_version") != PROFILE_SCHEMA:
            version = data.get("schema_version") if isinstance(data, dict) else None
            raise ProfileError(
                f"profile {str(path)!r} has schema_version {version!r}",
                f"This autopar reads version {PROFILE_SCHEMA}; measure again with 'autopar profile'",
            )
        try:
            return _inside(_ProfileFile.model_validate(data))
        except ValidationError as error:
            raise ProfileError(f"profile {str(path)!r}: {fault_of(error, _ProfileFile)}") from None

    def save(self, path: str | Path) -> None:
        """Writes the profile as JSON, under a temporary name first."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_text(Path(path), _outside(self).model_dump_json(indent=1, exclude_none=True) + "\n")

    def foreign(self, here: Fingerprint) -> str:
        """Why the profile does not describe the machine ``here``; empty if it does."""
        return ", ".join(self.fingerprint.differences(here))


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


_Tensor = tuple[list[int], str]
_Seconds = Field(ge=0)


class _OperatorFile(_Strict):
    op: str
    inputs: list[_Tensor]
    outputs: list[_Tensor]
    attributes: str = ""
    forward_s: float = _Seconds
    backward_s: float | None = Field(None, ge=0)
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    peak_bytes: int = 0
    samples: int = 1


class _CollectiveFile(_Strict):
    kind: CollectiveKind
    size: int = Field(ge=1)
    scope: str
    nbytes: int = Field(ge=0)
    seconds: float = _Seconds


class _FingerprintFile(_Strict):
    processor: str
    cores: int
    processes: int
    threads: int
    torch: str


class _MemoryFile(_Strict):
    context_bytes: int | None = Field(None, ge=0)
    allocator_overhead_fraction: float | None = Field(None, ge=0)


class _OverheadsFile(_Strict):
    optimizer_s_per_byte: float | None = Field(None, ge=0)
    optimizer_s_per_tensor: float | None = Field(None, ge=0)
    accumulate_s_per_byte: float | None = Field(None, ge=0)
    copy_bandwidth: float | None = Field(None, gt=0)
    communication_slowdown: float | None = Field(None, gt=0)
    concurrency_slowdown: float | None = Field(None, gt=0)
    dispatch_forward_s: float | None = Field(None, ge=0)
    dispatch_backward_s: float | None = Field(None, ge=0)


class _GraphFile(_Strict):
    micro_batch: int = Field(ge=1)
    operators: int = Field(ge=0)
    forward_s: float = _Seconds
    backward_s: float = _Seconds
    operators_forward_s: float = _Seconds
    operators_backward_s: float = _Seconds


class _ProfileFile(_Strict):
    schema_version: Literal[1]
    device: str
    cluster: str
    fingerprint: _FingerprintFile
    date: datetime.date
    method: str
    operators: list[_OperatorFile] = []
    collectives: list[_CollectiveFile] = []
    memory: _MemoryFile = _MemoryFile()
    overheads: _OverheadsFile = _OverheadsFile()
    graphs: list[_GraphFile] = []


def _metas(tensors: list[_Tensor]) -> tuple[TensorMeta, ...]:
    metas = []
    for shape, name in tensors:
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ProfileError(f"dtype {name!r} in a profile is unknown", "Measure again with 'autopar profile'")
        metas.append(TensorMeta(tuple(shape), dtype))
    return tuple(metas)


def _plain(metas: tuple[TensorMeta, ...]) -> list[_Tensor]:
    return [(list(m.shape), str(m.dtype).removeprefix("torch.")) for m in metas]


def _inside(file: _ProfileFile) -> Profile:
    operators = tuple(
        MeasuredOperator(**{**vars(o), "inputs": _metas(o.inputs), "outputs": _metas(o.outputs)})
        for o in file.operators
    )
    return Profile(
        device=file.device,
        cluster=file.cluster,
        fingerprint=Fingerprint(**file.fingerprint.model_dump()),
        date=file.date.isoformat(),
        method=file.method,
        operators=MeasuredOperators(operators),
        collectives=tuple(MeasuredCollective(**c.model_dump()) for c in file.collectives),
        memory=MeasuredMemory(**file.memory.model_dump()),
        overheads=Overheads(**file.overheads.model_dump()),
        graphs=tuple(MeasuredGraph(**g.model_dump()) for g in file.graphs),
    )


def _outside(profile: Profile) -> _ProfileFile:
    operators: list[dict[str, Any]] = [
        {**vars(o), "inputs": _plain(o.inputs), "outputs": _plain(o.outputs)} for o in profile.operators.entries
    ]
    return _ProfileFile.model_validate(
        {
            "schema_version": PROFILE_SCHEMA,
            "device": profile.device,
            "cluster": profile.cluster,
            "fingerprint": vars(profile.fingerprint),
            "date": profile.date,
            "method": profile.method,
            "operators": operators,
            "collectives": [vars(c) for c in profile.collectives],
            "memory": vars(profile.memory),
            "overheads": vars(profile.overheads),
            "graphs": [vars(g) for g in profile.graphs],
        }
    )
