"""What is searched: meshes, micro-batches, schedules, recomputation; and what the user has pinned of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import InputError
from autopar.hardware.cluster import Cluster
from autopar.plan import Mesh

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
NUMBERS = (*AXES, "dp", "micro_batch", "micro_batches")
WORDS: dict[str, tuple[str, ...]] = {
    "schedule": ("gpipe", "1f1b"),
    "recompute": ("none", "full"),
    "zero_stage": ("0", "3"),
}
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
MOST_MICRO_BATCH = 64  # samples; beyond, devices are long saturated and memory only grows


@dataclass(frozen=True)
class Candidate:
    """One point of the outer search."""

    mesh: Mesh
    micro_batch: int
    micro_batches: int

    @property
    def zero_stage(self) -> int:
        """Sharded data parallelism shards everything; replicated data parallelism nothing."""
        return 3 if self.mesh.dp_shard > 1 else 0


@dataclass(frozen=True)
class Pins:
    """Choices that are kept.

    Attributes:
        numbers: mesh axes, ``dp`` and micro-batch sizes.
        words: schedule, recompute and zero_stage.
    """

    numbers: Mapping[str, int] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)

    def allow(self, candidate: Candidate) -> bool:
        """Whether a candidate keeps every pin."""
        have = {
            **candidate.mesh.model_dump(),
            "micro_batch": candidate.micro_batch,
            "micro_batches": candidate.micro_batches,
        }
        have["dp"] = candidate.mesh.dp
        if "dp" in self.numbers and "dp_shard" not in self.numbers and self.words.get("zero_stage") != "3":
            have["dp"] = candidate.mesh.dp_replicate if candidate.mesh.dp_shard == 1 else -1
        if (
            "zero_stage" in self.words
            and candidate.mesh.dp > 1
            and str(candidate.zero_stage) != self.words["zero_stage"]
        ):
            return False
        return all(have[key] == value for key, value in self.numbers.items())

    def options(self, key: str) -> tuple[str, ...]:
        """The values of a word that are allowed."""
        return (self.words[key],) if key in self.words else WORDS[key]

    def without(self, key: str) -> Pins:
        """The same pins but one."""
        return Pins(
            {k: v for k, v in self.numbers.items() if k != key}, {k: v for k, v in self.words.items() if k != key}
        )

    def text(self) -> str:
        """As they would be typed."""
        return ", ".join(f"{k}={v}" for k, v in {**self.numbers, **self.words}.items())


def parse_pins(words: Iterable[str]) -> dict[str, str]:
    """Reads ``KEY=VALUE`` pins as typed.

    Raises:
        InputError: a pin has no value, or a key is pinned twice.
    """
    pins: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.strip()
        if not equals or not key or not value.strip():
            raise InputError(f"--pin {word!r} is not KEY=VALUE", "Write for example --pin tp=4")
        if key in pins:
            raise InputError(f"--pin {key} is given twice: {pins[key]} and {value}", "Give it once")
        pins[key] = value.strip()
    return pins


def check_pins(pins: Mapping[str, Any], devices: int, global_batch: int) -> Pins:
    """Checks pins one by one and against each other.

    Raises:
        InputError: a key or value is unknown, or no mesh can keep them all; names the pin.
    """
    numbers: dict[str, int] = {}
    words: dict[str, str] = {}
    for key, value in pins.items():
        if key in NUMBERS:
            numbers[key] = _positive(key, value)
        elif key in WORDS:
            if str(value) not in WORDS[key]:
                raise InputError(f"pin {key}={value} is unknown", f"Use one of {', '.join(WORDS[key])}")
            words[key] = str(value)
        else:
            raise InputError(f"pin {key}={value} is unknown", f"Pin one of {', '.join((*NUMBERS, *WORDS))}")
    checked = Pins(numbers, words)
    if numbers.get("ep", 1) > 1:
        raise InputError(f"pin ep={numbers['ep']} cannot be searched yet", "Use ep=1")
    if words.get("zero_stage") == "0" and numbers.get("dp_shard", 1) > 1:
        raise InputError(
            f"pins dp_shard={numbers['dp_shard']} and zero_stage=0 contradict each other", "Shards need zero_stage=3"
        )
    _check_against_devices(checked, devices)
    _check_against_batch(checked, devices, global_batch)
    return checked


def _positive(key: str, value: Any) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = 0
    if number < 1:
        raise InputError(f"pin {key}={value} is not a positive whole number", f"Use for example {key}=2")
    return number


def _check_against_devices(pins: Pins, devices: int) -> None:
    taken = 1
    for key, value in pins.numbers.items():
        if key in ("micro_batch", "micro_batches", "ep"):
            continue
        if key in ("dp_replicate", "dp_shard") and "dp" in pins.numbers:
            if pins.numbers["dp"] % value:
                raise InputError(
                    f"pins dp={pins.numbers['dp']} and {key}={value} contradict each other", "dp is a multiple"
                )
            continue
        taken *= value
        if devices % taken:
            raise InputError(
                f"pin {key}={value} cannot hold: the pins so far need a multiple of {taken} devices, "
                f"the cluster has {devices}",
                "Pin axes whose product divides the number of devices",
            )
    if not any(pins.allow(Candidate(mesh, *_sizes(pins))) for mesh in meshes(devices, pins)):
        raise InputError(
            f"pins {pins.text()} contradict each other on {devices} devices", "Leave one of them to the search"
        )


def _sizes(pins: Pins) -> tuple[int, int]:
    return pins.numbers.get("micro_batch", 1), pins.numbers.get("micro_batches", 1)


def _check_against_batch(pins: Pins, devices: int, global_batch: int) -> None:
    possible = sorted({mesh.dp for mesh in meshes(devices, pins) if pins.allow(Candidate(mesh, *_sizes(pins)))})
    if not any(global_batch % dp == 0 for dp in possible):
        raise InputError(
            f"global batch {global_batch} is not divisible by any data-parallel size that the pins leave "
            f"({', '.join(map(str, possible))})",
            f"Use a multiple of {possible[0]}",
        )
    if any(candidates(devices, global_batch, pins)):
        return
    raise InputError(
        f"global batch {global_batch} cannot be cut as pinned ({pins.text()})",
        "global batch = dp x micro_batch x micro_batches",
    )


def divisors(n: int) -> list[int]:
    """All divisors, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def meshes(devices: int, pins: Pins) -> Iterator[Mesh]:
    """Every mesh of all devices; context parallelism only where it is pinned."""
    for cp in (pins.numbers.get("cp", 1),):
        if devices % cp:
            continue
        for pp in divisors(devices // cp):
            for tp in divisors(devices // cp // pp):
                dp = devices // cp // pp // tp
                for shard in divisors(dp):
                    yield Mesh(pp=pp, dp_replicate=dp // shard, dp_shard=shard, cp=cp, tp=tp, ep=1)


def candidates(devices: int, global_batch: int, pins: Pins) -> Iterator[Candidate]:
    """Every mesh with every micro-batch size that the pins allow."""
    for mesh in meshes(devices, pins):
        if global_batch % mesh.dp:
            continue
        local = global_batch // mesh.dp
        for micro_batch in divisors(local):
            if micro_batch > MOST_MICRO_BATCH and micro_batch != pins.numbers.get("micro_batch"):
                continue
            candidate = Candidate(mesh, micro_batch, local // micro_batch)
            if pins.allow(candidate):
                yield candidate


def schedules_of(candidate: Candidate, pins: Pins) -> tuple[str, ...]:
    """Schedules that can run: 1F1B needs a micro-batch for every stage."""
    if candidate.mesh.pp == 1:
        return (pins.words.get("schedule", "1f1b"),)
    enough = candidate.micro_batches >= candidate.mesh.pp
    return tuple(s for s in pins.options("schedule") if s == "gpipe" or enough)


def check_settings(
    global_batch: int, precision: str, top: int, cluster: Cluster, time_limit_s: float | None = None
) -> None:
    """Checks what is not a pin.

    Raises:
        InputError: a setting of the search is out of range.
    """
    if global_batch < 1:
        raise InputError(f"global batch {global_batch} is not positive", "Give the samples of one optimizer step")
    if precision not in PRECISIONS:
        raise InputError(f"precision {precision!r} is unknown", f"Use one of {', '.join(PRECISIONS)}")
    if top < 1:
        raise InputError(f"top {top} is not positive", "Ask for at least one plan")
    if time_limit_s is not None and time_limit_s <= 0:
        raise InputError(f"time limit {time_limit_s} is not positive", "Give seconds")
    if cluster.devices < 1:
        raise InputError(f"cluster {cluster.name!r} has no devices", "Give it at least one")
