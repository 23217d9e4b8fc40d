"""A grid holds every combination that can be laid out, priced as the same run is priced alone."""

from __future__ import annotations

import pytest

from autopar.errors import InputError
from autopar.report.grid import grid
from autopar.validate.predict import Predictor
from autopar.validate.rows import Row

TINY = {
    **{"family": "llama", "layers": 4, "hidden": 512, "ffn": 1024, "heads": 8, "vocab": 1000, "seq_len": 128},
    **{"gpu": "h100-sxm", "gpus": 8, "gpus_per_node": 8, "intra_node": "nvlink4", "precision": "bf16"},
    **{"global_batch": 16, "flash_attention": 1, "micro_batch": 1, "recompute": "none", "vpp": 1},
}


def test_every_combination_once_and_priced_alike() -> None:
    predictor = Predictor()
    table = grid(predictor, TINY, {"tp": (1, 2, 3), "pp": (1, 2)})  # three do not divide eight devices
    assert sorted(zip(table["tp"], table["pp"], table["dp"], strict=True)) == [
        (1, 1, 8),
        (1, 2, 4),
        (2, 1, 4),
        (2, 2, 2),
    ]
    assert table["step_time_s"].is_monotonic_increasing
    for row in table.to_dict("records"):
        alone = predictor.predict(Row(id="alone", **{**TINY, "tp": row["tp"], "pp": row["pp"]}))
        assert row["step_time_s"] == alone.step_time_s
        assert row["tokens_per_s"] == pytest.approx(16 * 128 / alone.step_time_s)
        parts = sum(
            seconds
            for name, seconds in row.items()
            if name.endswith("_s") and name not in ("step_time_s", "tokens_per_s")
        )
        assert parts == pytest.approx(row["step_time_s"])
    assert table["fits"].all()


def test_nothing_to_lay_out_says_why() -> None:
    with pytest.raises(InputError, match="8 gpus"):
        grid(Predictor(), TINY, {"tp": (3, 5)})
