"""What all plans of one candidate share: chains of layouts, loads of blocks, their options; made when asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autopar.cost.engine import Engine
from autopar.cost.memory import FP32, OPTIMIZER_STATES, Part
from autopar.model.graph import OpGraph
from autopar.plan import BlockPlan, Mesh
from autopar.planner.bound import Position, Relaxation, StageTerms, fill, lower_bound, positions, relax
from autopar.planner.chain import Chain, best_chain
from autopar.planner.chain_tables import Boundaries, ChainTables, State
from autopar.planner.elimination import Array
from autopar.planner.inter import BlockLoad, Cut, cuts, stage_times
from autopar.planner.lazy_chain import ChainSolver
from autopar.planner.memory_policy import OptionsOf
from autopar.planner.options import Option, OptionMaker
from autopar.planner.parameters import StepCosts
from autopar.planner.prices import Weights
from autopar.planner.space import Candidate
from autopar.sharding.placement import local_shape
from autopar.sharding.resolve import axis_sizes


def trainable_elements(graph: OpGraph) -> int:
    """Elements of all parameters that are trained."""
    if "trainable" not in graph.facts:
        graph.facts["trainable"] = sum(n.meta.numel for n in graph.of_kind("parameter") if n.requires_grad)
    return int(graph.facts["trainable"])


class Case:
    """One mesh and micro-batch size.

    Args:
        engine: prices everything.
        candidate: the mesh, the micro-batch and how many there are.
        tables: of the chain, or None where a block is too entangled for them.
    """

    def __init__(self, engine: Engine, candidate: Candidate, tables: ChainTables | None) -> None:
        self.engine, self.candidate, self.mesh, self.tables = engine, candidate, candidate.mesh, tables
        self.graph: OpGraph = engine.graph(candidate.micro_batch)
        self.blocks, self.sizes = self.graph.blocks, axis_sizes(candidate.mesh)
        self.boundaries = Boundaries(self.graph, self.mesh) if tables is None else tables.boundaries
        self.costs = StepCosts(engine, self.mesh, candidate.micro_batches, FP32 * trainable_elements(self.graph))
        self._chains: dict[tuple[float, bool], Chain] = {}
        self._relaxed: dict[tuple[tuple[Position, ...], tuple[bool, ...]], list[Relaxation]] = {}
        self._makers: dict[tuple[bool, ...], OptionMaker] = {}

    # --- bounds -----------------------------------------------------------------------------------------------------

    def placed_bound(self) -> float:
        """Seconds per micro-batch of all blocks, redistributions included, parameters and memory for free."""
        if self.tables is None:
            return ChainSolver(self.graph, self.mesh, self.engine, Weights()).lower_bound()
        return best_chain(self.tables, Weights(made_s=0.0)).seconds

    def step_bound(self, modes: Sequence[bool]) -> float:
        """Seconds a step within memory; infinite where nothing fits.

        Args:
            modes: allowed recomputation.
        """
        pp, count = self.mesh.pp, self.candidate.micro_batches
        relaxed = self.relaxed(positions(pp, count), modes)
        if not relaxed:
            return self.placed_bound() * fill(pp, count) + self.parameter_bound() / pp
        return lower_bound(relaxed)

    def relaxed(self, stages: Sequence[Position], modes: Sequence[bool]) -> list[Relaxation]:
        """Least seconds of all runs of blocks as each stage; none without tables."""
        if self.tables is None:
            return []
        key = (tuple(stages), tuple(modes))
        if key not in self._relaxed:
            self._relaxed[key] = relax(self.tables, self._terms(modes), stages)
        return self._relaxed[key]

    def cut_bound(self, cut: Cut, schedule: str, modes: Sequence[bool]) -> float:
        """Seconds a step that no plan with this cut and schedule can beat."""
        relaxed = self.relaxed(self.positions(schedule), modes)
        return min((one.of_cut(cut) for one in relaxed), default=0.0)

    def _terms(self, modes: Sequence[bool]) -> StageTerms:
        return StageTerms(
            micro_batches=self.candidate.micro_batches,
            element_s=self.costs.element_s,
            once_s=self.costs.once_s,
            reduction_s={axis: self.costs.reduction(axis) for axis in self.sizes},
            element_bytes=self.costs.element_bytes,
            limit_bytes=self.limit_bytes(),
            leaving=self._leaving() if self.mesh.pp > 1 else (),
            modes=tuple(modes),
        )

    def _leaving(self) -> tuple[Array, ...]:
        """Of every block, seconds of sending its outputs on and their gradients back, in each state."""
        known: dict[tuple[str, int], Array] = {}
        for index, block in enumerate(self.blocks):
            key = (block.kind, len(self.boundaries.states[index]))
            if key not in known:
                known[key] = np.array([self.send_seconds(index, state) for state in self.boundaries.states[index]])
        return tuple(known[b.kind, len(self.boundaries.states[i])] for i, b in enumerate(self.blocks))

    def limit_bytes(self) -> float:
        """What tensors of one device may take."""
        cluster = self.engine.cluster
        room = cluster.memory_limit_bytes - cluster.device.context_bytes
        return room / (1 + cluster.device.allocator_overhead_fraction)

    def parameter_bound(self) -> float:
        """Seconds a step of all parameters together: gathers, gradient sums, optimizer; cut as far as the mesh can."""
        return FP32 * trainable_elements(self.graph) / math.prod(self.sizes.values()) * self.costs.seconds_per_byte

    # --- layouts ----------------------------------------------------------------------------------------------------

    def chain(self, price: float, recompute: bool = False) -> Chain:
        """The best layouts when a byte costs ``price`` times what it takes on average."""
        key = (price, recompute)
        if key not in self._chains:
            weights = self._weights(price * self._seconds_per_byte() if price else 0.0, recompute)
            if self.tables is None:
                self._chains[key] = ChainSolver(self.graph, self.mesh, self.engine, weights).best()
            else:
                self._chains[key] = best_chain(self.tables, weights)
        return self._chains[key]

    def _weights(self, price: float, recompute: bool) -> Weights:
        """Seconds per micro-batch; parameters weigh by the inverse of the micro-batches held against activations."""
        count = self.candidate.micro_batches
        held = min(self.mesh.pp, count)
        return Weights(
            forward=2.0 if recompute else 1.0,
            element_s=self.costs.element_s + self.costs.once_s / count + price * self.costs.element_bytes / held,
            reduction_s={axis: self.costs.reduction(axis) / count for axis in self.sizes},
            kept_s=price,
        )

    def _seconds_per_byte(self) -> float:
        """The model's time over the bytes it keeps, both whole."""
        whole = Mesh()
        seconds = sum(sum(self.engine.operator_cost(self.graph, n, {}, whole)) for n in self.graph.of_kind("op"))
        kept = sum(saved.meta.nbytes for node in self.graph.nodes.values() for saved in node.saved)
        return seconds / (kept + FP32 * (2 + OPTIMIZER_STATES) * self.graph.parameter_count + 1)

    # --- stages -----------------------------------------------------------------------------------------------------

    def in_flight(self, schedule: str) -> list[int]:
        """Per stage, the most micro-batches it holds at once."""
        pp, count = self.mesh.pp, self.candidate.micro_batches
        return [min(count, pp - stage) if schedule == "1f1b" else count for stage in range(pp)]

    def positions(self, schedule: str) -> list[Position]:
        """Of every stage under a schedule."""
        every = positions(self.mesh.pp, self.candidate.micro_batches)
        return every if schedule == "1f1b" else [Position(self.candidate.micro_batches, 1) for _ in every]

    def cuts(self, schedule: str, modes: Sequence[bool]) -> list[Cut]:
        """Ways to cut the chain into stages, most promising first."""
        if self.mesh.pp == 1:
            return [(0,)]
        held, count = self.in_flight(schedule), self.candidate.micro_batches
        relaxed = self.relaxed(self.positions(schedule), modes)
        if relaxed:
            times = np.min([one.critical for one in relaxed], axis=0)
            return cuts(times, [float(leaving.min()) for leaving in self._leaving()], count)
        loads = self._loads(self.chain(0.0))
        times = stage_times(loads, held, self.limit_bytes(), True in modes)
        return cuts(times, [load.send_s for load in loads], count)

    def even_cut(self) -> Cut:
        """Equal numbers of blocks."""
        return tuple(stage * len(self.blocks) // self.mesh.pp for stage in range(self.mesh.pp))

    def send_seconds(self, index: int, state: State) -> float:
        """Sending a block's outputs, placed like that, to the next stage, and their gradients back."""
        group, total = self.engine.group(self.mesh, "pp"), 0.0
        for name, spec in zip(self.blocks[index].outputs, state, strict=True):
            meta = self.graph.nodes[name].meta
            shape = local_shape(meta.shape, list(zip(spec, self.sizes.values(), strict=True)))
            nbytes = math.prod(shape) * meta.dtype.itemsize
            total += 2 * self.engine.communication.collective_time("send", nbytes, group)
        return total

    def _loads(self, chain: Chain) -> list[BlockLoad]:
        group = self.engine.group(self.mesh, "pp")
        loads = []
        for block, layout in zip(self.blocks, chain.layouts, strict=True):
            cost = self.engine.block_cost(self.graph, block, layout, self.mesh)
            elements = sum(cost.parameter_elements)
            once = FP32 * elements * self.costs.seconds_per_byte / self.candidate.micro_batches
            forward = cost.forward_s + cost.communication("forward")
            backward = cost.backward_s + cost.communication("backward")
            loads.append(
                BlockLoad(
                    seconds=forward + backward + once,
                    forward_s=forward,
                    send_s=sum(
                        2 * self.engine.communication.collective_time("send", n, group) for n in cost.output_bytes
                    ),
                    fixed_bytes=FP32 * (2 + OPTIMIZER_STATES) * elements / self.costs.divided + cost.frozen_bytes,
                    saved_bytes=cost.saved_bytes + sum(cost.saved_input_bytes),
                    recomputed_bytes=sum(cost.input_bytes),
                )
            )
        return loads

    # --- options ----------------------------------------------------------------------------------------------------

    def maker(self, modes: Sequence[bool]) -> OptionMaker:
        """Makes options, kept or recomputed as ``modes`` says."""
        key = tuple(modes)
        if key not in self._makers:
            self._makers[key] = OptionMaker(
                self.engine, self.graph, self.mesh, self.candidate.micro_batches, self.costs, key
            )
        return self._makers[key]

    def is_small(self) -> bool:
        """Whether all layouts of all blocks can be tried."""
        maker = self.maker((False, True))
        shared = len({p for b in self.blocks for p in b.parameters}) < sum(len(b.parameters) for b in self.blocks)
        return not shared and all(maker.is_small(block) for block in self.blocks)

    def options(self, chains: Sequence[Chain], modes: Sequence[bool]) -> OptionsOf:
        """What each block may do: any layout where all can be tried, else those of the chains."""
        maker = self.maker(modes)
        small = self.is_small()
        found: dict[tuple[int, State], list[Option]] = {}

        def of(index: int, before: State) -> list[Option]:
            if (index, before) not in found:
                block, arriving = self.blocks[index], self.boundaries.arriving(index, before)
                options: list[Option] = []
                if small:
                    for after in self.boundaries.states[index]:
                        options += maker.every(block, arriving, after)
                else:
                    for chain in chains:
                        if index == 0 or chain.states[index - 1] == before:
                            after = chain.states[index]
                            options += maker.of_layout(block, arriving, after, chain.layouts[index])
                found[index, before] = _distinct(options)
            return found[index, before]

        return of

    def parts(self, first: int, last: int, chosen: Sequence[Option]) -> list[Part]:
        """Blocks first..last-1 as the engine's memory model takes them."""
        return [
            (
                block,
                BlockPlan(name=block.name, layout="", recompute="full" if option.recompute else "none"),
                self.engine.block_cost(self.graph, block, option.layout, self.mesh),
            )
            for block, option in zip(self.blocks[first:last], chosen, strict=True)
        ]


def _distinct(options: Sequence[Option]) -> list[Option]:
    found: list[Option] = []
    for option in options:
        if option not in found:
            found.append(option)
    return found
