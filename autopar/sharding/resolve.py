"""Resolve: a block's Layout, checked against the rules and spelled out into strategies and redistributions.

The cost engine prices exactly what this returns and the runtime inserts exactly what this returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from autopar.errors import PlanError
from autopar.model.graph import Block, OpGraph, OpNode
from autopar.plan import INTRA_AXES, Layout, Mesh, Plan
from autopar.sharding.placement import Placement, R, local_shape, parse
from autopar.sharding.redistribute import Conversion
from autopar.sharding.rules import strategies
from autopar.sharding.strategy import Strategy, parse_strategy

OUTPUT = "<output>"  # the consumer of a block's boundary activations


@dataclass(frozen=True)
class Step:
    """One conversion on one axis.

    Attributes:
        shape: the tensor as it is when whole on this axis, still cut by the other axes.
    """

    axis: str
    conversion: Conversion
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Edge:
    """A redistribution of one tensor, shared by all consumers that want it alike.

    Attributes:
        producer: the node (or block input, or parameter) whose result is redistributed.
        steps: conversions in the order they run forward; empty when the tensor is used as it is.
        consumers: (node, operand index) pairs; node is :data:`OUTPUT` and the index a position in ``block.outputs``
            for the block's results.
    """

    producer: str
    steps: tuple[Step, ...]
    consumers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class ResolvedBlock:
    """A block with every choice spelled out.

    Attributes:
        strategies: op node (prelude included) -> axis -> strategy, for axes above 1.
        edges: all tensor uses, grouped; those without steps included.
        parameter_placements: parameter or buffer node -> axis -> placement at rest.
        step_reductions: (parameter node, axis): replicated parameters whose gradient is a partial sum; summed once per
            optimizer step rather than per micro-batch.
        input_placements, output_placements: aligned with ``block.inputs`` and ``block.outputs``.
    """

    block: Block
    sizes: dict[str, int]
    strategies: dict[str, dict[str, Strategy]]
    edges: tuple[Edge, ...]
    parameter_placements: dict[str, dict[str, Placement]]
    step_reductions: tuple[tuple[str, str], ...]
    input_placements: tuple[dict[str, Placement], ...]
    output_placements: tuple[dict[str, Placement], ...]
    _by_use: dict[tuple[str, int], Edge] = field(default_factory=dict, compare=False)

    def edge_into(self, node: str, operand: int) -> Edge:
        """The edge that feeds one operand."""
        if not self._by_use:
            self._by_use.update({use: edge for edge in self.edges for use in edge.consumers})
        return self._by_use[(node, operand)]

    def local_shape(self, graph: OpGraph, node: str, output: int = 0) -> tuple[int, ...]:
        """Shape of one device's part of a node's result, as the node makes it (before any redistribution)."""
        shape = graph.nodes[node].outputs[output].shape
        return local_shape(shape, [(p, self.sizes[a]) for a, p in self.placement_of(node).items()])

    def placement_of(self, node: str) -> dict[str, Placement]:
        """Placement per axis of what a node, parameter or block input gives."""
        if node in self.strategies:
            return {axis: s.output for axis, s in self.strategies[node].items()}
        if node in self.parameter_placements:
            return self.parameter_placements[node]
        if node in self.block.inputs:
            return self.input_placements[self.block.inputs.index(node)]
        return {}


def parameter_label(block: Block, node: OpNode) -> str:
    """Name of a parameter inside its block: the state_dict name less the block's own path."""
    return node.op.removeprefix(block.name + ".")


def shared_parameters(graph: OpGraph) -> frozenset[str]:
    """Parameters that several blocks read (tied weights).

    One block's gradient may be a partial sum and another's whole, so theirs is summed where it arises, not once a step.
    """
    found: frozenset[str] | None = graph.facts.get("shared_parameters")
    if found is None:
        counts = Counter(name for block in graph.blocks for name in dict.fromkeys(block.parameters))
        found = frozenset(name for name, count in counts.items() if count > 1)
        graph.facts["shared_parameters"] = found
    return found


