"""Tables of runs: good and faulty ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import InputError
from autopar.hardware.locations import data_file
from autopar.validate.rows import read_rows
from autopar.validate.validate import rank_correlation, validate

HEADER = (
    "id,family,layers,hidden,ffn,heads,vocab,seq_len,gpu,gpus,gpus_per_node,precision,dp,zero_stage,tp,pp,"
    "micro_batch,global_batch,recompute,intra_node,inter_node_gbps_per_gpu,step_time_s\n"
)


def table(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "runs.csv"
    path.write_text(HEADER + "\n".join(lines) + "\n")
    return path


def test_published_table_reads_without_fault() -> None:
    rows, faults = read_rows(data_file("measured/training_runs.csv"))
    assert len(rows) == 172
    assert not faults
    assert all(row.measured_s for row in rows)
    assert {row.group for row in rows} >= {"korthikanti", "megatron21", "b200", "mpt", "nemo2407", "bridge", "titan"}


def test_missing_file_and_foreign_table_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_rows(tmp_path / "none.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="no column id"):
        read_rows(tmp_path / "other.csv")


def test_rows_that_cannot_be_predicted_stay_with_their_error(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        "x-good,llama,2,256,512,4,1024,128,h100-sxm,8,8,bf16,8,3,1,1,1,16,none,nvlink4,,0.1",
        "x-mesh,llama,2,256,512,4,1024,128,h100-sxm,8,8,bf16,3,3,1,1,1,16,none,nvlink4,,0.1",
        "x-device,llama,2,256,512,4,1024,128,no-such-gpu,8,8,bf16,8,3,1,1,1,16,none,nvlink4,,0.1",
        "x-cell,llama,many,256,512,4,1024,128,h100-sxm,8,8,bf16,8,3,1,1,1,16,none,nvlink4,,0.1",
    )
    report = validate(path)
    errors = {o.row_id: o.error for o in report.outcomes}
    assert errors["x-good"] is None
    assert "gpus" in str(errors["x-mesh"])
    assert "no-such-gpu" in str(errors["x-device"])
    assert "layers" in str(errors["x-cell"])
    summary = report.to_json()["summary"]["x"]
    assert (summary["n"], summary["failed"]) == (4, 3)


def test_open_settings_are_chosen_as_the_fastest_that_fit(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        "x-open,llama,2,256,512,4,1024,128,h100-sxm,8,8,bf16,8,3,1,1,,64,,nvlink4,,0.1",
        *(f"x-{m},llama,2,256,512,4,1024,128,h100-sxm,8,8,bf16,8,3,1,1,{m},64,none,nvlink4,,0.1" for m in (1, 2, 4, 8)),
    )
    first, *fixed = validate(path).outcomes
    assert first.predicted_s == pytest.approx(min(o.predicted_s or 9e9 for o in fixed))


def test_rank_correlation_of_known_orders() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 2], [5, 5, 9]) == pytest.approx(1)
    assert rank_correlation([1], [1]) is None
