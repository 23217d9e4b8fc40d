"""Profiles measured by real processes: written, read back, taken up again, recognised as foreign."""

import json
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from autopar.cost.communication import CommunicationModel
from autopar.errors import ProfileError, RunError
from autopar.hardware import Cluster, Profile, group_of
from autopar.model.capture import capture
from autopar.model.graph import OpGraph
from autopar.model.spec import load
from autopar.plan import Mesh
from autopar.profiler import fingerprint, profile_collectives, profile_model, usable
from autopar.profiler.collectives import KINDS
from autopar.profiler.tasks import tasks_of
from autopar.profiler.workers import Order, run_workers

MODEL = "autopar/zoo/mlp.py"


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return Cluster.load("local-cpu-2")


@pytest.fixture(scope="module")
def graphs() -> list[OpGraph]:
    return [capture(load(MODEL), 4)]


@pytest.fixture(scope="module")
def measured(cluster: Cluster, graphs: list[OpGraph], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profiles") / "mine.json"
    heard: list[tuple[int, int, str]] = []
    profile_model(graphs, cluster, path=path, budget_s=15, model=MODEL, progress=lambda *event: heard.append(event))
    assert heard[-1][0] <= heard[-1][1]
    return path


def test_everything_is_measured(measured: Path, cluster: Cluster, graphs: list[OpGraph]) -> None:
    profile = Profile.load(measured)
    assert {(c.kind, c.size) for c in profile.collectives} == {(kind, 2) for kind in KINDS}
    assert all(c.seconds > 0 for c in profile.collectives)
    wanted = {task.signature for task in tasks_of(graphs, [2], cluster.device)}
    assert {(o.op, o.inputs, o.outputs) for o in profile.operators.entries} == wanted
    assert profile.memory.context_bytes is not None
    assert profile.memory.context_bytes > 50 * 2**20  # torch alone
    overheads = profile.overheads
    assert overheads.optimizer_s_per_byte is not None
    assert overheads.communication_slowdown is not None
    assert overheads.communication_slowdown >= 1
    graph = profile.graphs[0]
    assert graph.micro_batch == 4
    assert graph.operators_forward_s > 0
    assert graph.operators_backward_s > 0


def test_written_profile_reads_back_equal(measured: Path, tmp_path: Path) -> None:
    profile = Profile.load(measured)
    profile.save(tmp_path / "copy.json")
    assert Profile.load(tmp_path / "copy.json") == profile


def test_cluster_with_profile_uses_it(measured: Path, cluster: Cluster) -> None:
    profile = Profile.load(measured)
    with_it = cluster.with_profile(measured)
    assert with_it.device.measured == profile.operators
    group = group_of(with_it, Mesh(tp=2), "tp")
    entry = next(c for c in profile.collectives if c.kind == "all_gather" and c.nbytes == 2**20)
    assert CommunicationModel(with_it).collective_time("all_gather", 2**20, group) == pytest.approx(entry.seconds)


def test_second_run_measures_nothing_again(measured: Path, cluster: Cluster, graphs: list[OpGraph]) -> None:
    before = Profile.load(measured)
    heard: list[object] = []
    again = profile_model(graphs, cluster, path=measured, budget_s=15, model=MODEL, progress=lambda *e: heard.append(e))
    assert heard == []
    assert again.operators == before.operators
    assert again.collectives == before.collectives


def test_interrupted_run_is_taken_up_again(
    measured: Path, cluster: Cluster, graphs: list[OpGraph], tmp_path: Path
) -> None:
    whole = Profile.load(measured)
    half = whole.operators.entries[::2]
    path = tmp_path / "half.json"
    replace(whole, operators=type(whole.operators)(half)).save(path)
    heard: list[tuple[int, int, str]] = []
    result = profile_model(graphs, cluster, path=path, budget_s=15, progress=lambda *event: heard.append(event))
    assert set(half) <= set(result.operators.entries)
    assert len(result.operators.entries) == len(whole.operators.entries)
    assert heard[0][1] == len(whole.operators.entries) - len(half)


def test_foreign_profile_is_recognised(measured: Path, cluster: Cluster, tmp_path: Path) -> None:
    profile, why = usable(measured, cluster)
    assert profile is not None
    assert why == ""
    assert usable(tmp_path / "none.json", cluster) == (None, "there is none yet")
    strange = replace(Profile.load(measured), fingerprint=replace(fingerprint(cluster), torch="1.0", cores=999))
    strange.save(tmp_path / "strange.json")
    profile, why = usable(tmp_path / "strange.json", cluster)
    assert profile is None
    assert "torch '1.0'" in why
    assert "cores 999" in why
    replace(Profile.load(measured), date="2020-02-29").save(tmp_path / "old.json")
    profile, why = usable(tmp_path / "old.json", cluster)
    assert profile is None
    assert why.endswith("days ago, on 2020-02-29")
    profile, why = usable(measured, Cluster.load("local-cpu-4"))
    assert profile is None
    assert "processes 2 (here 4)" in why
    with pytest.raises(ProfileError, match="cannot serve the device 'a100-sxm-80gb'"):
        Cluster.load("dgx-a100-8").with_profile(measured)


def test_wrong_fields_are_named(measured: Path, tmp_path: Path) -> None:
    data = json.loads(measured.read_text())
    path = tmp_path / "bad.json"
    for change, message in (
        ({"schema_version": 9}, "schema_version 9"),
        ({"operator": []}, "unknown field 'operator'"),
        ({"collectives": [{"kind": "all_reduce", "size": 0, "scope": "node", "nbytes": 1, "seconds": 1}]}, "size"),
        ({"fingerprint": {}}, "fingerprint.processor"),
        ({"date": "yesterday"}, "date"),
    ):
        path.write_text(json.dumps({**data, **change}))
        with pytest.raises(ProfileError, match=message):
            Profile.load(path)
    path.write_text("nothing")
    with pytest.raises(ProfileError, match="cannot be read as JSON"):
        Profile.load(path)
    with pytest.raises(ProfileError, match="does not exist"):
        Profile.load(tmp_path / "none.json")


def test_missing_devices_are_said() -> None:
    with pytest.raises(ProfileError, match=r"needs 8 cuda devices on this machine, \d+ found"):
        profile_collectives(Cluster.load("dgx-a100-8"))


def workers() -> list[psutil.Process]:
    """Measuring processes that this one has started and that still run."""
    return [p for p in psutil.Process().children() if "autopar.profiler.worker" in p.cmdline()]


def test_failing_process_is_reported_and_none_is_left(tmp_path: Path) -> None:
    order = Order(2, "cpu", 1, "node", False, True, (), 5.0, model=str(tmp_path / "none.py"))
    with pytest.raises(RunError, match=r"measuring process [01] failed.*none.py"):
        run_workers(order, lambda kind, result: None)
    assert workers() == []


def test_killed_process_is_reported(cluster: Cluster, graphs: list[OpGraph]) -> None:
    def kill_one(kind: str, result: object) -> None:
        for child in workers()[:1]:
            child.kill()

    tasks = tuple(tasks_of(graphs, [2], cluster.device))
    with pytest.raises(RunError, match=r"measuring process \d (ended with exit code -9|failed)"):
        run_workers(Order(2, "cpu", 1, "node", True, False, tasks, 20.0), kill_one)
    assert workers() == []


def test_time_box_leaves_the_rest_to_interpolation(cluster: Cluster, graphs: list[OpGraph]) -> None:
    tasks = tuple(tasks_of(graphs, [2], cluster.device))
    heard: list[tuple[str, object]] = []
    order = Order(2, "cpu", 1, "node", False, False, tasks, 1e-9)
    run_workers(order, lambda kind, result: heard.append((kind, result)))
    assert heard == [("unmeasured", len(tasks))]
