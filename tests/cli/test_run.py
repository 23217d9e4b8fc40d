"""autopar search, estimate and run end to end, as a user starts them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.command import GPT, autopar, refuse, succeed

SMALL = """
import torch
import torch.nn.functional as F
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
def build_model():
    return Model()
def example_batch(n):
    x = torch.linspace(-1, 1, n * 16).reshape(n, 16)
    return {"x": x, "y": x.flip(1)}
def compute_loss(output, batch):
    return F.mse_loss(output, batch["y"])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "model.py").write_text(SMALL)
    for pin in ("dp=2", "tp=2", "pp=2"):
        words = ["--cluster", "local-cpu-2", "--global-batch", "8", "--pin", pin, "-o", f"{pin[:2]}.json"]
        done = autopar("search", "model.py", *words, cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_three_plans_of_one_model_give_the_same_losses(folder: Path) -> None:
    losses = []
    for plan in ("dp", "tp", "pp"):
        summary = succeed("run", f"{plan}.json", "--steps", "5", "--metrics", f"{plan}.jsonl", cwd=folder)
        assert summary["steps"] == 5
        metrics = rows(folder / f"{plan}.jsonl")
        assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5]
        keys = {"step", "loss", "grad_norm", "lr", "step_time_s", "tokens_per_s", "mfu", "predicted_step_time_s"}
        assert keys <= set(metrics[0])
        losses.append([row["loss"] for row in metrics])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)


def test_resume_equals_an_uninterrupted_run_also_on_another_mesh(folder: Path) -> None:
    whole = succeed("run", "dp.json", "--steps", "6", cwd=folder)["losses"]
    succeed("run", "dp.json", "--steps", "3", "--checkpoint-dir", "ck", cwd=folder)
    same = succeed("run", "dp.json", "--steps", "6", "--checkpoint-dir", "ck", "--checkpoint-every", "2", cwd=folder)
    assert same["losses"] == whole[3:]
    for plan in ("tp", "pp"):
        other = succeed("run", f"{plan}.json", "--steps", "6", "--resume", "ck/step-00000003", cwd=folder)
        assert other["losses"] == pytest.approx(whole[3:], rel=1e-5)


def test_a_schedule_goes_on_from_the_checkpoint_bit_by_bit(folder: Path) -> None:
    asked = ["--lr-schedule", "cosine", "--warmup-steps", "2", "--min-lr", "0.1", "--checkpoint-every", "3"]
    words = ["run", "dp.json", "--steps", "6", "--checkpoint-dir", "cosine", "--metrics", "cosine.jsonl"]
    succeed(*words, *asked, cwd=folder)
    whole = rows(folder / "cosine.jsonl")
    assert len({row["lr"] for row in whole}) == 5  # the warm-up ends where the cosine begins
    shutil.rmtree(folder / "cosine/step-00000006")
    succeed(*words, cwd=folder)  # the schedule is the checkpoint's
    for before, again in zip(whole, rows(folder / "cosine.jsonl"), strict=True):
        assert [before[k] for k in ("loss", "grad_norm", "lr")] == [again[k] for k in ("loss", "grad_norm", "lr")]


def test_weights_of_a_checkpoint_begin_another_run(folder: Path) -> None:
    losses = succeed("run", "tp.json", "--steps", "2", "--checkpoint-dir", "ck3", "--checkpoint-every", "1", cwd=folder)
    assert succeed("weights", "ck3/step-00000001", "-o", "w.safetensors", cwd=folder)["tensors"] == 24
    begun = succeed("run", "pp.json", "--steps", "1", "--weights", "w.safetensors", cwd=folder)
    assert begun["losses"] == pytest.approx(losses["losses"][1:], rel=1e-5)
    assert "run.json is missing" in refuse("weights", "nope", "-o", "w.safetensors", cwd=folder)


def test_a_checkpoint_that_is_not_whole_is_refused(folder: Path) -> None:
    (folder / "ck2" / "step-00000009").mkdir(parents=True)
    assert "ck2" in refuse("run", "dp.json", "--resume", "ck2/step-00000009", cwd=folder)


def test_estimate_of_the_written_plan_is_the_searchs(folder: Path) -> None:
    plan = json.loads((folder / "tp.json").read_text())
    words = ["--cluster", "local-cpu-2", "--global-batch", "8", "--plan", "tp.json"]
    found = succeed("estimate", "model.py", *words, cwd=folder)
    assert found["step_time_s"] == pytest.approx(plan["estimate"]["step_time_s"])
    assert sum(v for k, v in found["breakdown"].items() if k != "exposed_communication") == pytest.approx(
        found["step_time_s"]
    )
    keys = {"tokens_per_s_per_device", "tflops_per_device", "mfu", "peak_allocated_gib", "peak_reserved_gib"}
    assert keys | {"breakdown", "mesh", "optimality_gap", "search_time_s", "stages"} <= set(found)


def test_search_json_has_every_plan_best_first(folder: Path) -> None:
    found = succeed("search", "model.py", "--cluster", "local-cpu-2", "--global-batch", "8", cwd=folder)
    times = [plan["step_time_s"] for plan in found["plans"]]
    assert times == sorted(times)
    assert found["lower_bound_s"] <= times[0]
    assert found["optimality_gap"] == pytest.approx(times[0] / found["lower_bound_s"] - 1, abs=1e-6)


