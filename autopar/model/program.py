"""An exported program as what capture reads of it: the graph, what its placeholders are, where its calls come from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from autopar.model.origin import module_path

NAMED = (InputKind.PARAMETER, InputKind.BUFFER)
ROOT = "model"  # the user's model inside the LossModule


@dataclass(frozen=True)
class Leaf:
    """What a placeholder stands for.

    Attributes:
        kind: parameter, buffer, constant or input.
        name: of a parameter or buffer, its name in the exported module; else that of the placeholder.
        constant: its value, where it is one.
    """

    kind: InputKind
    name: str
    constant: torch.Tensor | None = None


@dataclass
class Program:
    """A graph of operators.

    Attributes:
        graph: placeholders, calls and one output: the results, the loss first.
        leaves: per placeholder.
        module_of: per call, the path of the module that called it, in the exported module.
    """

    graph: fx.Graph
    leaves: dict[fx.Node, Leaf]
    module_of: dict[fx.Node, str]

    @classmethod
    def of(cls, exported: ExportedProgram) -> Program:
        """An export as it is."""
        specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
        leaves: dict[fx.Node, Leaf] = {}
        for node in exported.graph.find_nodes(op="placeholder"):
            spec = specs[node.name]
            constant = exported.constants[spec.target] if spec.kind is InputKind.CONSTANT_TENSOR else None
            leaves[node] = Leaf(spec.kind, str(spec.target) if spec.kind in NAMED else node.name, constant)
        calls = [node for node in exported.graph.nodes if node.op == "call_function"]
        return cls(exported.graph, leaves, {node: f"{ROOT}.{module_path(node)}".rstrip(".") for node in calls})
