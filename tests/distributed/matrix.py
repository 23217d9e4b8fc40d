"""Small models of every kind, and plans drawn for them: any mesh, any legal placement of every operator.

A case is a few whole numbers and words, so that a failing one can be written down, run again and made smaller.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from types import ModuleType

import torch
from torch import nn

from autopar.errors import PlanError
from autopar.model.capture import capture
from autopar.model.graph import Block, OpGraph, OpNode
from autopar.model.spec import TrainingJob
from autopar.plan import BlockPlan, ClusterRef, Layout, Mesh, ModelRef, Plan
from autopar.sharding.localize import localize
from autopar.sharding.placement import local_shape, parse
from autopar.sharding.resolve import axis_sizes, parameter_label, resolve, shared_parameters
from autopar.sharding.rules import strategies
from autopar.sharding.strategy import Strategy

ZOO = Path(__file__).parents[2] / "autopar/zoo"
TEXT = {"VOCABULARY": 32, "WIDTH": 16, "HEADS": 4}
MODELS: dict[str, tuple[Path, dict[str, int]]] = {
    "gpt": (ZOO / "gpt.py", {**TEXT, "LAYERS": 3, "SEQUENCE": 8}),
    "moe": (ZOO / "moe.py", {**TEXT, "LAYERS": 2, "SEQUENCE": 8, "EXPERTS": 4, "HIDDEN": 16}),
    "vit": (ZOO / "vit.py", {"IMAGE": 8, "PATCH": 4, "WIDTH": 16, "HEADS": 4, "LAYERS": 3, "CLASSES": 8}),
    "seq2seq": (ZOO / "seq2seq.py", {**TEXT, "VOCABULARY": 256, "LAYERS": 2, "SOURCE": 8, "TARGET": 8}),
    "tied": (Path(__file__).with_name("tied_gpt.py"), {**TEXT, "LAYERS": 3, "SEQUENCE": 8}),
}
GLOBAL_BATCH = 8


@dataclass(frozen=True)
class Case:
    """One plan to run.

    Attributes:
        mesh: sizes by axis, as in ``"dp_shard=2 tp=2"``.
        layout_seed: draws the placements where the mesh has tp or cp; the same seed, the same placements.
    """

    model: str
    mesh: str
    layout_seed: int = 0
    micro_batches: int = 2
    schedule: str = "1f1b"
    recompute: str = "none"
    precision: str = "fp32"
    compile: str = "none"

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: int(size) for axis, _, size in (word.partition("=") for word in self.mesh.split())}

    @property
    def world(self) -> int:
        return Mesh(**self.sizes).devices

    def __str__(self) -> str:
        usual = Case(self.model, self.mesh)
        odd = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(usual, k)]
        return " ".join([self.model, *self.mesh.split(), *odd])


@lru_cache
def small(name: str) -> TrainingJob:
    """A zoo model cut down to a size at which a step takes milliseconds."""
    path, sizes = MODELS[name]
    spec = importlib.util.spec_from_file_location(f"small_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for key, value in sizes.items():
        assert hasattr(module, key)
        setattr(module, key, value)
    return TrainingJob(str(path), name, module.build_model, module.example_batch, module.compute_loss, optimizer)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW whose eps keeps gradients that are rounding noise from moving a parameter by a whole step."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5)


@lru_cache
def graph_of(name: str, micro_batch: int) -> OpGraph:
    return capture(small(name), micro_batch)


def plan_of(case: Case) -> Plan:
    """The plan of a case."""
    mesh = Mesh(**case.sizes)
    micro_batch = GLOBAL_BATCH // mesh.dp // case.micro_batches
    graph = graph_of(case.model, micro_batch)
    virtual = 1 if case.schedule in ("gpipe", "1f1b") else 2
    names = [b.name for b in graph.blocks]
    count = mesh.pp * virtual
    layouts = draw_layouts(graph, mesh, case.layout_seed)
    return Plan(
        model=ModelRef(source=small(case.model).source, fingerprint=graph.fingerprint),
        cluster=ClusterRef(name="test", devices=mesh.devices),
        global_batch=GLOBAL_BATCH,
        mesh=mesh,
        stages=[names[i * len(names) // count] for i in range(count)],
        blocks=[BlockPlan(name=n, layout=n, recompute=case.recompute) for n in names],
        layouts=layouts,
        zero_stage=3 if mesh.dp_shard > 1 else 0,
        micro_batch=micro_batch,
        micro_batches=case.micro_batches,
        schedule=case.schedule,
        virtual_stages=virtual,
        precision=case.precision,
        compile=case.compile,
    )


def draw_layouts(graph: OpGraph, mesh: Mesh, seed: int) -> dict[str, Layout]:
    """A layout for every block: legal strategies at random, a quarter of the operators replicated."""
    random = Random(seed)
    sizes = axis_sizes(mesh)
    crossing: dict[str, dict[str, str]] = {}
    layouts: dict[str, Layout] = {}
    for block in graph.blocks:
        for name in block.outputs:
            crossing[name] = {} if name == graph.loss else _draw_crossing(random, graph.nodes[name], sizes)
        layouts[block.name] = _draw_block(random, graph, block, mesh, crossing)
    return layouts


def _draw_crossing(random: Random, node: OpNode, sizes: dict[str, int]) -> dict[str, str]:
    placed: dict[str, str] = {}
    for axis in sizes:
        options = ["R", "R", *(f"S({d})" for d in range(len(node.meta.shape)))]
        for choice in random.sample(options, len(options)):
            try:
                local_shape(node.meta.shape, [(parse(p), sizes[a]) for a, p in {**placed, axis: choice}.items()])
            except PlanError:
                continue
            placed[axis] = choice
            break
    return placed


def _draw_block(
    random: Random, graph: OpGraph, block: Block, mesh: Mesh, crossing: dict[str, dict[str, str]]
) -> Layout:
    """Draws operator by operator; one whose draw cannot follow the ones before it is drawn again, then replicated."""
    sizes = axis_sizes(mesh)
    shared = {parameter_label(block, graph.nodes[p]) for p in block.parameters if p in shared_parameters(graph)}
    layout = Layout(
        parameters={label: dict.fromkeys(sizes, "R") for label in shared},
        inputs=[crossing.get(name, {}) for name in block.inputs],
        outputs=[crossing[name] for name in block.outputs],
    )
    for name, label in zip(block.nodes, block.labels, strict=True) if sizes else ():
        for _ in range(4):
            drawn = {axis: str(_draw(random, strategies(graph, graph.nodes[name], n))) for axis, n in sizes.items()}
            more = layout.model_copy(update={"operators": {**layout.operators, label: drawn}})
            try:
                found = resolve(graph, block, more, mesh)
                localize(graph, name, found.strategies[name], sizes)
            except PlanError:
                continue
            layout = more
            break
    return layout


def _draw(random: Random, legal: tuple[Strategy, ...] | list[Strategy]) -> Strategy:
    return legal[0] if random.random() < 0.25 else random.choice(list(legal))
