"""Device files: what ships loads and is sane; what is wrong is named."""

import json
from pathlib import Path

import pytest

from autopar.errors import ProfileError
from autopar.hardware import Device
from autopar.hardware.efficiency import power_limited_fraction
from autopar.hardware.locations import available
from autopar.units import GIB

SHIPPED = sorted(available("devices"))


def edited(tmp_path: Path, **changes: object) -> Path:
    data = json.loads(available("devices")["a100-sxm-80gb"].read_text())
    for key, value in changes.items():
        if value is ...:
            del data[key]
        else:
            data[key] = value
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_device_is_sane(name: str) -> None:
    device = Device.load(name)
    assert device.name == name
    assert device.sources
    assert device.memory_bytes > GIB
    assert device.context_bytes < device.memory_bytes / 4
    assert device.peak("fp8") >= device.peak("bf16") >= device.peak("fp32") > 0
    assert 0 < device.matmul.rate_cap <= 1
    assert all(device.bandwidth(kind) <= device.memory_bandwidth for kind in ("pointwise", "gather", "unheard-of"))


def test_every_gpu_of_the_published_runs_is_known() -> None:
    import pandas as pd

    runs = pd.read_csv(Path(__file__).parents[2] / "profiles" / "measured" / "training_runs.csv")
    assert set(runs.gpu) <= set(SHIPPED)


def test_unknown_device_lists_what_exists() -> None:
    with pytest.raises(ProfileError, match=r"device 'a100' is unknown.*a100-sxm-80gb"):
        Device.load("a100")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_gb": 80}, "unknown field 'memory_gb'; known fields: .*memory_gib"),
        ({"memory_gib": 0}, "memory_gib: .*greater than 0.*value: 0"),
        ({"memory_bandwidth_gb_s": -1}, "memory_bandwidth_gb_s"),
        ({"compute_units": ...}, "field 'compute_units' is missing"),
        ({"peak_tflops": {"bf16": 0}}, "peak_tflops.bf16: must be greater than 0"),
        ({"peak_tflops": {"int3": 1}}, "peak_tflops.int3"),
        ({"memory_efficiency": {"pointwise": 1.5}}, "memory_efficiency.pointwise"),
        ({"matmul": {"peak_fraction": 0.9, "k_overhead": 1, "tile": 3}}, "matmul.tile"),
        ({"kind": "tpu"}, "kind: "),
        ({"power": {"limit_w": 50, "static_w": 60, "reference_w": 90, "reference_fraction": 0.5}}, "static_w"),
        ({"operator_table": "none.csv"}, "operator table .*none.csv' cannot be read"),
        ({"schema_version": 7}, "schema_version"),
    ],
)
def test_wrong_fields_are_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = edited(tmp_path, **changes)
    with pytest.raises(ProfileError, match=message):
        Device.load(path)


def test_file_that_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text("{")
    with pytest.raises(ProfileError, match="cannot be read as JSON"):
        Device.load(path)


def test_power_limit() -> None:
    assert power_limited_fraction(300, 60, 300, 0.7) == pytest.approx(0.7)
    assert power_limited_fraction(3000, 60, 300, 0.7) == 1.0
    fractions = [power_limited_fraction(limit, 100, 700, 0.6) for limit in (300, 500, 700, 900)]
    assert fractions == sorted(fractions)
    assert power_limited_fraction(175, 100, 700, 0.6) == pytest.approx(0.3)  # an eighth of the dynamic power
