"""Finds the layers of a model that are alike, so that a few of them are exported and the rest copied.

A model's lists of modules are searched for runs of members ``first .. first + count - 1`` that repeat with a period
(1, or more where kinds of layer alternate). Alike means: the recordings of two members agree call by call in
operator, settings, layouts, and in what is read, which is either the same tensor, or one of the same place relative to
the member; and their parameters agree in shape, dtype, gradient and tying. The model without the members in the middle
of each run is recorded as well, and must be the recording of the whole model without their calls.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from autopar.model.recording import Recording

LONGEST_PERIOD = 12
FEWEST_COPIES = 2  # of a period; fewer are not worth a second recording


@dataclass(frozen=True)
class Repeat:
    """Members of one list that are left out of the export.

    Attributes:
        path: of the list of modules.
        template: first member of the period that stands for those left out; the next period is like it as well.
        period: members.
        copies: periods left out, those right behind the template.
    """

    path: str
    template: int
    period: int
    copies: int

    @property
    def cut(self) -> int:
        """The first member left out."""
        return self.template + self.period

    @property
    def gone(self) -> int:
        """How many members are left out."""
        return self.period * self.copies


def find_repeats(module: nn.Module, inputs: dict[str, torch.Tensor], whole: Recording) -> list[Repeat]:
    """Runs of alike members of the module's lists, proven on recordings; empty where there are none.

    Args:
        module: on the meta device.
        inputs: keyword arguments, on the meta device.
        whole: the recording of the module on these inputs.
    """
    facts = _Facts(module)
    repeats: list[Repeat] = []
    for path, members in _lists(module):
        starts = _starts(whole, path, len(members))
        if starts is not None:
            repeats.extend(_runs(facts, whole, path, starts))
    if repeats:
        with shortened(module, repeats):
            short = Recording.of(module, inputs, lambda name: longer_name(name, repeats))
        if not _is_without(short, whole, repeats):
            return []
    return repeats


@contextmanager
def shortened(module: nn.Module, repeats: list[Repeat]) -> Iterator[None]:
    """While it holds, the module lacks the members that are left out."""
    held = {r.path: (_list_at(module, r.path), list(_list_at(module, r.path))) for r in repeats}
    try:
        for path, (listed, members) in held.items():
            out = {m for r in repeats if r.path == path for m in range(r.cut, r.cut + r.gone)}
            _refill(listed, [member for i, member in enumerate(members) if i not in out])
        yield
    finally:
        for listed, members in held.values():
            _refill(listed, members)


def longer_name(name: str, repeats: list[Repeat]) -> str:
    """The name in the whole model of a parameter, buffer or module of the shorter one."""
    for path in {r.path for r in repeats}:
        found = _member(name, path)
        if found is not None:
            number, rest = found
            for repeat in sorted((r for r in repeats if r.path == path), key=lambda r: r.cut):
                number += repeat.gone if number >= repeat.cut else 0
            return f"{path}.{number}{rest}"
    return name


def moved_name(name: str, path: str, by: int) -> str:
    """The name of a member's parameter or module in the member ``by`` places on; other names as they are."""
    found = _member(name, path)
    return name if found is None else f"{path}.{found[0] + by}{found[1]}"


def member_of(name: str, path: str) -> int | None:
    """Which member of a list a name belongs to."""
    found = _member(name, path)
    return None if found is None else found[0]


def _member(name: str, path: str) -> tuple[int, str] | None:
    match = re.match(r"\.(\d+)(?=\.|$)", name[len(path) :]) if name.startswith(path) else None
    return None if match is None else (int(match[1]), name[len(path) + match.end() :])


