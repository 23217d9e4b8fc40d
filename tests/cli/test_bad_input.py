"""Bad input ends in one clear message with exit code 2, no traceback, and nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import GPT, autopar, refuse

SEARCH = ["--cluster", "local-cpu-2", "--global-batch", "16"]
MODEL = """
import torch
from torch import nn
def build_model():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
def example_batch(batch_size):
    return (torch.ones(batch_size, 8),)
def compute_loss(output, batch):
    return output.square().mean()
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "model.py").write_text(MODEL)
    done = autopar("search", "model.py", *SEARCH, "-o", "plan.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "plan.json"


def model(folder: Path, text: str) -> str:
    path = folder / "model.py"
    path.write_text(text)
    return str(path)


def edited(plan: Path, folder: Path, **changes: object) -> str:
    data = json.loads(plan.read_text())
    data.update(changes)
    (folder / "edited.json").write_text(json.dumps(data))
    return str(folder / "edited.json")


def test_missing_model_file() -> None:
    assert "nope.py" in refuse("search", "nope.py", *SEARCH)


@pytest.mark.parametrize("missing", ["build_model", "example_batch"])
def test_model_without_a_required_function(missing: str, tmp_path: Path) -> None:
    text = MODEL.replace(f"def {missing}", "def other")
    message = refuse("search", model(tmp_path, text), *SEARCH, "-o", str(tmp_path / "plan.json"))
    assert missing in message
    assert not (tmp_path / "plan.json").exists()


def test_build_model_that_raises_shows_its_own_error(tmp_path: Path) -> None:
    text = MODEL.replace("return nn.Sequential", "raise ValueError('my own words')\n    return nn.Sequential")
    assert "my own words" in refuse("search", model(tmp_path, text), *SEARCH)


def test_model_with_a_syntax_error(tmp_path: Path) -> None:
    assert "line 1" in refuse("search", model(tmp_path, "def build_model(:\n"), *SEARCH)


def test_unknown_cluster_lists_known_ones() -> None:
    message = refuse("search", GPT, "--cluster", "local-cpu-3", "--global-batch", "16")
    assert "local-cpu-2" in message


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("nodez = 1", "nodez"),
        ("nodes = 0", "nodes"),
        ("devices_per_node = -2", "devices_per_node"),
        ('device = "abacus"', "abacus"),
    ],
)
def test_wrong_cluster_field_is_named(line: str, named: str, tmp_path: Path) -> None:
    base = {"name": '"mine"', "device": '"cpu-local"', "nodes": "1", "devices_per_node": "2"}
    key, _, value = line.partition(" = ")
    base[key] = value
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(f"{k} = {v}" for k, v in base.items()) + "\n")
    assert named in refuse("search", GPT, "--cluster", str(path), "--global-batch", "16")


@pytest.mark.parametrize("batch", ["0", "-4"])
def test_sizes_must_be_positive(batch: str) -> None:
    done = autopar("search", GPT, "--cluster", "local-cpu-2", "--global-batch", batch)
    assert done.returncode == 2
    assert batch in done.stderr
    assert "Traceback" not in done.stderr


def test_batch_that_no_data_parallel_size_divides() -> None:
    message = refuse("search", GPT, "--cluster", "local-cpu-2", "--global-batch", "15", "--pin", "dp=2")
    assert "15" in message


@pytest.mark.parametrize(
    "pins",
    [["tp=4"], ["tp=2", "dp=2"], ["tp=2", "tp=1"], ["colour=2"], ["tp=0"], ["tp=two"], ["tp"], ["schedule=spiral"]],
    ids="+".join,
)
def test_pins_that_cannot_hold(pins: list[str]) -> None:
    words = [word for pin in pins for word in ("--pin", pin)]
    assert pins[-1].split("=")[0] in refuse("search", GPT, *SEARCH, *words)


def test_missing_plan() -> None:
    assert "nope.json" in refuse("run", "nope.json")