def test_a_child_that_dies_is_named_with_its_error_and_leaves_no_orphan(folder: Path) -> None:
    text = SMALL.replace(
        "def compute_loss(output, batch):",
        "import os\nclass Dataset:\n"
        "    def __len__(self):\n        return 64\n"
        "    def __getitem__(self, i):\n"
        "        if os.environ.get('RANK') == '1':\n            raise ValueError('the disk is on fire')\n"
        "        return {'x': torch.ones(16), 'y': torch.ones(16)}\n"
        "def build_dataset(split):\n    return Dataset()\n"
        "def compute_loss(output, batch):",
    )
    (folder / "dies.py").write_text(text)
    begun = time.monotonic()
    message = refuse("run", "dp.json", "dies.py", "--steps", "5", code=1, cwd=folder)
    assert "rank 1" in message
    assert "the disk is on fire" in message
    assert time.monotonic() - begun < 60
    assert not workers_of(folder)


def test_a_process_that_hangs_is_named_within_the_timeout(folder: Path) -> None:
    text = SMALL + (
        "\nimport os, time\n"
        "class Dataset:\n"
        "    def __len__(self):\n        return 64\n"
        "    def __getitem__(self, i):\n"
        "        time.sleep(3600 if os.environ.get('RANK') == '1' else 0)\n"
        "        return {'x': torch.ones(16), 'y': torch.ones(16)}\n"
        "def build_dataset(split):\n    return Dataset()\n"
    )
    (folder / "hangs.py").write_text(text)
    message = refuse("run", "dp.json", "hangs.py", "--steps", "5", "--timeout", "10", code=1, cwd=folder)
    assert "rank 1 did not answer: rank 0 waited in vain" in message
    assert not workers_of(folder)


def workers_of(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words = process.info["cmdline"] or []
        if "autopar.runtime.worker" in words and process.info["cwd"] == str(folder):
            found.append(process.pid)
    return found


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "autopar.cli", *words], cwd=folder, env=env, stderr=subprocess.PIPE, text=True
    )


def wait_for(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def test_a_killed_child_stops_the_run_and_is_named(folder: Path) -> None:
    run = start(folder, "run", "dp.json", "--steps", "1000000", "--metrics", "killed.jsonl")
    wait_for(lambda: (folder / "killed.jsonl").is_file() and len((folder / "killed.jsonl").read_text()) > 0)
    victim = next(p for p in workers_of(folder) if psutil.Process(p).environ().get("RANK") == "1")
    os.kill(victim, signal.SIGKILL)
    _, stderr = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "rank 1" in stderr
    assert "SIGKILL" in stderr
    assert not workers_of(folder)


def test_children_end_with_a_parent_that_is_killed(folder: Path) -> None:
    run = start(folder, "run", "dp.json", "--steps", "1000000", "--metrics", "orphan.jsonl")
    wait_for(lambda: (folder / "orphan.jsonl").is_file())
    run.kill()
    run.communicate(timeout=30)
    wait_for(lambda: not workers_of(folder), 20)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_checkpoints_and_ends_well(folder: Path, number: signal.Signals) -> None:
    name = f"t{int(number)}"
    run = start(folder, "run", "tp.json", "--steps", "1000000", "--metrics", f"{name}.jsonl", "--checkpoint-dir", name)
    path = folder / f"{name}.jsonl"
    wait_for(lambda: path.is_file() and path.read_text().count("\n") > 2)
    run.send_signal(number)
    _, stderr = run.communicate(timeout=60)
    assert run.returncode == 0, stderr
    (saved,) = (folder / name).glob("step-*")
    assert f"stopped after step {int(saved.name[5:])}" in stderr
    assert "goes on from there" in stderr


def test_without_a_checkpoint_folder_a_signal_still_ends_all(folder: Path) -> None:
    run = start(folder, "run", "dp.json", "--steps", "1000000", "--metrics", "plain.jsonl")
    wait_for(lambda: (folder / "plain.jsonl").is_file() and (folder / "plain.jsonl").read_text().count("\n") > 2)
    run.send_signal(signal.SIGTERM)
    _, stderr = run.communicate(timeout=60)
    assert run.returncode == 0, stderr
    assert "nothing was saved" in stderr


def torchrun(folder: Path, processes: int, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "-m", "autopar.cli", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=180
    )


def test_torchrun_starts_the_same_run(folder: Path) -> None:
    whole = succeed("run", "tp.json", "--steps", "3", cwd=folder)["losses"]
    done = torchrun(folder, 2, "run", "tp.json", "--steps", "3", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["losses"] == pytest.approx(whole, rel=1e-6)


def test_fewer_processes_than_the_plan_needs(folder: Path) -> None:
    done = torchrun(folder, 1, "run", "tp.json", "--steps", "3")
    assert done.returncode != 0
    assert "error: the plan needs 2 processes (tp=2), there are 1" in done.stderr


def test_the_zoo_gpt_trains_on_a_text(tmp_path: Path) -> None:
    words = ["--cluster", "local-cpu-2", "--global-batch", "16", "-o", "plan.json"]
    assert autopar("search", GPT, *words, cwd=tmp_path).returncode == 0
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    summary = succeed("run", "plan.json", "--steps", "8", "--data", "text.txt", cwd=tmp_path)
    assert summary["last_loss"] < summary["first_loss"] - 0.5


def test_missing_data_file(folder: Path) -> None:
    assert "nope.txt" in refuse("run", "dp.json", "--data", "nope.txt", cwd=folder)
