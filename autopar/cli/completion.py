"""What the shell offers after a tab; quick, so nothing here may import torch."""

from __future__ import annotations

from collections.abc import Callable


def clusters(incomplete: str) -> list[str]:
    """Known clusters."""
    from autopar.hardware.locations import available

    return [name for name in available("clusters") if name.startswith(incomplete)]


def templates(incomplete: str) -> list[str]:
    """Models of the zoo."""
    from autopar.zoo import templates as known

    return [name for name in known() if name.startswith(incomplete)]


def words(*choices: str) -> Callable[[str], list[str]]:
    """One of a few words."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in choices if word.startswith(incomplete)]

    return complete
