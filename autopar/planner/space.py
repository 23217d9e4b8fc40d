"""What is searched: meshes, micro-batches, schedules, recomputation; and what the user has pinned of it."""

from __future__ import annotations

import re
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
SIGNS = ("<=", ">=", "!=")
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
MOST_GLOBAL_BATCH = 2**24  # samples; schedules of more micro-batches take too long to play
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
        limits: what ``numbers`` and ``words`` may not be, by key and sign: ``("tp", "<=")`` -> ``("8",)``.
    """

    numbers: Mapping[str, int] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)

    def allow(self, candidate: Candidate) -> bool:
        """Whether a candidate keeps every pin."""
        sizes = {"micro_batch": candidate.micro_batch, "micro_batches": candidate.micro_batches}
        return self.allow_mesh(candidate.mesh) and self._keeps(sizes)

    def allow_mesh(self, mesh: Mesh) -> bool:
        """Whether a mesh keeps every pin that concerns it."""
        zero_stage = 3 if mesh.dp_shard > 1 else 0
        if "zero_stage" in self.words and mesh.dp > 1 and str(zero_stage) != self.words["zero_stage"]:
            return False
        plain = "dp" in self.numbers and "dp_shard" not in self.numbers and self.words.get("zero_stage") != "3"
        if plain and mesh.dp_shard > 1:  # ``dp`` alone means replicated
            return False
        return self._keeps({**mesh.model_dump(), "dp": mesh.dp}) and self._within("zero_stage", zero_stage)

    def _keeps(self, have: Mapping[str, int]) -> bool:
        return all(self._within(key, value) and self.numbers.get(key, value) == value for key, value in have.items())

    def options(self, key: str) -> tuple[str, ...]:
        """The values of a word that are allowed."""
        every = (self.words[key],) if key in self.words else WORDS[key]
        return tuple(word for word in every if word not in self.limits.get((key, "!="), ()))

    def _within(self, key: str, value: int) -> bool:
        """Whether a number keeps its bounds and is not forbidden."""
        least, most = self.limits.get((key, ">="), ()), self.limits.get((key, "<="), ())
        kept = all(int(n) <= value for n in least) and all(value <= int(n) for n in most)
        return kept and str(value) not in self.limits.get((key, "!="), ())

    def named(self) -> dict[str, Any]:
        """As :func:`check_pins` takes them."""
        return {**self.numbers, **self.words, **{key + sign: ",".join(v) for (key, sign), v in self.limits.items()}}

    def without(self, name: str) -> Pins:
        """The same pins but one, by its name in :meth:`named`."""
        return Pins(
            {k: v for k, v in self.numbers.items() if k != name},
            {k: v for k, v in self.words.items() if k != name},
            {k: v for k, v in self.limits.items() if "".join(k) != name},
        )

    def text(self) -> str:
        """As they would be typed."""
        return ", ".join(f"{k}{'' if k.endswith('=') else '='}{v}" for k, v in self.named().items())


def parse_pins(words: Iterable[str], forbidden: Iterable[str] = ()) -> dict[str, str]:
    """Reads pins as typed: ``KEY=VALUE``, or a bound such as ``tp<=8``; bounds keep their sign in the key.

    Args:
        forbidden: ``KEY=VALUE`` choices that may not be made.

    Raises:
        InputError: a pin has no value, or a key is pinned twice.
    """
    pins: dict[str, str] = {}
    for word in words:
        match = re.fullmatch(r"\s*(\w+)\s*(<=|>=|=)\s*(\S.*?)\s*", word)
        if not match:
            raise InputError(f"--pin {word!r} is not KEY=VALUE", "Write for example --pin tp=4, or --pin 'tp<=4'")
        key, value = match[1] + match[2].removesuffix("=" if match[2] == "=" else ""), match[3]
        if key in pins:
            raise InputError(f"--pin {key} is given twice: {pins[key]} and {value}", "Give it once")
        pins[key] = value
    for word in forbidden:
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\S.*?)\s*", word)
        if not match:
            raise InputError(f"--forbid {word!r} is not KEY=VALUE", "Write for example --forbid tp=8")
        key = match[1] + "!="
        pins[key] = f"{pins[key]},{match[2]}" if key in pins else match[2]
    return pins


def check_pins(pins: Mapping[str, Any], devices: int, global_batch: int) -> Pins:
    """Checks pins one by one and against each other.

    Raises:
        InputError: a key or value is unknown, or no mesh can keep them all; names the pin.
    """
    numbers: dict[str, int] = {}
    words: dict[str, str] = {}
    limits: dict[tuple[str, str], tuple[str, ...]] = {}
    for key, value in pins.items():
        if key[-2:] in SIGNS:
            limits[key[:-2], key[-2:]] = _limit(key[:-2], key[-2:], str(value))
        elif key in NUMBERS:
            numbers[key] = _positive(key, value)
        elif key in WORDS:
            if str(value) not in WORDS[key]:
                raise InputError(f"pin {key}={value} is unknown", f"Use one of {', '.join(WORDS[key])}")
            words[key] = str(value)
        else:
            raise InputError(f"pin {key}={value} is unknown", f"Pin one of {', '.join((*NUMBERS, *WORDS))}")
    checked = Pins(numbers, words, limits)
    _check_words(checked)
    if numbers.get("ep", 1) > 1:
        raise InputError(f"pin ep={numbers['ep']} cannot be searched yet", "Use ep=1")
    if words.get("zero_stage") == "0" and numbers.get("dp_shard", 1) > 1:
        raise InputError(
            f"pins dp_shard={numbers['dp_shard']} and zero_stage=0 contradict each other", "Shards need zero_stage=3"
        )
    _check_against_devices(checked, devices)
    _check_against_batch(checked, devices, global_batch)
    return checked


def _limit(key: str, sign: str, text: str) -> tuple[str, ...]:
    """The values of a bound or of forbidden choices, checked."""
    values = tuple(value.strip() for value in text.split(","))
    if key in NUMBERS:
        return tuple(str(_positive(key, value)) for value in values)
    if key not in WORDS or sign != "!=":
        usable = (*NUMBERS, *WORDS) if sign == "!=" else NUMBERS
        raise InputError(f"pin {key}{sign}{text} is unknown", f"Use one of {', '.join(usable)}")
    for value in values:
        if value not in WORDS[key]:
            raise InputError(f"pin {key}{sign}{value} is unknown", f"Use one of {', '.join(WORDS[key])}")
    return values


def _check_words(pins: Pins) -> None:
    for key in WORDS:
        if not pins.options(key):
            raise InputError(f"pins {pins.text()} leave no {key}", f"Leave one of {', '.join(WORDS[key])}")


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
    if not any(pins.allow_mesh(mesh) for mesh in meshes(devices, pins)):
        raise InputError(
            f"pins {pins.text()} contradict each other on {devices} devices", "Leave one of them to the search"
        )


def _check_against_batch(pins: Pins, devices: int, global_batch: int) -> None:
    possible = sorted({mesh.dp for mesh in meshes(devices, pins) if pins.allow_mesh(mesh)})
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
        sizes = {*range(1, MOST_MICRO_BATCH + 1), pins.numbers.get("micro_batch", 1)}
        for micro_batch in sorted(size for size in sizes if local % size == 0):
            candidate = Candidate(mesh, micro_batch, local // micro_batch)
            if pins.allow(candidate):
                yield candidate


def schedules_of(candidate: Candidate, pins: Pins) -> tuple[str, ...]:
    """Schedules that can run: 1F1B needs a micro-batch for every stage."""
    if candidate.mesh.pp == 1:
        return (pins.words.get("schedule", "1f1b"),)  # all alike on one stage
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
    if global_batch > MOST_GLOBAL_BATCH:
        raise InputError(f"global batch {global_batch} is too large", f"Give at most {MOST_GLOBAL_BATCH} samples")
    if precision not in PRECISIONS:
        raise InputError(f"precision {precision!r} is unknown", f"Use one of {', '.join(PRECISIONS)}")
    if top < 1:
        raise InputError(f"top {top} is not positive", "Ask for at least one plan")
    if time_limit_s is not None and not time_limit_s > 0:
        raise InputError(f"time limit {time_limit_s} is not positive", "Give seconds")
    if cluster.devices < 1:
        raise InputError(f"cluster {cluster.name!r} has no devices", "Give it at least one")