def _lists(module: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    """The lists of modules that are in no other list's member, with enough members to copy some."""
    found: list[tuple[str, list[nn.Module]]] = []
    for path, child in module.named_modules():
        listed = isinstance(child, nn.ModuleList) or type(child) is nn.Sequential
        if listed and not any(member_of(path, outer) is not None for outer, _ in found):
            members = list(child.children())
            if len(members) == len(child) and len(members) >= FEWEST_COPIES + 4:
                found.append((path, members))
    return found


def _starts(whole: Recording, path: str, count: int) -> list[int] | None:
    """Where the calls of each member begin; None unless the members run once each, in order."""
    first: list[list[int]] = [[] for _ in range(count)]
    for name, positions in whole.entered.items():
        number = member_of(name, path)
        if number is not None and number < count:
            first[number].extend(positions)
    if not all(first):
        return None
    starts, ends = [min(p) for p in first], [max(p) for p in first]
    in_order = all(end <= start and begin < start for begin, end, start in zip(starts, ends, starts[1:], strict=False))
    return starts if in_order else None


def _runs(facts: _Facts, whole: Recording, path: str, starts: list[int]) -> list[Repeat]:
    """Greedily, the runs of alike members of one list; the last member's calls have no known end and stay."""
    known = len(starts) - 1
    found: list[Repeat] = []
    begin = 0
    while begin < known:
        best = (0, 1)
        for period in range(1, LONGEST_PERIOD + 1):
            length = _alike(whole, facts, path, starts, begin, period)
            if length >= (FEWEST_COPIES + 2) * period and length > best[0]:
                best = (length, period)
            if begin + length == known:
                break
        length, period = best
        copies = length // period - 2
        if copies >= FEWEST_COPIES:
            found.append(Repeat(path, begin, period, copies))
            begin += length
        else:
            begin += 1
    return found


def _alike(whole: Recording, facts: _Facts, path: str, starts: list[int], begin: int, period: int) -> int:
    """How many members from ``begin`` on repeat with a period; 0 where not even two periods do."""
    rule: list[list[bool]] = []
    number = begin + period
    while number < len(starts) - 1:
        compared = _compare(whole, path, starts, number, period)
        if compared is None or not facts.alike(path, number, period):
            break
        if number >= begin + 2 * period and compared != rule[(number - begin) % period]:
            break
        rule.append(compared)
        number += 1
    return number - begin if number >= begin + 2 * period else 0


def _compare(whole: Recording, path: str, starts: list[int], number: int, period: int) -> list[bool] | None:
    """Per tensor read, whether it moves with the member; None where two members a period apart are not alike."""
    earlier = whole.calls[starts[number - period] : starts[number - period + 1]]
    later = whole.calls[starts[number] : starts[number + 1]]
    if len(earlier) != len(later):
        return None
    distance = starts[number] - starts[number - period]
    moves: list[bool] = []
    for one, other in zip(earlier, later, strict=True):
        if one.text != other.text:
            return None
        for leaf, its in zip(one.leaves, other.leaves, strict=True):
            if its not in (leaf, moved_name(leaf, path, period)):
                return None
            moves.append(its != leaf)
        for before, after in zip(one.made, other.made, strict=True):
            if after - before not in (0, distance):
                return None
            moves.append(after != before)
    return moves


class _Facts:
    """Shapes, dtypes, gradients and tying of a module's parameters and buffers."""

    def __init__(self, module: nn.Module) -> None:
        self._names: dict[int, list[str]] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        for parameters in (module.named_parameters, module.named_buffers):
            for name, tensor in parameters(remove_duplicate=False):
                self._names.setdefault(id(tensor), []).append(name)
                self._tensors[name] = tensor
        self._members: dict[str, dict[int, list[str]]] = {}

    def alike(self, path: str, number: int, period: int) -> bool:
        """Whether a member has the same tensors as the one a period before; those tied to others are not."""
        earlier, later = self._of(path, number - period), self._of(path, number)
        if [moved_name(n, path, period) for n in earlier] != later:
            return False
        return all(self._fact(a, path) == self._fact(b, path) for a, b in zip(earlier, later, strict=True))

    def _of(self, path: str, number: int) -> list[str]:
        if path not in self._members:
            grouped = self._members[path] = {}
            for name in self._tensors:
                member = member_of(name, path)
                if member is not None:
                    grouped.setdefault(member, []).append(name)
        return self._members[path].get(number, [])

    def _fact(self, name: str, path: str) -> tuple[object, ...]:
        tensor = self._tensors[name]
        names = self._names[id(tensor)]
        shared = tuple(names) if len(names) > 1 else ()
        return (type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, shared)


def _is_without(short: Recording, whole: Recording, repeats: list[Repeat]) -> bool:
    """Whether a recording is that of the whole model without the calls of the members left out.

    What is read from before a gap is the same tensor, but in the period behind the gap it may also be the tensor as far
    back as in the whole model.
    """
    gaps: list[tuple[int, int, int]] = []  # first call left out, how many, calls of the period behind
    for repeat in repeats:
        after = repeat.cut + repeat.gone
        begin, end, behind = (_start(whole, repeat.path, m) for m in (repeat.cut, after, after + repeat.period))
        gaps.append((begin, end - begin, behind - end))
    gaps.sort()
    cuts, lost = [], 0
    for begin, count, _ in gaps:
        cuts.append(begin - lost)
        lost += count
    if len(short.calls) != len(whole.calls) - lost:
        return False

    def position(at: int) -> int:
        return at + sum(count for cut, (_, count, _) in zip(cuts, gaps, strict=True) if at >= cut)

    for at, call in enumerate(short.calls):
        there = whole.calls[position(at)]
        if call.text != there.text or call.leaves != there.leaves:
            return False
        gap = bisect_right(cuts, at) - 1
        near = gap >= 0 and at < cuts[gap] + gaps[gap][2]
        for made, in_whole in zip(call.made, there.made, strict=True):
            moved = near and made < cuts[gap] and in_whole == position(made) + gaps[gap][1]
            if in_whole != position(made) and not moved:
                return False
    return True


def _start(whole: Recording, path: str, number: int) -> int:
    """Where the calls of one member begin."""
    return min(at[0] for name, at in whole.entered.items() if member_of(name, path) == number)


def _list_at(module: nn.Module, path: str) -> nn.ModuleList | nn.Sequential:
    listed = module.get_submodule(path)
    assert isinstance(listed, nn.ModuleList | nn.Sequential)
    return listed


def _refill(listed: nn.ModuleList | nn.Sequential, members: list[nn.Module]) -> None:
    del listed[:]
    listed.extend(members)
