"""Capture: torch.export on the meta device, then one OpNode per operator with its facts. Allocates no weights."""

from __future__ import annotations

import hashlib
import logging
import operator
import warnings
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from autopar.errors import ModelError
from autopar.model import store
from autopar.model.autocast import AUTOCAST
from autopar.model.blocks import find_blocks
from autopar.model.functional import functional
from autopar.model.graph import NodeKind, OpGraph, OpNode, TensorMeta
from autopar.model.lasting import refuse_new_buffers
from autopar.model.lengthen import lengthened
from autopar.model.operator_facts import OperatorFacts, Strided, differentiable, facts_of
from autopar.model.origin import source_line
from autopar.model.program import ROOT, Leaf, Program
from autopar.model.quiet import without_dumps
from autopar.model.recording import Recording
from autopar.model.refusals import explained, without_rule, without_value
from autopar.model.repeats import Repeat, find_repeats, shortened
from autopar.model.spec import TrainingJob

PREFIX = f"{ROOT}."
log = logging.getLogger(__name__)


def capture(
    job: TrainingJob, batch_size: int, device: str = "cpu", precision: str = "fp32", afresh: bool = False
) -> OpGraph:
    """Captures model and loss as an operator graph.

    Layers that are alike (see :mod:`autopar.model.repeats`) are traced a few times and copied, and what was captured
    before is read from disk (:mod:`autopar.model.store`).

    Args:
        job: the model.
        batch_size: samples of the micro-batch that the shapes are for.
        device: type of the device that it will run on (``cpu``, ``cuda``); decides what attention keeps.
        precision: ``bf16``, ``fp16`` and ``fp8`` give dtypes and saved tensors under autocast; operators are the same.
        afresh: traces every layer, and reads and keeps nothing; the result is the same, later.

    Raises:
        CaptureError: the model cannot be exported (data-dependent control flow, an operator without a fake rule);
            names the operator, module path and source line where torch tells them.
        ModelError: model.py itself fails.
    """
    with torch.device("meta"):
        module = job.loss_module()
        batch = job.flatten_batch(job.example_batch(batch_size))
    inputs = {k: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta") for k, v in batch.items()}
    module = module.to("meta")
    recording = None if afresh else _recorded(module, inputs)
    if recording is None:
        return _Builder(module, _program(job, module, inputs, []), batch_size, device, AUTOCAST[precision]).build()
    key = store.key_of(job.source.removeprefix("hf:"), module, recording, batch_size, device, precision)
    graph = store.load(key) if key else None
    if graph is None:
        repeats = _repeats(module, inputs, recording)
        program = _program(job, module, inputs, repeats)
        graph = _Builder(module, program, batch_size, device, AUTOCAST[precision]).build()
        if key:
            store.keep(key, graph)
    return graph


def _recorded(module: nn.Module, inputs: dict[str, torch.Tensor]) -> Recording | None:
    try:
        return Recording.of(module, inputs)
    except Exception as error:  # the user's code may refuse meta tensors; the trace tells
        log.debug("nothing is copied or kept: %s: %s", type(error).__name__, error)
        return None


def _repeats(module: nn.Module, inputs: dict[str, torch.Tensor], recording: Recording) -> list[Repeat]:
    try:
        return find_repeats(module, inputs, recording)
    except Exception as error:  # the user's code may refuse fewer layers; the whole trace tells
        log.debug("every layer is traced: %s: %s", type(error).__name__, error)
        return []


def _program(job: TrainingJob, module: nn.Module, inputs: dict[str, torch.Tensor], repeats: list[Repeat]) -> Program:
    if repeats:
        with shortened(module, repeats):
            short = Program.of(functional(_export(job, module, inputs)))
        whole = lengthened(short, module, repeats)
        if whole is not None:
            for r in repeats:
                log.debug("layers are copied: %s, %d times members %d to %d", r.path, r.copies, r.template, r.cut - 1)
            return whole
    return Program.of(functional(_export(job, module, inputs)))


def _export(job: TrainingJob, module: nn.Module, inputs: dict[str, torch.Tensor]) -> ExportedProgram:
    with (
        warnings.catch_warnings(),
        explained(job.source, module, inputs),
        refuse_new_buffers(module.get_submodule("model")),
        without_dumps(),
    ):
        warnings.filterwarnings("ignore", message="The tensor attributes .* were assigned during export")  # LSTM
        return torch.export.export(module, (), kwargs=inputs, strict=False)


class _Builder:
    """Turns an exported program into an OpGraph."""

    def __init__(
        self, module: nn.Module, program: Program, batch_size: int, device: str, autocast: torch.dtype | None
    ) -> None:
        self.module, self.program, self.batch_size = module, program, batch_size
        self.device, self.autocast = device, autocast
        self.graph, self.nodes = fx.Graph(), {}  # type: tuple[fx.Graph, dict[str, OpNode]]
        self.new: dict[fx.Node, fx.Node] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.laid_out: dict[str, tuple[Strided, ...]] = {}
        self.roots: dict[str, tuple[tuple[str, int] | None, ...]] = {}  # per result, whose storage it is a view of
        self.known: dict[Any, OperatorFacts] = {}
        self.canonical, self.tied = _ties(module)

    def build(self) -> OpGraph:
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._source(node, self.program.leaves[node])
            elif node.op == "call_function":
                self._operator(node)
            elif node.op == "output":
                loss = self._loss(node)
        self.graph.output(self.graph_node(loss))
        nodes = {n.name: self.nodes[n.name] for n in self.graph.nodes if n.op != "output"}
        blocks = find_blocks(nodes, self.graph, loss)
        return OpGraph(
            fx_graph=self.graph,
            nodes=nodes,
            blocks=blocks,
            batch_size=self.batch_size,
            tokens_per_sample=_tokens(nodes, self.batch_size),
            loss=loss,
            fingerprint=_fingerprint(nodes),
            tied=self.tied,
            constants=self.constants,
        )

    def graph_node(self, name: str) -> fx.Node:
        found: fx.Node = next(n for n in self.graph.nodes if n.name == name)
        return found

    def _source(self, node: fx.Node, leaf: Leaf) -> None:
        """A batch input, parameter, buffer or constant."""
        value = node.meta.get("val")
        kinds: dict[InputKind, NodeKind] = {
            InputKind.USER_INPUT: "input",
            InputKind.PARAMETER: "parameter",
            InputKind.BUFFER: "buffer",
            InputKind.CONSTANT_TENSOR: "constant",
        }
        kind = kinds.get(leaf.kind)
        if kind is None or not isinstance(value, torch.Tensor):
            return
        name, target, trainable = leaf.name, leaf.name, False
        if kind in ("parameter", "buffer"):
            target = self.canonical.get(leaf.name, leaf.name).removeprefix(PREFIX)
            name = target.replace(".", "_")
            trainable = kind == "parameter" and self.module.get_parameter(leaf.name).requires_grad
        elif leaf.constant is not None and leaf.constant.is_meta:
            raise without_value(node)
        elif leaf.constant is not None:
            target = name = self._constant(leaf.constant)
        if name in self.nodes:  # a tied parameter under its second name, a constant met before
            self.new[node] = self.graph_node(name)
            return
        new = self.graph.placeholder(target) if kind == "input" else self.graph.get_attr(target)
        new.name = name
        self.new[node] = new
        meta = TensorMeta(tuple(value.shape), value.dtype)
        self.nodes[name] = OpNode(name, kind, target, (), (meta,), requires_grad=trainable)
        self.laid_out[name] = (Strided.of(value),)

    def _constant(self, value: torch.Tensor) -> str:
        """The name of a constant; equal ones share it."""
        for name, known in self.constants.items():
            if known.dtype == value.dtype and torch.equal(known, value):
                return name
        name = f"_constant_{len(self.constants)}"
        self.constants[name] = value
        return name

    def _operator(self, node: fx.Node) -> None:
        if node.meta.get("val") is None and not node.users:
            return  # an assertion about metadata
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: self.new[n])
        name = node.target.__name__.partition(".")[0]  # type: ignore[union-attr]
        new = self.graph.create_node("call_function", node.target, args, kwargs, name=name)
        self.new[node] = new
        operands: list[str] = []
        fx.map_arg((new.args, new.kwargs), lambda n: operands.append(n.name))
        if node.target is operator.getitem:
            self._getitem(new, operands[0], int(new.args[1]))  # type: ignore[arg-type]
            return
        needs_grad = [self.nodes[name].requires_grad for name in operands]
        laid_out = [self.laid_out[name][0] for name in operands]
        try:
            facts = facts_of(node, laid_out, needs_grad, self.device, self.autocast, self.known)
        except (RuntimeError, NotImplementedError) as error:
            raise without_rule(node, error) from error
        self.laid_out[new.name] = facts.outputs
        self.roots[new.name] = tuple(None if i is None else self._root(operands[i]) for i in facts.views)
        shared = set(self.roots[new.name])
        viewed = shared.pop() if len(shared) == 1 else None
        self.nodes[new.name] = OpNode(
            name=new.name,
            kind="op",
            op=str(node.target),
            inputs=tuple(operands),
            outputs=tuple(one.meta for one in facts.outputs),
            module=self.program.module_of[node].removeprefix(ROOT).removeprefix("."),
            source=source_line(node),
            requires_grad=facts.requires_grad,
            alias_of=viewed[0] if viewed else None,
            alias_output=viewed[1] if viewed else 0,
            forward_flops=facts.forward_flops,
            backward_flops=facts.backward_flops,
            saved=facts.saved_tensors(new.name, operands, self.nodes),
            reads=facts.read,
        )

    def _getitem(self, node: fx.Node, producer: str, index: int) -> None:
        """One of several results."""
        whole, one = self.nodes[producer], self.laid_out[producer][index]
        alias_of, alias_output = self.roots[producer][index] or (producer, index)
        self.laid_out[node.name] = (one,)
        self.nodes[node.name] = OpNode(
            name=node.name,
            kind="op",
            op="getitem",
            inputs=(producer,),
            outputs=(one.meta,),
            module=whole.module,
            source=whole.source,
            requires_grad=whole.requires_grad and differentiable(one.dtype),
            alias_of=alias_of,
            alias_output=alias_output,
        )

    def _root(self, name: str) -> tuple[str, int]:
        """The node and the result whose storage a node's result is."""
        node = self.nodes[name]
        return (node.alias_of, node.alias_output) if node.alias_of is not None else (name, 0)

    def _loss(self, output: fx.Node) -> str:
        results: Any = output.args[0]
        loss = self.nodes[self.new[results[0]].name]
        if not loss.requires_grad:
            raise ModelError(
                f"the loss ({str(loss.meta.dtype).removeprefix('torch.')}) depends on no trainable parameter",
                "Return a floating loss that is computed from parameters with requires_grad",
            )
        return loss.name


