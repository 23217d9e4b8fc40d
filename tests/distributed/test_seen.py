"""What a run says of itself, on two processes: times, memory, who lags, who made the loss NaN, fp16 overflows."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.errors import InputError, RunError
from autopar.runtime.monitor import lagging
from autopar.runtime.parallelize import ParallelModel, parallelize
from autopar.runtime.trainer import Options, train
from tests.distributed.matrix import GLOBAL_BATCH, Case, plan_of, small
from tests.processes import spawn

NAN_AT = GLOBAL_BATCH * 2 + 5  # a sample of the third step, in the second half of its batch


class Images:
    """Samples for the small vision transformer, with one thing that happens on one process."""

    def __init__(self, on_get: Callable[[int, torch.Tensor], None]) -> None:
        self.batch = small("vit").example_batch(64)
        self.on_get, self.asked = on_get, 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        image = self.batch["images"][index].clone()
        self.on_get(self.asked, image)
        self.asked += 1
        return {"images": image, "labels": self.batch["labels"][index]}


def build(on_get: Callable[[int, torch.Tensor], None], precision: str = "fp32") -> ParallelModel:
    job = replace(small("vit"), build_dataset=lambda split: Images(on_get))
    return parallelize(job, plan_of(Case("vit", "dp_shard=2", precision=precision)))


def spoil(asked: int, image: torch.Tensor) -> None:
    if dist.get_rank() == 1 and asked == GLOBAL_BATCH // 2 * 2 + 1:  # in the third step
        image.fill_(math.nan)


def linger(asked: int, image: torch.Tensor) -> None:
    if dist.get_rank() == 1:
        time.sleep(0.05)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def a_nan_is_located(folder: Path) -> None:
    model = build(spoil)
    options = Options(steps=5, checkpoint_dir=str(folder / "stop"), checkpoint_every=2)
    with pytest.raises(RunError, match=r"loss is nan at step 3 on rank 1; the last checkpoint is .*step-00000002"):
        train(model, options)
    assert all(p.isfinite().all() for p in model.full_state_dict().values()), "the step must not be taken"

    model = build(spoil)
    train(model, Options(steps=5, nonfinite="skip", metrics=str(folder / "skip.jsonl")))
    assert math.isfinite(model.loss)
    dist.barrier()
    assert [row["skipped"] for row in rows_of(folder / "skip.jsonl")] == [False, False, True, False, False]


def a_slow_process_is_named(folder: Path) -> None:
    train(build(linger), Options(steps=6, metrics=str(folder / "slow.jsonl"), profile=str(folder / "trace")))
    dist.barrier()
    rows = rows_of(folder / "slow.jsonl")
    assert rows[-1]["slowest_rank"] == 1
    for row in rows:
        parts = [row[k] for k in ("data_wait_s", "forward_backward_s", "reduction_s", "optimizer_s")]
        assert min(parts) >= 0
        assert sum(parts) <= row["step_time_s"]
        assert 0.05 < row["peak_memory_gib"] < 64
    for rank in range(2):
        events = json.loads((folder / "trace" / f"rank-{rank}.json").read_text())["traceEvents"]
        steps = {e["name"] for e in events if str(e.get("name", "")).startswith("ProfilerStep")}
        assert len(steps) == 3
        assert any("all_gather" in str(e.get("name", "")) for e in events), "FSDP's collectives are in it"


def overflows_are_skipped_together() -> None:
    model = build(lambda asked, image: None, "fp16")
    batch = model.job.example_batch(GLOBAL_BATCH)
    assert model.loss_scale is not None
    model.step(batch)
    assert not model.skipped
    before = {n: t.clone() for n, t in model.full_state_dict().items()}
    model.loss_scale.value = 2.0**60
    model.step(batch)
    assert model.skipped
    assert model.loss_scale.value == 2.0**59
    assert all(torch.equal(t, before[n]) for n, t in model.full_state_dict().items())
    model.loss_scale.value = 1024.0
    model.step(batch)
    assert not model.skipped
    assert not all(torch.equal(t, before[n]) for n, t in model.full_state_dict().items())


def test_a_loss_that_is_not_finite_names_its_rank_or_is_skipped(tmp_path: Path) -> None:
    spawn(2, a_nan_is_located, tmp_path)


def test_times_memory_trace_and_the_slowest_rank(tmp_path: Path) -> None:
    spawn(2, a_slow_process_is_named, tmp_path)


def test_fp16_overflows_are_skipped_on_all_processes() -> None:
    spawn(2, overflows_are_skipped_together)


def test_who_lags() -> None:
    assert lagging([1.0]) is None
    assert lagging([1.0, 1.1, 1.2, 1.0]) is None
    assert lagging([1.0, 1.0, 2.0, 1.1]) == 2
    assert lagging([0.0, 0.0]) is None


def test_tensorboard_shows_every_number_or_says_what_is_missing(tmp_path: Path) -> None:
    plan = plan_of(Case("vit", "dp_replicate=1", micro_batches=1))
    options = Options(steps=3, tensorboard=str(tmp_path / "board"), metrics=str(tmp_path / "rows.jsonl"))
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        with pytest.raises(InputError, match=r"pip install 'autopar\[tensorboard\]'"):
            train(parallelize(small("vit"), plan), options)
        return
    train(parallelize(small("vit"), plan), options)
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    rows = rows_of(tmp_path / "rows.jsonl")
    shown = [(event.step, event.value) for event in board.Scalars("loss")]
    assert shown == [(row["step"], pytest.approx(row["loss"])) for row in rows]


def test_an_unknown_answer_to_nan() -> None:
    with pytest.raises(InputError, match="Use stop or skip"):
        Options(steps=1, nonfinite="ignore")
