"""What an export gives: one settings file, how to use it, and what it leaves out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exported:
    """A plan in the words of another trainer.

    Attributes:
        target: which trainer.
        text: the settings file.
        use: the command that uses it; ``FILE`` stands for the settings file.
        not_expressed: what of the plan the file does not say, one sentence each.
    """

    target: str
    text: str
    use: str
    not_expressed: tuple[str, ...]


@dataclass(frozen=True)
class Machines:
    """How the plan's devices lie in nodes; ``kind`` is that of the device, gpu or cpu."""

    nodes: int
    per_node: int
    kind: str = "gpu"


def comment(title: str, left_out: tuple[str, ...] | list[str], mark: str = "# ") -> str:
    """The head of a settings file: where it is from, and what it leaves out."""
    lines = [title, *(["Not expressed:"] if left_out else []), *(f"- {sentence}" for sentence in left_out)]
    return "".join(f"{mark}{line}\n" for line in lines)
