"""Where device, cluster and profile files are looked for.

In this order: the path as the user gave it; ``./profiles`` of the working directory; the ``profiles`` folder of the
source tree that this package was installed from in editable mode; ``share/autopar/profiles`` of the Python
environment, where an installed wheel puts the same files.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from autopar.errors import ProfileError

SUFFIXES = {"devices": ".json", "clusters": ".toml", "measured": ".json"}


def profile_roots() -> list[Path]:
    """The ``profiles`` folders that exist, most specific first."""
    candidates = [
        Path.cwd() / "profiles",
        Path(__file__).resolve().parents[2] / "profiles",
        Path(sysconfig.get_path("data")) / "share" / "autopar" / "profiles",
    ]
    roots: list[Path] = []
    for candidate in candidates:
        if candidate.is_dir() and candidate.resolve() not in [r.resolve() for r in roots]:
            roots.append(candidate)
    return roots


def available(kind: str) -> dict[str, Path]:
    """Name to file of every ``devices``, ``clusters`` or ``measured`` file found; the most specific root wins."""
    found: dict[str, Path] = {}
    for root in profile_roots():
        for path in sorted((root / kind).glob("*" + SUFFIXES[kind])):
            found.setdefault(path.stem, path)
    return found


def find(kind: str, name_or_path: str, beside: Path | None = None) -> Path:
    """The file behind a name (``a100-sxm-80gb``) or a path.

    Args:
        kind: ``devices``, ``clusters`` or ``measured``.
        name_or_path: a name from :func:`available`, or a path.
        beside: a folder that relative paths are also looked for in (that of the file which names this one).

    Raises:
        ProfileError: there is no such file; what exists is listed.
    """
    given = Path(name_or_path).expanduser()
    for path in (given, beside / given if beside else given):
        if path.is_file():
            return path
    looks_like_path = given.suffix == SUFFIXES[kind] or len(given.parts) > 1
    known = available(kind)
    if not looks_like_path and name_or_path in known:
        return known[name_or_path]
    if looks_like_path and given.stem in known and given.parent.name == kind:
        return known[given.stem]  # ``profiles/clusters/x.toml`` named from outside the source tree
    noun = {"devices": "device", "clusters": "cluster", "measured": "measured profile"}[kind]
    listed = ", ".join(known) or "none"
    what = f"{noun} file {name_or_path!r} does not exist" if looks_like_path else f"{noun} {name_or_path!r} is unknown"
    raise ProfileError(what, f"Known: {listed}. Or give the path of a {SUFFIXES[kind]} file")


def data_file(relative: str) -> Path:
    """A data file of the profiles folder, such as ``measured/training_runs.csv``; the most specific root wins.

    Raises:
        ProfileError: no root has it.
    """
    for root in profile_roots():
        if (root / relative).is_file():
            return root / relative
    raise ProfileError(f"profiles/{relative} is not found", "Run from the source tree, or install autopar again")
