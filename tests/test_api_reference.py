"""The API reference builds, without a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_api_reference_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("pdoc", reason="pdoc is not installed")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, str(ROOT / "docs/api.py"), str(tmp_path)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "step_time_s" in (tmp_path / "autopar/cost/estimate.html").read_text()
    assert "global_batch" in (tmp_path / "autopar.html").read_text()
