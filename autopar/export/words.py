"""Flags of a command line or a shell script, by name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from autopar.errors import InputError

Words = Mapping[str, tuple[str, ...]]


def text_of(given: str, trainer: str) -> str:
    """What ``--from TRAINER`` was given: flags as they are, or the text of a file.

    Raises:
        InputError: the file cannot be read.
    """
    if given.lstrip().startswith("--"):
        return given
    try:
        return Path(given).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(
            f"--from {trainer}: {given!r} cannot be read: {why}", "Give a file, or the flags in one pair of quotes"
        ) from None


def flags_in(text: str) -> Words:
    """``--name value``, ``--name=value`` and ``--name`` by ``name`` with underscores; what comes last counts.

    Raises:
        InputError: a quote is left open.
    """
    found: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in _words(text):
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = (value,) if equals else ()
        elif name:
            found[name] = (*found[name], word)
    return found


def _words(text: str) -> list[str]:
    try:
        lexer = shlex.shlex(re.sub(r"\\\n", " ", text), posix=True)
        lexer.whitespace_split = True
        return [word for word in lexer if word not in ("(", ")")]
    except ValueError as error:
        raise InputError(f"the flags cannot be read: {error}", "Close every quote") from None


def whole(words: Words, name: str, default: int) -> int:
    """A whole number.

    Raises:
        InputError: it is something else; names the flag and the value.
    """
    if name not in words:
        return default
    given = words[name][0] if words[name] else ""
    try:
        return int(given)
    except ValueError:
        raise InputError(f"--{name} {given!r} is no whole number", "Write it as a number, not as a variable") from None


def text(words: Words, name: str, default: str) -> str:
    """The first value of a flag."""
    values = words.get(name, ())
    return values[0] if values else default


def present(words: Words, name: str) -> bool:
    """Whether a switch is on."""
    return name in words and text(words, name, "true").lower() not in ("false", "0")
