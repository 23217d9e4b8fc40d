"""Graphs captured by tests are kept in a folder of their own, which worker processes and pytest-xdist share."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

from autopar.model.store import VARIABLE

_made: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        _made.append(tempfile.mkdtemp(prefix="autopar-cache-"))
        os.environ[VARIABLE] = _made[0]


def pytest_unconfigure() -> None:
    for folder in _made:
        shutil.rmtree(folder, ignore_errors=True)
