"""Checkpoints that are damaged, unfinished or too many, on two processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autopar.errors import InputError
from autopar.model.capture import capture
from autopar.model.spec import load
from autopar.runtime import checkpoint
from autopar.runtime.checksums import damage
from autopar.runtime.parallelize import ParallelModel, parallelize
from tests.distributed.plans import make_plan
from tests.processes import spawn

LORA = str(Path(__file__).parents[1] / "model/programs/lora.py")


def build() -> ParallelModel:
    job = load(LORA)
    return parallelize(job, make_plan(capture(job, 2), {"dp_shard": 2}, 2, 1))


def on_first(action: Callable[[], object]) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def passes_over(folder: Path) -> None:
    model = build()
    batch = model.job.example_batch(4)
    weights = {}
    for step in range(1, 5):
        model.step(batch)
        checkpoint.save(model, folder, step, keep=3)
        weights[step] = {n: t.clone() for n, t in model.full_state_dict().items()}
    names = [p.name for p in checkpoint.checkpoints(folder)]
    assert names == ["step-00000002", "step-00000003", "step-00000004"]
    assert all(damage(folder / name) is None for name in names)

    newest, middle, oldest = (folder / name for name in reversed(names))
    on_first(lambda: flip_a_byte(next(newest.glob("*.distcp"))))
    on_first(lambda: (middle / ".metadata").unlink())
    on_first(lambda: (folder / ".step-00000005.partial").mkdir())
    said: list[str] = []
    assert checkpoint.find("auto", folder, said.append) == oldest
    assert len(said) == (3 if dist.get_rank() == 0 else 0)
    if said:
        assert ".step-00000005.partial was never finished" in said[0]
        assert "step-00000004 is damaged" in said[1]
        assert ".distcp differs" in said[1]
        assert "step-00000003 is damaged" in said[2]
        assert ".metadata is missing" in said[2]
    assert checkpoint.find(str(folder), None, said.append) == oldest
    assert checkpoint.load(model, oldest) == 2
    for name, tensor in model.full_state_dict().items():
        assert torch.equal(tensor, weights[2][name])

    with pytest.raises(InputError, match=r"step-00000004.*differs"):
        checkpoint.find(str(newest), folder, said.append)
    on_first(lambda: (oldest / "run.json").write_text('{"step": 2'))
    with pytest.raises(InputError, match=r"no checkpoint in .* is whole"):
        checkpoint.find("auto", folder, said.append)

    checkpoint.save(model, folder, 1, keep=1)
    assert (folder / "step-00000001").is_dir()
    assert newest.is_dir(), "later checkpoints may be of another run"
    assert not (folder / ".step-00000005.partial").exists()
    checkpoint.save(model, folder, 6, keep=1)
    assert [p.name for p in checkpoint.checkpoints(folder)] == ["step-00000006"]
    assert checkpoint.find("auto", folder, said.append) == folder / "step-00000006"


def test_the_newest_whole_checkpoint_is_taken_and_the_rest_named(tmp_path: Path) -> None:
    spawn(2, passes_over, tmp_path)


def test_nothing_to_go_on_from(tmp_path: Path) -> None:
    said: list[str] = []
    assert checkpoint.find("auto", tmp_path, said.append) is None
    assert checkpoint.find("none", tmp_path, said.append) is None
    with pytest.raises(InputError, match=r"run\.json is missing"):
        checkpoint.find(str(tmp_path / "step-00000001"), None, said.append)
    assert not said