def _ties(module: nn.Module) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Every parameter name to the first name of the same tensor; first names to the others."""
    first: dict[int, str] = {}
    canonical: dict[str, str] = {}
    tied: dict[str, tuple[str, ...]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        canonical[name] = first.setdefault(id(parameter), name)
        if canonical[name] != name:
            key = canonical[name].removeprefix(PREFIX)
            tied[key] = (*tied.get(key, ()), name.removeprefix(PREFIX))
    return canonical, tied


def _tokens(nodes: dict[str, OpNode], batch_size: int) -> int:
    """Labels per sample where the loss is a cross entropy over positions, else the longest integer input, else 1."""
    counts = [
        n.meta.numel // batch_size
        for n in nodes.values()
        if n.kind == "input" and not n.meta.dtype.is_floating_point and n.meta.shape and n.meta.shape[0] == batch_size
    ]
    return max(counts, default=1)


def _fingerprint(nodes: dict[str, OpNode]) -> str:
    """Hash of operators in order and of parameter names, shapes and dtypes; the same for every batch size."""
    digest = hashlib.sha256()
    for node in nodes.values():
        if node.kind in ("parameter", "buffer"):
            digest.update(f"{node.op} {node.meta.shape} {node.meta.dtype}\n".encode())
        else:
            digest.update(f"{node.op} {len(node.inputs)}\n".encode())
    return digest.hexdigest()[:16]