def axis_sizes(mesh: Mesh) -> dict[str, int]:
    """The axes above 1 on which operators are placed."""
    return {axis: size for axis in INTRA_AXES if (size := getattr(mesh, axis)) > 1}


def resolve(graph: OpGraph, block: Block, layout: Layout, mesh: Mesh) -> ResolvedBlock:
    """Spells a layout out for one block.

    Args:
        graph: the model at the plan's micro-batch size.
        block: one of its blocks.
        layout: the placements; what it does not name is replicated.
        mesh: the device mesh.

    Raises:
        PlanError: a label, parameter or axis does not exist, a strategy is not legal for its operator, or placements
            contradict each other; says which would be legal.
    """
    sizes = axis_sizes(mesh)
    _check_names(graph, block, layout)
    chosen = {name: _strategies_of(graph, block, name, layout, sizes) for name in (*block.prelude, *block.nodes)}
    inputs = tuple(_placements(layout.inputs, i, sizes, f"{block.name}: input {i}") for i in range(len(block.inputs)))
    outputs = tuple(
        _placements(layout.outputs, i, sizes, f"{block.name}: output {i}") for i in range(len(block.outputs))
    )
    for names, placements, what in ((block.inputs, inputs, "input"), (block.outputs, outputs, "output")):
        for name, placed in zip(names, placements, strict=True):
            _check_shape(graph.nodes[name].meta.shape, placed, sizes, f"{what} {name} of block {block.name}")
    uses = _uses(graph, block, chosen, outputs, sizes)
    parameters = _parameters(graph, block, layout, uses, sizes)
    given = {**dict(zip(block.inputs, inputs, strict=True)), **parameters}
    edges, reductions = [], []
    for (producer, wanted), consumers in uses.items():
        source = {a: s.output for a, s in chosen[producer].items()} if producer in chosen else given.get(producer, {})
        node = graph.nodes[producer]
        trainable = node.kind == "parameter" and node.requires_grad
        conversions: dict[str, Conversion] = {}
        for axis in sizes:
            dst, partial = dict(wanted)[axis]
            src = source.get(axis, R)
            once = trainable and producer not in shared_parameters(graph) and _all_partial(uses, producer, axis)
            if once and src == R and dst == R and partial:
                reductions.append((producer, axis))
                partial = False
            conversion = Conversion(src, dst, partial, node.requires_grad)
            if not conversion.is_identity:
                conversions[axis] = conversion
        if conversions and len(node.outputs) > 1:
            raise PlanError(
                f"block {block.name!r} would redistribute all results of {producer!r} ({node.op}) at once",
                "Place the operators that take its single results as it makes them, and redistribute after those",
            )
        shape = node.outputs[0].shape if node.outputs else ()
        edges.append(Edge(producer, conversion_steps(conversions, source, sizes, shape, producer), tuple(consumers)))
    return ResolvedBlock(
        block, sizes, chosen, tuple(edges), parameters, tuple(dict.fromkeys(reductions)), inputs, outputs
    )


Wanted = tuple[tuple[str, tuple[Placement, bool]], ...]
Uses = dict[tuple[str, Wanted], list[tuple[str, int]]]


def _check_names(graph: OpGraph, block: Block, layout: Layout) -> None:
    labels = set(block.labels)
    for label, axes in layout.operators.items():
        if label not in labels:
            raise PlanError(
                f"layout of block {block.name!r} names the operator {label!r}, which it does not have",
                f"It has: {', '.join(sorted(labels))}",
            )
        _check_axes(axes, f"operator {label!r} of block {block.name!r}")
    names = {parameter_label(block, graph.nodes[p]) for p in block.parameters}
    for name, axes in layout.parameters.items():
        if name not in names:
            raise PlanError(
                f"layout of block {block.name!r} names the parameter {name!r}, which it does not have",
                f"It has: {', '.join(sorted(names)) or 'none'}",
            )
        _check_axes(axes, f"parameter {name!r} of block {block.name!r}")
    for what, listed, have in (("inputs", layout.inputs, block.inputs), ("outputs", layout.outputs, block.outputs)):
        if listed and len(listed) != len(have):
            raise PlanError(
                f"layout of block {block.name!r} places {len(listed)} {what}, the block has {len(have)}",
                "Name one placement for each",
            )
        for axes in listed:
            _check_axes(axes, f"{what} of block {block.name!r}")


