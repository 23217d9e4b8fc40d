"""Kinds of link (NVLink generations, PCIe, InfiniBand, ...): calibrated once, named by clusters."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

from autopar.errors import ProfileError
from autopar.hardware.locations import profile_roots

FILE = "links.toml"


def link_types(beside: Path | None = None) -> dict[str, dict[str, Any]]:
    """Fields of every kind of link by name, from ``links.toml`` in the profile folders; the most specific one wins.

    Raises:
        ProfileError: a file is not TOML.
    """
    types: dict[str, dict[str, Any]] = {}
    folders = [*reversed(profile_roots()), *([beside] if beside else [])]
    for folder in folders:
        path = folder / FILE
        if path.is_file():
            types.update(_read(path, path.stat().st_mtime_ns))
    return types


@lru_cache(maxsize=16)
def _read(path: Path, _changed: int) -> dict[str, dict[str, Any]]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ProfileError(f"link file {str(path)!r} cannot be read as TOML: {error}") from None


def completed(link: dict[str, Any], beside: Path | None = None) -> dict[str, Any]:
    """A [[link]] table with the fields of its ``type`` filled in where it does not set them itself.

    Raises:
        ProfileError: the type is unknown; those that exist are listed.
    """
    if "type" not in link:
        return link
    types = link_types(beside)
    name = link["type"]
    if name not in types:
        raise ProfileError(f"link type {name!r} is unknown", f"Known: {', '.join(sorted(types)) or 'none'}")
    return {**types[name], **{key: value for key, value in link.items() if key != "type"}}
