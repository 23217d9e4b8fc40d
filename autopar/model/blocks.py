"""Blocks: cuts the operator list into a chain at module boundaries and finds which blocks are alike.

The members of a list of modules (``layers.0``, ``layers.1``, ...) are the blocks; what lies before, between and after
them forms blocks of its own. Whether two blocks are of one kind is decided by structure: same operators, attributes,
shapes and wiring, position by position.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import fx

from autopar.model.graph import Block, OpNode

_MEMBER = re.compile(r"^((?:[A-Za-z_]\w*\.)*?)(\d+)(?:\.|$)")


def find_blocks(nodes: dict[str, OpNode], graph: fx.Graph, loss: str) -> tuple[Block, ...]:
    """The chain of blocks.

    Args:
        nodes: in topological order.
        graph: the fx graph with the same names.
        loss: the node that makes the loss; an output of the last block.
    """
    order = [n.name for n in nodes.values() if n.kind == "op"]
    runs = _runs(order, nodes)
    where = {name: i for i, (_, members) in enumerate(runs) for name in members}
    fx_nodes = {n.name: n for n in graph.nodes}
    free = _gradient_free(nodes, fx_nodes)
    blocks: list[Block] = []
    kinds: dict[str, str] = {}
    preludes = [_prelude(i, members, nodes, where, free) for i, (_, members) in enumerate(runs)]
    read_later = _read_later(runs, preludes, nodes, where, loss)
    for i, (name, members) in enumerate(runs):
        prelude = preludes[i]
        inside = set(members) | set(prelude)
        used = list(dict.fromkeys(p for m in (*prelude, *members) for p in nodes[m].inputs if p not in inside))
        parameters = tuple(p for p in used if nodes[p].kind in ("parameter", "buffer", "constant"))
        inputs = tuple(p for p in used if nodes[p].kind in ("op", "input"))
        outputs = tuple(m for m in members if m in read_later[i])
        key = _structure((*prelude, *members), inputs, parameters, outputs, nodes, fx_nodes)
        kind = kinds.setdefault(key, _kind_name(name, set(kinds.values())))
        blocks.append(
            Block(name, kind, tuple(members), _labels(name, members, nodes), inputs, outputs, parameters, prelude)
        )
    return tuple(blocks)


def _runs(order: list[str], nodes: dict[str, OpNode]) -> list[tuple[str, list[str]]]:
    """Consecutive operators of one member of a module list, or of none."""
    runs: list[tuple[str, list[str]]] = []
    for name in order:
        match = _MEMBER.match(nodes[name].module)
        path = f"{match[1]}{match[2]}" if match else ""
        if runs and runs[-1][0] == path:
            runs[-1][1].append(name)
        else:
            runs.append((path, [name]))
    runs = _merge_small(_with_tails(runs, nodes), nodes)
    names: set[str] = set()
    named: list[tuple[str, list[str]]] = []
    for i, (path, members) in enumerate(runs):
        base = path or ("embed" if i == 0 and len(runs) > 1 else "head" if i == len(runs) - 1 else "between")
        unique, count = base, 2
        while unique in names:
            unique, count = f"{base}_{count}", count + 1
        names.add(unique)
        named.append((unique, members))
    return named


def _with_tails(runs: list[tuple[str, list[str]]], nodes: dict[str, OpNode]) -> list[tuple[str, list[str]]]:
    """Gives the last member of a list the operators (a residual sum) that follow each of the others.

    Those of the others form runs of their own between two members; after the last member they begin a longer run.
    """
    lists = [path.rpartition(".")[0] if path else "" for path, _ in runs]
    usual: dict[str, list[str]] = {}
    for i in range(len(runs) - 2):
        if runs[i][0] and not runs[i + 1][0] and lists[i] == lists[i + 2]:
            usual.setdefault(lists[i], [nodes[m].op for m in runs[i + 1][1]])
    found: list[tuple[str, list[str]]] = []
    for i, (path, members) in enumerate(runs):
        tail = usual.get(lists[i - 1], []) if i and not path and found[-1][0] else []
        if tail and len(members) > len(tail) and [nodes[m].op for m in members[: len(tail)]] == tail:
            found[-1][1].extend(members[: len(tail)])
            members = members[len(tail) :]
        found.append((path, list(members)))
    return found


def _merge_small(runs: list[tuple[str, list[str]]], nodes: dict[str, OpNode]) -> list[tuple[str, list[str]]]:
    """Joins a run without parameters (an activation between two layers) to the one before it.

    Not the last one (the loss) to a member of a list, which would make it unlike the others.
    """
    merged: list[tuple[str, list[str]]] = []
    for i, (path, members) in enumerate(runs):
        heavy = any(nodes[p].kind == "parameter" for m in members for p in nodes[m].inputs)
        if i == len(runs) - 1 and i > 1 and not path and runs[i - 1][0]:
            merged.append((path, list(members)))
        elif merged and not heavy:
            merged[-1][1].extend(members)
        else:
            merged.append((path, list(members)))
    if len(merged) > 1 and not any(nodes[p].kind == "parameter" for m in merged[0][1] for p in nodes[m].inputs):
        path, members = merged.pop(0)
        merged[0] = (merged[0][0], members + merged[0][1])
    return merged


def _gradient_free(nodes: dict[str, OpNode], fx_nodes: dict[str, fx.Node]) -> set[str]:
    """Operators computed from batch inputs, buffers and constants alone, without a product or a random number."""
    free: set[str] = set()
    for node in nodes.values():
        cheap = node.kind == "op" and not node.requires_grad and node.forward_flops == 0
        cheap = cheap and torch.Tag.nondeterministic_seeded not in getattr(fx_nodes[node.name].target, "tags", ())
        if cheap and all(p in free or nodes[p].kind in ("input", "buffer", "constant") for p in node.inputs):
            free.add(node.name)
    return free


def _prelude(
    index: int, members: list[str], nodes: dict[str, OpNode], where: dict[str, int], free: set[str]
) -> tuple[str, ...]:
    """Gradient-free operators of earlier blocks that this block needs, with their ancestors."""
    needed: set[str] = set()
    stack = [p for m in members for p in nodes[m].inputs]
    while stack:
        name = stack.pop()
        if name in free and where[name] != index and name not in needed:
            needed.add(name)
            stack.extend(nodes[name].inputs)
    return tuple(name for name in nodes if name in needed)


def _read_later(
    runs: list[tuple[str, list[str]]],
    preludes: list[tuple[str, ...]],
    nodes: dict[str, OpNode],
    where: dict[str, int],
    loss: str,
) -> list[set[str]]:
    """Per run, its operators that later runs read (and do not recompute), and the loss."""
    read: list[set[str]] = [set() for _ in runs]
    for i, (_, members) in enumerate(runs):
        for member in members:
            for producer in nodes[member].inputs:
                home = where.get(producer)
                if home is not None and home != i and producer not in preludes[i]:
                    read[home].add(producer)
    read[where[loss]].add(loss)
    return read


def _labels(block: str, members: Iterable[str], nodes: dict[str, OpNode]) -> tuple[str, ...]:
    """Module path inside the block and operator, numbered where that repeats: ``attn.q.linear``."""
    seen: dict[str, int] = {}
    labels = []
    for name in members:
        module = nodes[name].module
        inside = module == block or module.startswith(block + ".")
        path = module.removeprefix(block).removeprefix(".") if inside or not _MEMBER.match(module) else ""
        parts = nodes[name].op.split(".")
        op = parts[1] if parts[0] == "aten" and len(parts) > 1 else parts[-1]
        base = f"{path}.{op}" if path else op
        seen[base] = seen.get(base, 0) + 1
        labels.append(base if seen[base] == 1 else f"{base}_{seen[base]}")
    return tuple(labels)


def _structure(
    members: tuple[str, ...],
    inputs: tuple[str, ...],
    parameters: tuple[str, ...],
    outputs: tuple[str, ...],
    nodes: dict[str, OpNode],
    fx_nodes: dict[str, fx.Node],
) -> str:
    """A text that is equal for blocks that are alike."""
    number = {name: f"i{i}" for i, name in enumerate(inputs)}
    number |= {name: f"p{i}" for i, name in enumerate(parameters)}
    lines = [f"{number[n]} {nodes[n].outputs} {nodes[n].requires_grad} {nodes[n].kind}" for n in (*inputs, *parameters)]
    for i, name in enumerate(members):
        number[name] = f"n{i}"
        call = fx_nodes[name]
        attributes = fx.map_arg((call.args, dict(call.kwargs)), lambda n: number[n.name])
        lines.append(f"{nodes[name].op} {attributes} {nodes[name].outputs} {nodes[name].requires_grad}")
    lines.append(" ".join(number[name] for name in outputs))
    return "\n".join(lines)


def _kind_name(name: str, taken: set[str]) -> str:
    """``blocks`` for ``blocks.3``; numbered where two kinds of block share a path."""
    base = re.sub(r"\.?\d+$", "", name) or "layer"
    kind, count = base, 2
    while kind in taken:
        kind, count = f"{base}_{count}", count + 1
    return kind