def _check_axes(axes: Iterable[str], what: str) -> None:
    for axis in axes:
        if axis not in INTRA_AXES:
            raise PlanError(
                f"{what} is placed on the unknown mesh axis {axis!r}", f"Use one of {', '.join(INTRA_AXES)}"
            )


def _strategies_of(
    graph: OpGraph, block: Block, name: str, layout: Layout, sizes: dict[str, int]
) -> dict[str, Strategy]:
    """The strategy of one operator on each axis, checked against its rule."""
    node = graph.nodes[name]
    label = block.label_of().get(name) if name not in block.prelude else None
    texts = layout.operators.get(label, {}) if label else {}
    found: dict[str, Strategy] = {}
    for axis, size in sizes.items():
        legal = strategies(graph, node, size)
        if axis not in texts:
            found[axis] = legal[0]
            continue
        asked = parse_strategy(texts[axis])
        match = next((s for s in legal if s == asked), None)
        if match is None:
            options = "; ".join(dict.fromkeys(str(s) for s in legal))
            raise PlanError(
                f"operator {label!r} of block {block.name!r} ({node.op}) cannot run as {texts[axis]!r} on "
                f"{axis}={size}",
                f"Possible: {options}",
            )
        found[axis] = match
    return found


def _placements(listed: list[dict[str, str]], index: int, sizes: dict[str, int], what: str) -> dict[str, Placement]:
    given = listed[index] if index < len(listed) else {}
    placed = {axis: parse(given.get(axis, "R")) for axis in sizes}
    if any(p.kind == "P" for p in placed.values()):
        raise PlanError(f"{what} is placed P", "Activations cross blocks as R or S(d)")
    return placed


def _check_shape(shape: tuple[int, ...], placed: dict[str, Placement], sizes: dict[str, int], what: str) -> None:
    try:
        local_shape(shape, [(p, sizes[a]) for a, p in placed.items()])
    except PlanError as error:
        raise PlanError(f"{what}: {error.what}", error.remedy) from None


def _uses(
    graph: OpGraph,
    block: Block,
    chosen: dict[str, dict[str, Strategy]],
    outputs: tuple[dict[str, Placement], ...],
    sizes: dict[str, int],
) -> Uses:
    """Every tensor use, grouped by producer and by what the consumers want of it."""
    uses: Uses = {}
    for name in (*block.prelude, *block.nodes):
        for i, producer in enumerate(graph.nodes[name].inputs):
            wanted = []
            for axis in sizes:
                strategy = chosen[name][axis]
                partial = strategy.grad_partial[i] if strategy.grad_partial else False
                wanted.append((axis, (strategy.inputs[i], partial and graph.nodes[producer].requires_grad)))
            uses.setdefault((producer, tuple(wanted)), []).append((name, i))
    for i, name in enumerate(block.outputs):
        wanted = [(axis, (outputs[i][axis], False)) for axis in sizes]
        uses.setdefault((name, tuple(wanted)), []).append((OUTPUT, i))
    return uses


def _parameters(
    graph: OpGraph, block: Block, layout: Layout, uses: Uses, sizes: dict[str, int]
) -> dict[str, dict[str, Placement]]:
    """Placements at rest: as the layout says, else as all consumers want it, else replicated."""
    placements: dict[str, dict[str, Placement]] = {}
    for name in block.parameters:
        node = graph.nodes[name]
        texts = layout.parameters.get(parameter_label(block, node), {})
        placed: dict[str, Placement] = {}
        for axis in sizes:
            wants = {dict(wanted)[axis][0] for (producer, wanted) in uses if producer == name}
            only = next(iter(wants)) if len(wants) == 1 else R
            placed[axis] = parse(texts[axis]) if axis in texts else R if only.kind == "P" else only
            if placed[axis].kind == "P":
                raise PlanError(f"parameter {node.op!r} is placed P on {axis}", "Parameters are stored R or S(d)")
        _check_shape(node.meta.shape, placed, sizes, f"parameter {node.op}")
        placements[name] = placed
    return placements


