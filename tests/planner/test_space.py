"""Pins: what they keep, what they leave out, and how those that cannot hold are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import InputError
from autopar.planner.space import NUMBERS, Pins, candidates, check_pins, parse_pins


@given(st.integers(1, 64), st.integers(1, 256))
def test_every_candidate_uses_all_devices_and_the_whole_batch(devices: int, batch: int) -> None:
    found = list(candidates(devices, batch, Pins()))
    for one in found:
        assert one.mesh.devices == devices
        assert one.mesh.dp * one.micro_batch * one.micro_batches == batch
    assert len(set(found)) == len(found)


@given(st.sampled_from(["pp", "tp", "dp", "dp_shard", "dp_replicate", "micro_batch"]), st.integers(1, 8))
def test_bounds_and_forbidden_values_part_the_space(key: str, value: int) -> None:
    def count(sign: str) -> int:
        try:
            return sum(1 for _ in candidates(16, 32, check_pins({key + sign: value}, 16, 32)))
        except InputError:  # nothing left
            return 0

    def value_of(one: object) -> int:
        mesh = one.mesh  # type: ignore[attr-defined]
        return {**mesh.model_dump(), "dp": mesh.dp, "micro_batch": one.micro_batch}[key]  # type: ignore[attr-defined]

    every = [value_of(one) for one in candidates(16, 32, Pins())]
    assert count("<=") == sum(v <= value for v in every)
    assert count(">=") == sum(v >= value for v in every)
    assert count("!=") == sum(v != value for v in every)


def test_pins_as_typed() -> None:
    assert parse_pins(["tp=4", "pp <= 8", "dp>=2"], ["tp=8", "tp=2"]) == {
        "tp": "4",
        "pp<=": "8",
        "dp>=": "2",
        "tp!=": "8,2",
    }
    checked = check_pins(parse_pins(["tp<=4"], ["recompute=full"]), 8, 8)
    assert checked.options("recompute") == ("none",)
    assert checked.text() == "tp<=4, recompute!=full"
    assert check_pins(checked.named(), 8, 8) == checked
    assert checked.without("tp<=").text() == "recompute!=full"


@pytest.mark.parametrize(
    ("pins", "devices", "batch", "part"),
    [
        ({"tq": 2}, 8, 8, "tq"),
        ({"tp": 0}, 8, 8, "tp=0"),
        ({"tp": -2}, 8, 8, "tp=-2"),
        ({"tp": "two"}, 8, 8, "tp=two"),
        ({"tp": 3}, 8, 8, "tp=3"),
        ({"tp": 4, "pp": 4}, 8, 8, "16 devices"),
        ({"tp": 2, "dp": 2, "pp": 1}, 8, 8, "tp=2"),
        ({"dp": 4, "dp_shard": 3}, 8, 8, "dp_shard=3"),
        ({"dp_shard": 4, "zero_stage": 0}, 8, 8, "zero_stage=0"),
        ({"schedule": "2f2b"}, 8, 8, "schedule=2f2b"),
        ({"recompute": "some"}, 8, 8, "recompute=some"),
        ({"dp": 8}, 8, 12, "12"),
        ({"micro_batch": 5}, 8, 8, "micro_batch=5"),
        ({"tp": 4, "tp<=": 2}, 8, 8, "tp<=2"),
        ({"tp<=": 0}, 8, 8, "tp=0"),
        ({"schedule<=": "gpipe"}, 8, 8, "schedule<=gpipe"),
        ({"schedule!=": "gpipe,1f1b"}, 8, 8, "schedule"),
        ({"recompute": "full", "recompute!=": "full"}, 8, 8, "recompute"),
    ],
)
def test_impossible_pins_are_refused_by_name(pins: dict[str, object], devices: int, batch: int, part: str) -> None:
    with pytest.raises(InputError) as caught:
        check_pins(pins, devices, batch)
    assert part in caught.value.what
    assert caught.value.remedy


@pytest.mark.parametrize("word", ["tp", "tp=", "=4", "tp<4", ""])
def test_what_is_no_pin_is_refused(word: str) -> None:
    with pytest.raises(InputError, match="KEY=VALUE"):
        parse_pins([word])
    with pytest.raises(InputError, match="twice"):
        parse_pins(["tp=2", "tp=4"])
    with pytest.raises(InputError, match="--forbid"):
        parse_pins([], ["tp"])


def test_every_number_can_be_pinned_to_one() -> None:
    for key in NUMBERS:
        if key not in ("dp", "micro_batches"):
            assert any(candidates(4, 8, check_pins({key: 1}, 4, 8)))