def test_plan_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{")
    assert "plan.json" in refuse("run", str(tmp_path / "plan.json"))


def test_plan_of_another_schema_version(plan: Path, tmp_path: Path) -> None:
    assert "schema_version" in refuse("run", edited(plan, tmp_path, schema_version=99))


def test_plan_of_another_model(plan: Path, tmp_path: Path) -> None:
    message = refuse("run", str(plan), GPT)
    assert "fingerprint" in message or "model" in message


def test_plan_with_an_unknown_field(plan: Path, tmp_path: Path) -> None:
    assert "colour" in refuse("run", edited(plan, tmp_path, colour="red"))


def test_plan_whose_batch_contradicts_itself(plan: Path, tmp_path: Path) -> None:
    assert "global_batch" in refuse("run", edited(plan, tmp_path, global_batch=1000))


def test_plan_whose_mesh_contradicts_its_cluster(plan: Path, tmp_path: Path) -> None:
    data = json.loads(plan.read_text())
    mesh = {**data["mesh"], "tp": 8}
    assert "mesh" in refuse("run", edited(plan, tmp_path, mesh=mesh))


def test_plan_edited_to_an_impossible_placement(plan: Path, tmp_path: Path) -> None:
    folder = tmp_path
    model_path = model(folder, MODEL)
    made = autopar("search", model_path, *SEARCH, "--pin", "tp=2", "-o", str(folder / "tp.json"))
    assert made.returncode == 0, made.stderr
    data = json.loads((folder / "tp.json").read_text())
    label = "linear"
    next(iter(data["layouts"].values()))["operators"][label] = {"tp": "S(7) S(7) R -> S(7)"}
    (folder / "bad.json").write_text(json.dumps(data))
    for words in (
        ["run", str(folder / "bad.json")],
        ["estimate", model_path, *SEARCH, "--plan", str(folder / "bad.json")],
    ):
        message = refuse(*words)
        assert label in message
        assert "S(7)" in message


def test_nothing_fits_exits_3_and_says_what_would(tmp_path: Path) -> None:
    text = "\n".join(
        ['name = "tiny"', 'device = "cpu-local"', "nodes = 1", "devices_per_node = 2", "memory_reserve_gib = 1e6"]
    )
    (tmp_path / "tiny.toml").write_text(text)
    done = autopar("search", GPT, "--cluster", str(tmp_path / "tiny.toml"), "--global-batch", "16")
    assert done.returncode in (2, 3)
    assert "Traceback" not in done.stderr


def test_an_existing_file_is_not_overwritten_by_init(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("precious")
    assert "model.py" in refuse("init", str(tmp_path / "model.py"))
    assert (tmp_path / "model.py").read_text() == "precious"


def test_unwritable_output_is_refused_before_the_search(tmp_path: Path) -> None:
    assert "nowhere" in refuse("search", GPT, *SEARCH, "-o", str(tmp_path / "nowhere" / "plan.json"))


def test_debug_shows_the_traceback() -> None:
    done = autopar("--debug", "search", "nope.py", *SEARCH)
    assert done.returncode != 0
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--checkpoint-dir", "model.py"], "model.py"),
        (["--metrics", "nowhere/metrics.jsonl"], "nowhere"),
        (["--metrics", "."], "--metrics"),
    ],
)
def test_a_run_that_cannot_write_does_not_start(plan: Path, words: list[str], named: str) -> None:
    assert named in refuse("run", "plan.json", *words, cwd=plan.parent)


@pytest.mark.parametrize("batch", [10**20, 7919000000007])
def test_a_global_batch_beyond_reason(plan: Path, batch: int) -> None:
    place = ["--cluster", "local-cpu-2", "--global-batch", str(batch)]
    assert str(batch) in refuse("search", "model.py", *place, cwd=plan.parent)


def test_a_time_limit_that_is_no_number(plan: Path) -> None:
    assert "nan" in refuse("search", "model.py", *SEARCH, "--time-limit", "nan", cwd=plan.parent)


@pytest.mark.parametrize("words", [["--micro-batch", "0"], ["--budget", "-1"], ["--budget", "nan"]])
def test_a_measurement_of_nothing(plan: Path, words: list[str]) -> None:
    done = autopar("profile", "model.py", *words, cwd=plan.parent)
    assert done.returncode == 2
    assert words[0] in done.stderr
    assert "Traceback" not in done.stderr
