"""``autopar devices`` and ``autopar clusters``: everything known is listed, a user's own file included."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from autopar.cli.clusters import clusters
from autopar.cli.devices import devices
from autopar.errors import ProfileError
from autopar.hardware.locations import available, data_file

app = typer.Typer()
app.command()(devices)
app.command()(clusters)


def listed(command: str) -> list[dict[str, object]]:
    result = CliRunner().invoke(app, [command, "--json"])
    assert result.exit_code == 0, result.output
    rows: list[dict[str, object]] = json.loads(result.stdout)[command]
    return rows


@pytest.mark.parametrize("command", ["devices", "clusters"])
def test_json_lists_everything(command: str) -> None:
    assert {row["name"] for row in listed(command)} == set(available(command))
    text = CliRunner().invoke(app, [command])
    assert text.exit_code == 0
    assert all(name in text.stdout for name in available(command))


def test_own_device_in_the_working_directory_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = json.loads(available("devices")["l40s"].read_text())
    folder = tmp_path / "profiles" / "devices"
    folder.mkdir(parents=True)
    (folder / "own.json").write_text(json.dumps({**data, "name": "own"}))
    (folder / "l40s.json").write_text(json.dumps({**data, "memory_gib": 1.5}))
    monkeypatch.chdir(tmp_path)
    rows = {row["name"]: row for row in listed("devices")}
    assert "own" in rows
    assert rows["l40s"]["memory_gib"] == 1.5
    assert "a100-sxm-80gb" in rows


def test_data_files_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert data_file("measured/training_runs.csv").read_text().startswith("id,source")
    with pytest.raises(ProfileError, match=r"profiles/measured/none\.csv is not found"):
        data_file("measured/none.csv")
