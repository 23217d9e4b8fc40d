"""Checkpoints that are damaged, unfinished or too many, on two processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from autopar.errors import InputError, RunError
from autopar.model.capture import capture
from autopar.model.spec import load
from autopar.runtime import checkpoint
from autopar.runtime.checkpoint_writer import CheckpointWriter, save
from autopar.runtime.checksums import damage
from autopar.runtime.parallelize import ParallelModel, parallelize
from autopar.runtime.weights import export_safetensors, load_weights
from tests.distributed.plans import make_plan
from tests.processes import spawn

LORA = str(Path(__file__).parents[1] / "model/programs/lora.py")
TIED = str(Path(__file__).with_name("tied_gpt.py"))


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
        save(model, folder, step, keep=3)
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

    save(model, folder, 1, keep=1)
    assert (folder / "step-00000001").is_dir()
    assert newest.is_dir(), "later checkpoints may be of another run"
    assert not (folder / ".step-00000005.partial").exists()
    save(model, folder, 6, keep=1)
    assert [p.name for p in checkpoint.checkpoints(folder)] == ["step-00000006"]
    assert checkpoint.find("auto", folder, said.append) == folder / "step-00000006"


def test_the_newest_whole_checkpoint_is_taken_and_the_rest_named(tmp_path: Path) -> None:
    spawn(2, passes_over, tmp_path)


def goes_on_while_writing(folder: Path) -> None:
    """What a checkpoint holds is the state at its step, though steps follow before it is whole."""
    model = build()
    batch = model.job.example_batch(4)
    model.step(batch)
    want = {n: t.clone() for n, t in model.full_state_dict().items()}
    writer = CheckpointWriter(model, folder)
    path = writer.save(1)
    for _ in range(3):
        model.step(batch)
    writer.wait()
    assert damage(path) is None
    assert checkpoint.load(model, path) == 1
    assert all(torch.equal(t, want[n]) for n, t in model.full_state_dict().items())

    on_first(lambda: (folder / "file").write_text(""))
    with pytest.raises(RunError, match="could not be written"):  # on every process, not only where it went wrong
        save(model, folder / "file", 2)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    spawn(2, goes_on_while_writing, tmp_path)


def weights_travel(folder: Path) -> None:
    job = load(TIED)
    graph = capture(job, 2)
    model = parallelize(job, make_plan(graph, {"pp": 2}, 2, 2))
    model.step(job.example_batch(4))
    path, file = save(model, folder, 1), folder / "model.safetensors"
    on_first(lambda: export_safetensors(path, file))
    want = model.full_state_dict()
    single = job.build_model()
    single.load_state_dict(load_file(file))  # strict: every name of the model's own state_dict
    assert all(torch.equal(t, want[n]) for n, t in single.state_dict().items())
    for given in (path, file):
        other = parallelize(job, make_plan(graph, {"dp_shard": 2}, 2, 1))
        load_weights(other, given)
        assert not other.optimizer.state
        assert all(torch.equal(t, want[n]) for n, t in other.full_state_dict().items())

    on_first(lambda: save_file({n: t for n, t in load_file(file).items() if "norm" not in n}, file))
    with pytest.raises(InputError, match=r"model\.safetensors' has 'blocks.*norm.* as None"):
        load_weights(other, file)
    on_first(lambda: flip_a_byte(next(path.glob("*.distcp"))))
    with pytest.raises(InputError, match="no whole checkpoint"):
        load_weights(other, path)
    with pytest.raises(InputError, match=r"nope.* cannot be read"):
        load_weights(other, folder / "nope")


def test_weights_go_to_and_from_safetensors_and_other_meshes(tmp_path: Path) -> None:
    spawn(2, weights_travel, tmp_path)


def test_nothing_to_go_on_from(tmp_path: Path) -> None:
    said: list[str] = []
    assert checkpoint.find("auto", tmp_path, said.append) is None
    assert checkpoint.find("none", tmp_path, said.append) is None
    with pytest.raises(InputError, match=r"run\.json is missing"):
        checkpoint.find(str(tmp_path / "step-00000001"), None, said.append)
    assert not said