def _all_partial(uses: Uses, producer: str, axis: str) -> bool:
    return all(dict(wanted)[axis][1] for (name, wanted) in uses if name == producer)


def conversion_steps(
    conversions: dict[str, Conversion],
    source: dict[str, Placement],
    sizes: dict[str, int],
    shape: tuple[int, ...],
    name: str,
) -> tuple[Step, ...]:
    """Gathers from the innermost axis out, then cuts from the outermost in; each with its shape on that axis.

    Raises:
        PlanError: a dimension would change on one axis while an inner axis splits it further: its pieces would end up
            in another order than the placements say.
    """
    axes = [a for a in reversed(sizes) if a in conversions and not conversions[a].dst.is_shard]
    axes += [a for a in sizes if a in conversions and conversions[a].dst.is_shard]
    now = {axis: source.get(axis, R) for axis in sizes}
    order = list(sizes)
    steps = []
    for axis in axes:
        others = [(p, sizes[a]) for a, p in now.items() if a != axis]
        conversion = conversions[axis]
        nested = {conversion.src.dim, conversion.dst.dim} - {-1}
        if (
            conversion.src.is_shard
            and conversion.dst.is_shard
            and any(p.is_shard and p.dim in nested for p, _ in others)
        ):
            raise PlanError(
                f"{name} would move a shard between dimensions that another axis also splits", "Gather it first"
            )
        inner = order[order.index(axis) + 1 :]
        if any(now[a].is_shard and now[a].dim in nested for a in inner):
            raise PlanError(
                f"{name} would change from {conversion.src} to {conversion.dst} on {axis} while an inner axis splits "
                "the same dimension",
                f"Gather it on {', '.join(inner)} as well, or place it alike before and after",
            )
        steps.append(Step(axis, conversion, local_shape(shape, others)))
        now[axis] = conversion.dst
    return tuple(steps)


def check_blocks(graph: OpGraph, plan: Plan) -> None:
    """Refuses a plan whose blocks are not the model's, in their order.

    Raises:
        PlanError: names the first block that is odd.
    """
    have, want = [b.name for b in graph.blocks], [b.name for b in plan.blocks]
    if have != want:
        odd = next((n for n in want if n not in have), next((n for n in have if n not in want), "their order"))
        raise PlanError(
            f"the plan's blocks are not the model's: {odd!r}",
            f"The model has: {', '.join(have[:12])}{' ...' if len(have) > 12 else ''}",
        )


def resolve_plan(graph: OpGraph, plan: Plan) -> dict[str, ResolvedBlock]:
    """Resolves every block of a plan and checks that neighbours agree on what crosses between them.

    Raises:
        PlanError: blocks are missing or unknown, a boundary activation or a shared parameter has two placements.
    """
    check_blocks(graph, plan)
    resolved: dict[str, ResolvedBlock] = {}
    crossing: dict[str, dict[str, Placement]] = {}
    for block, chosen in zip(graph.blocks, plan.blocks, strict=True):
        this = resolve(graph, block, plan.layouts[chosen.layout], plan.mesh)
        for name, placed in zip(block.inputs, this.input_placements, strict=True):
            expected = crossing.get(name)
            if expected is not None and expected != placed:
                raise PlanError(
                    f"block {block.name!r} expects {name} as {_show(placed)}, the block that makes it gives "
                    f"{_show(expected)}",
                    "Give both the same placement",
                )
        crossing.update(zip(block.outputs, this.output_placements, strict=True))
        for name, placed in this.parameter_placements.items():
            if crossing.setdefault(name, placed) != placed:
                raise PlanError(
                    f"the shared parameter {graph.nodes[name].op!r} is placed {_show(crossing[name])} and "
                    f"{_show(placed)}",
                    "Give it one placement",
                )
        resolved[block.name] = this
    return resolved


def _show(placed: dict[str, Placement]) -> str:
    return " ".join(f"{a}:{p}" for a, p in placed.items()) or "R"
