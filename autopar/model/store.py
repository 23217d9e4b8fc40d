"""Captured graphs on disk, so that a model is traced once.

A graph is kept under the hash of everything that it follows from: the recording of a forward pass on meta tensors
(:mod:`autopar.model.recording`: every operator call with its settings, layouts and constants, and the modules that made
them), the names, layouts and tying of parameters and buffers, the files of the model and of its modules' classes, and
the versions of Python, torch and autopar. What else the model's code reads to arrive there (data files, environment)
needs no watching, since a change that matters changes the recording. The source lines that the graph names hold for the
files as they were: it keeps their hashes too.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import sys
import time
from functools import cache
from pathlib import Path

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.files import replacing
from autopar.model.graph import OpGraph
from autopar.model.packing import pack, unpack
from autopar.model.recording import Recording

VARIABLE = "AUTOPAR_CACHE"
KEPT_DAYS = 30  # unused


def folder() -> Path | None:
    """Where graphs are kept: ``$AUTOPAR_CACHE``, else ``autopar`` in the user's cache folder; None where it is ""."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named else None
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "autopar"


def key_of(
    source: str, module: nn.Module, recording: Recording, batch_size: int, device: str, precision: str
) -> str | None:
    """The name that a capture is kept under; None where the recording read a constant of unknown value."""
    if not recording.known:
        return None
    digest = hashlib.sha256()

    def add(*facts: object) -> None:
        digest.update(repr(facts).encode())

    add(platform.python_version(), torch.__version__, _own_version(), batch_size, device, precision)
    classes = {type(child).__module__ for child in module.modules()}
    files = {file for name in classes if (file := getattr(sys.modules.get(name), "__file__", None))}
    for file in sorted({source, *files}):
        add(file, _hash(file))
    for call in recording.calls:
        add(call.text, call.made, call.leaves)
    add(sorted(recording.entered.items()))
    first: dict[int, str] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            shared = first.setdefault(id(tensor), name)
            add(name, shared, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)
    return digest.hexdigest()


def load(key: str) -> OpGraph | None:
    """The graph kept under a key, while the files that it names are as they were; a damaged one is none."""
    path = _path(key)
    if path is None or not path.is_file():
        return None
    try:
        sources, packed = pickle.loads(path.read_bytes())
        if any(_hash(file) != known for file, known in sources.items()):
            return None
        graph = unpack(packed)
        os.utime(path)
    except Exception:  # whatever a damaged pickle raises
        return None
    return graph


def keep(key: str, graph: OpGraph) -> None:
    """Keeps a graph, and deletes those that were not read for a month; where nothing can be written, does nothing."""
    path = _path(key)
    if path is None:
        return
    files = {node.source.rpartition(":")[0] for node in graph.nodes.values() if node.source}
    try:
        content = pickle.dumps(({file: _hash(file) for file in files}, pack(graph)))
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replacing(path, AutoparError) as aside:
            aside.write_bytes(content)
        for old in path.parent.glob("*.graph"):
            if old.stat().st_mtime < time.time() - KEPT_DAYS * 86400:
                old.unlink(missing_ok=True)
    except (AutoparError, OSError, ValueError, TypeError, pickle.PicklingError):
        return


def _path(key: str) -> Path | None:
    where = folder()
    return None if where is None else where / "graphs" / f"{key}.graph"


@cache
def _own_version() -> str:
    """Hash of the code that makes graphs."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _hash(file: str) -> str | None:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None
