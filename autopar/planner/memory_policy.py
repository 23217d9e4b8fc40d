"""Stages under a memory limit: the fastest mix of layouts and recomputation that fits, by dynamic programming.

Along the blocks of a stage, partial choices are kept as long as no other one is at least as fast and as small in every
kind of memory (labels of a resource-constrained shortest path; Irnich and Desaulniers 2005). Across stages, pairs of
total and slowest time are kept likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from autopar.model.graph import Block
from autopar.planner.chain_tables import State
from autopar.planner.options import Option

MOST_LABELS = 160  # per boundary placement; beyond, labels are thinned to those that trade time for total memory


@dataclass(frozen=True)
class Label:
    """The choices for the first blocks of a stage, as a list linked backwards.

    Attributes:
        held_bytes: fixed, and activations times the micro-batches in flight.
    """

    seconds: float
    held_bytes: float
    workspace_bytes: float
    again_bytes: float
    option: Option | None = None
    before: Label | None = None

    @property
    def total_bytes(self) -> float:
        return self.held_bytes + self.workspace_bytes + self.again_bytes

    def options(self) -> tuple[Option, ...]:
        """In the order of the blocks."""
        found: list[Option] = []
        label: Label | None = self
        while label is not None and label.option is not None:
            found.append(label.option)
            label = label.before
        return tuple(reversed(found))


OptionsOf = Callable[[int, State], Sequence[Option]]  # (block index, placements of the outputs before) -> options


def stage_labels(
    blocks: Sequence[Block], first: int, last: int, entering: State, options: OptionsOf, in_flight: int, limit: float
) -> dict[State, list[Label]]:
    """Labels of blocks first..last-1 by the placements they end with, fastest first.

    Args:
        blocks: the chain.
        entering: placements of the outputs of the block before.
        options: what each block may do.
        in_flight: micro-batches held at once.
        limit: bytes; labels that hold more are dropped.
    """
    labels: dict[tuple[State, tuple[bool, ...]], list[Label]] = {(entering, ()): [Label(0.0, 0.0, 0.0, 0.0)]}
    for index in range(first, last):
        made = blocks[index - 1].outputs if index > first else ()
        step: dict[tuple[State, tuple[bool, ...]], list[Label]] = {}
        for (state, saved), known in labels.items():
            counted = {name for name, is_saved in zip(made, saved, strict=True) if is_saved} if saved else set()
            for option in options(index, state):
                inputs = zip(blocks[index].inputs, option.kept_inputs, strict=True)
                kept = option.kept_bytes + sum(n for name, n in inputs if name not in counted)
                grown = option.fixed_bytes + in_flight * kept
                target = step.setdefault((option.after, option.kept_outputs), [])
                target.extend(_extend(known, option, grown, limit))
        labels = {key: _undominated(found) for key, found in step.items() if found}
    result: dict[State, list[Label]] = {}
    for (state, _), found in labels.items():
        result.setdefault(state, []).extend(found)
    return {state: sorted(found, key=attrgetter("seconds", "total_bytes")) for state, found in result.items()}


def _extend(labels: Sequence[Label], option: Option, grown: float, limit: float) -> Iterator[Label]:
    for label in labels:
        held = label.held_bytes + grown
        if held <= limit:
            yield Label(
                label.seconds + option.seconds,
                held,
                max(label.workspace_bytes, option.workspace_bytes),
                max(label.again_bytes, option.again_bytes),
                option,
                label,
            )


def _undominated(labels: list[Label]) -> list[Label]:
    labels.sort(key=attrgetter("seconds", "total_bytes"))
    if len(labels) > MOST_LABELS:
        return _thin(labels)
    kept: list[Label] = []
    for label in labels:
        if not any(
            k.held_bytes <= label.held_bytes
            and k.workspace_bytes <= label.workspace_bytes
            and k.again_bytes <= label.again_bytes
            for k in kept
        ):
            kept.append(label)
    return kept


def _thin(labels: list[Label]) -> list[Label]:
    """Those that are smaller in all than every faster one; of too many, evenly chosen ones and both ends."""
    kept: list[Label] = []
    for label in labels:
        if not kept or label.total_bytes < kept[-1].total_bytes:
            kept.append(label)
    if len(kept) <= MOST_LABELS:
        return kept
    step = (len(kept) - 1) / (MOST_LABELS - 1)
    return [kept[round(i * step)] for i in range(MOST_LABELS)]


@dataclass(frozen=True)
class Line:
    """Stages so far: the time of one micro-batch through them, the slowest, and what every block does."""

    total_s: float
    slowest_s: float
    options: tuple[Option, ...]


def fastest_lines(
    blocks: Sequence[Block],
    cut: Sequence[int],
    options: OptionsOf,
    in_flight: Sequence[int],
    limit: float,
    fits: Callable[[int, int, int, Sequence[Option]], bool],
    send_s: Callable[[int, State], float],
    micro_batches: int,
) -> list[Line]:
    """The choices that fit, fastest first.

    Args:
        cut: first block of each stage.
        in_flight: per stage.
        limit: bytes of tensors that a stage may hold, never an underestimate.
        fits: (stage, first, last, options) -> whether the stage fits exactly.
        send_s: (block, placements of its outputs) -> seconds to send them on and their gradients back.
    """
    ends = (*cut[1:], len(blocks))
    lines: dict[State, list[Line]] = {(): [Line(0.0, 0.0, ())]}
    for stage, (first, last) in enumerate(zip(cut, ends, strict=True)):
        step: dict[State, list[Line]] = {}
        for state, known in lines.items():
            labels = stage_labels(blocks, first, last, state, options, in_flight[stage], limit)
            for after, found in labels.items():
                label = next((one for one in found if fits(stage, first, last, one.options())), None)
                if label is None:
                    continue
                send = send_s(last - 1, after) if last < len(blocks) else 0.0
                step.setdefault(after, []).extend(
                    Line(
                        line.total_s + label.seconds + send,
                        max(line.slowest_s, label.seconds),
                        line.options + label.options(),
                    )
                    for line in known
                )
        lines = {state: _undominated_lines(found) for state, found in step.items()}
    every = [line for found in lines.values() for line in found]
    return sorted(every, key=lambda line: line.total_s + (micro_batches - 1) * line.slowest_s)


def _undominated_lines(lines: list[Line]) -> list[Line]:
    kept: list[Line] = []
    for line in sorted(lines, key=attrgetter("total_s", "slowest_s")):
        if not kept or line.slowest_s < kept[-1].slowest_s:
            kept.append(line)
    return kept
