"""Style: colours that colour-blind readers tell apart (Okabe and Ito 2008), one per component, and figure sizes."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autopar.errors import InputError
from autopar.files import check_ending, replacing

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, GREY = "#56B4E9", "#CC79A7", "#F0E442", "#BBBBBB"

TIME = {
    "compute": BLUE,
    "tp": ORANGE,
    "dp": GREEN,
    "cp": SKY,
    "ep": YELLOW,
    "pp": PURPLE,
    "bubble": GREY,
    "optimizer": VERMILION,
}
MEMORY = {
    "parameters": BLUE,
    "gradients": SKY,
    "optimizer": GREEN,
    "activations": ORANGE,
    "workspace": YELLOW,
    "unsharded": PURPLE,
    "buffers": VERMILION,
    "context": GREY,
    "allocator": "#777777",
}
ACTIONS = {"F": BLUE, "B": ORANGE, "I": ORANGE, "W": GREEN}
AXES = {"pp": PURPLE, "dp_replicate": GREEN, "dp_shard": SKY, "cp": YELLOW, "tp": ORANGE, "ep": VERMILION}
FORMATS = ("png", "svg")


def figure(width: float = 8.0, height: float = 4.0) -> tuple[Figure, Axes]:
    """An empty figure of notebook size, in inches, that pyplot does not know of; and its axes."""
    made = Figure(figsize=(width, height), layout="constrained")
    axes = made.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return made, axes


def legend_below(axes: Axes) -> None:
    """A legend under the axes, each label once."""
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    drawn = axes.get_figure()
    if once and isinstance(drawn, Figure):
        columns = max(2, int(drawn.get_figwidth() / 2.3))
        drawn.legend(
            list(once.values()), list(once), loc="outside lower center", ncols=columns, frameon=False, fontsize="small"
        )


def beside(axes: Axes, text: str, x: float, y: float, above: bool = False) -> None:
    """A small label to the right of a point, below or above it, that lines do not run through."""
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5}
    shift = (5, 5) if above else (5, -10)
    axes.annotate(text, (x, y), xytext=shift, textcoords="offset points", fontsize=7, bbox=box, zorder=5)


def thousands(value: float, _: object = None) -> str:
    """A tick's number with its thousands apart."""
    return f"{value:,.0f}"


def seconds_unit(longest_s: float) -> tuple[float, str]:
    """Units in one second, and their name, such that the longest time reads as 1 to 1000."""
    for per_second, name in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if longest_s * per_second >= 1:
            return per_second, name
    return 1e9, "ns"


def check_format(path: Path) -> None:
    """Before the work rather than after it.

    Raises:
        InputError: the file's ending is neither png nor svg, or its folder does not exist.
    """
    check_ending(path, *(f".{name}" for name in FORMATS))


def save(drawn: Figure, path: Path) -> None:
    """Writes a PNG or SVG under a temporary name and renames it.

    Raises:
        InputError: the ending is another, or the folder cannot be written.
    """
    check_format(path)
    kind = path.suffix.lstrip(".").lower()
    with replacing(path, InputError) as aside:
        drawn.savefig(aside, format=kind, dpi=150)
