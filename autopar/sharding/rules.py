"""Which strategies each operator allows: one small factor rule per family of ATen operators.

An operator without a rule may only be replicated, which is always right. The rules are checked against DTensor's own
and against real sharded execution in the tests. To add an operator, add its name to a family or write a rule.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import fx

from autopar.model.graph import OpGraph, OpNode
from autopar.sharding.factors import Dims, Factors, expand_factors, replicated, view_factors
from autopar.sharding.strategy import Internal, Strategy


class Call:
    """What a rule sees of one operator: operand shapes, result shape and the remaining arguments."""

    def __init__(self, graph: OpGraph, node: OpNode) -> None:
        self.node = node
        self.shapes = [_operand_shape(graph, name, node) for name in node.inputs]
        self.out = node.meta.shape if node.outputs else ()
        self.fx: fx.Node = graph.fx_node(node.name)

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """A non-tensor argument, by position or by name."""
        if len(self.fx.args) > position:
            return self.fx.args[position]
        return self.fx.kwargs.get(name, default)


def _operand_shape(graph: OpGraph, name: str, node: OpNode) -> tuple[int, ...]:
    producer = graph.nodes[name]
    if node.op == "getitem" and len(producer.outputs) > 1:
        return node.meta.shape
    return producer.outputs[0].shape if producer.outputs else ()


Rule = Callable[[Call], Factors | None]
_RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def base_name(op: str) -> str:
    """``aten.add.Tensor`` -> ``add``; in-place variants share the rule of the functional one."""
    parts = op.split(".")
    name = parts[1] if parts[0] == "aten" and len(parts) > 1 else parts[-1] if parts[0] == "_operator" else op
    return name.rstrip("_") if not name.startswith("_") else name


def strategies(graph: OpGraph, node: OpNode, size: int) -> tuple[Strategy, ...]:
    """The legal strategies of an operator on one mesh axis.

    Args:
        graph: the captured model.
        node: one of its op nodes.
        size: devices on the axis.

    Returns:
        The replicated strategy first. A dimension that ``size`` does not divide is never sharded.
    """
    cache: dict[tuple[str, int], tuple[Strategy, ...]] = graph.facts.setdefault("strategies", {})
    key = (node.name, size)
    if key not in cache:
        needs_grad = tuple(graph.nodes[name].requires_grad for name in node.inputs)
        rule = _RULES.get(base_name(node.op))
        factors = rule(Call(graph, node)) if rule and node.inputs and node.outputs else None
        if factors is None:
            cache[key] = (replicated(len(node.inputs)),)
        else:
            cache[key] = expand_factors(factors, size, needs_grad)
    return cache[key]


def has_rule(op: str) -> bool:
    """Whether an operator has a rule (others are replicated)."""
    return base_name(op) in _RULES


# --- pointwise ---------------------------------------------------------------------------------------------------

_POINTWISE = """
abs add addcdiv addcmul alias bfloat16 bitwise_and bitwise_not bitwise_or ceil clamp clamp_max clamp_min clone
contiguous cos detach div dropout elu eq erf exp fill float floor ge gelu gt hardswish hardtanh isnan le leaky_relu
lift_fresh_copy log log1p log_sigmoid logical_and logical_not logical_or logical_xor logit lt masked_fill maximum
minimum mish mul native_dropout ne neg ones_like pow reciprocal relu relu6 remainder round rsqrt rsub sigmoid sign silu
sin softplus sqrt square sub tanh threshold to type_as where xlogy zeros_like _to_copy
""".split()
_LINEAR = {"neg", "clone", "contiguous", "alias", "to", "_to_copy"}


@_rule(*_POINTWISE)
def _pointwise(call: Call) -> Factors:
    out = _names(len(call.out))
    inputs = tuple(_broadcast(shape, call.out, out) for shape in call.shapes)
    name = base_name(call.node.op)
    same = all(shape == call.out for shape in call.shapes)
    linear = (
        name in _LINEAR
        or (name in ("add", "sub") and len(inputs) == 2)
        or (name in ("mul", "div") and len(inputs) == 1)
    )
    return Factors(inputs, out, _sizes(out, call.out), linear=linear and same)


def _names(rank: int) -> tuple[str, ...]:
    return tuple(f"d{i}" for i in range(rank))


def _sizes(dims: Dims, shape: tuple[int, ...]) -> dict[str, int]:
    return {d: n for d, n in zip(dims, shape, strict=True) if d is not None and n > 1}


def _broadcast(shape: tuple[int, ...], out: tuple[int, ...], names: Dims) -> Dims:
    """Right-aligned; a dimension of 1 that is stretched stays whole."""
    skip = len(out) - len(shape)
    return tuple(names[skip + i] if n == out[skip + i] else None for i, n in enumerate(shape))


# --- products ----------------------------------------------------------------------------------------------------


@_rule("linear")
def _linear(call: Call) -> Factors:
    x, weight = call.shapes[0], call.shapes[1]
    lead = _names(len(x) - 1)
    inputs: tuple[Dims, ...] = ((*lead, "k"), ("n", "k"), ("n",))[: len(call.shapes)]
    sizes = {**_sizes(lead, x[:-1]), "n": weight[0], "k": weight[1]}
    return Factors(inputs, (*lead, "n"), sizes, frozenset("k"), replicated_grad=frozenset({("k", 2)}))


@_rule("mm", "bmm", "matmul")
def _matmul(call: Call) -> Factors | None:
    a, b = call.shapes
    if len(a) < 2 or len(b) < 2:
        return None
    lead = call.out[:-2]
    names = _names(len(lead))
    left = (*_broadcast(a[:-2], lead, names), "m", "k")
    right = (*_broadcast(b[:-2], lead, names), "k", "n")
    sizes = {**_sizes(names, lead), "m": a[-2], "n": b[-1], "k": a[-1]}
    return Factors((left, right), (*names, "m", "n"), sizes, frozenset("k"))


@_rule("addmm")
def _addmm(call: Call) -> Factors | None:
    bias, a, b = call.shapes
    if len(bias) != 1 or call.fx.kwargs:
        return None
    sizes = {"m": a[0], "n": b[1], "k": a[1]}
    return Factors(
        (("n",), ("m", "k"), ("k", "n")), ("m", "n"), sizes, frozenset("k"), replicated_grad=frozenset({("k", 0)})
    )


@_rule("embedding")
def _embedding(call: Call) -> Factors:
    weight, index = call.shapes
    lead = _names(len(index))
    sizes = {**_sizes(lead, index), "v": weight[0], "e": weight[1]}
    return Factors((("v", "e"), lead), (*lead, "e"), sizes, frozenset("v"))


@_rule("convolution", "conv2d", "conv1d", "conv3d")
def _convolution(call: Call) -> Factors | None:
    name = base_name(call.node.op)
    groups = call.arg(8, "groups", 1) if name == "convolution" else call.arg(6, "groups", 1)
    transposed = name == "convolution" and call.arg(6, "transposed", False)
    if groups != 1 or transposed or len(call.shapes[0]) != len(call.shapes[1]):
        return None
    x, weight = call.shapes[:2]
    space: Dims = (None,) * (len(x) - 2)
    inputs: tuple[Dims, ...] = (("b", "k", *space), ("n", "k", *space), ("n",))[: len(call.shapes)]
    sizes = {"b": x[0], "n": weight[0], "k": weight[1]}
    return Factors(inputs, ("b", "n", *space), sizes, frozenset("k"), replicated_grad=frozenset({("k", 2)}))


@_rule("scaled_dot_product_attention")
def _attention(call: Call) -> Factors | None:
    query, key = call.shapes[0], call.shapes[1]
    if len(query) != 4:
        return None
    causal, dropout = call.arg(5, "is_causal", False), call.arg(4, "dropout_p", 0.0)
    rows = None if causal or dropout else "q"  # a shard of queries would need to know its offset in the causal mask
    inputs: list[Dims] = [("b", "h", rows, None), ("b", "h", None, None), ("b", "h", None, None)]
    if len(call.shapes) > 3:
        full = (query[0], query[1], query[2], key[2])
        inputs.append(_broadcast(call.shapes[3], full, ("b", "h", rows, None)))
    sizes = {"b": query[0], "h": key[1]}  # with grouped queries a shard holds whole groups
    if rows:
        sizes["q"] = query[2]
    return Factors(tuple(inputs), ("b", "h", rows, None), sizes)


# --- normalisation, softmax, losses ---------------------------------------------------------------------------------


@_rule("layer_norm", "rms_norm")
def _norm(call: Call) -> Factors:
    x = call.shapes[0]
    kept = len(x) - len(call.arg(1, "normalized_shape"))
    dims: Dims = (*_names(kept), *(None,) * (len(x) - kept))
    rest: list[Dims] = [(None,) * len(shape) for shape in call.shapes[1:]]
    return Factors((dims, *rest), dims, _sizes(dims, x))


@_rule("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "sort", "topk", "argsort")
def _along_one(call: Call) -> Factors:
    position = {"topk": 2, "sort": 1, "argsort": 1}.get(base_name(call.node.op), 1)
    dim = call.arg(position, "dim", -1)
    dim = dim if isinstance(dim, int) and not isinstance(dim, bool) else -1
    rank = len(call.shapes[0])
    dims = tuple(None if i == dim % rank else f"d{i}" for i in range(rank))
    return Factors((dims,), dims, _sizes(dims, call.shapes[0]))


@_rule("cross_entropy_loss")
def _cross_entropy(call: Call) -> Factors | None:
    """Rows: each device sums its rows over the global count. Vocabulary: three all-reduces of one number per row."""
    plain = (
        call.arg(2, "weight") is None and call.arg(3, "reduction", 1) == 1 and not call.arg(5, "label_smoothing", 0.0)
    )
    if not plain or len(call.shapes) != 2 or len(call.shapes[0]) != 2:
        return None
    rows, vocabulary = call.shapes[0]
    reductions = tuple(Internal("all_reduce", (rows,), 4, "forward") for _ in range(3))
    return Factors(
        (("t", "v"), ("t",)),
        (),
        {"t": rows, "v": vocabulary},
        frozenset("t"),
        internal={"v": reductions, "t": (Internal("all_reduce", (1,), 4, "forward"),)},
        whole_output=frozenset("v"),
    )


@_rule("mse_loss", "l1_loss", "smooth_l1_loss")
def _mean_loss(call: Call) -> Factors | None:
    """The mean over equal shards is the mean of their means: a partial sum once each is divided by the axis size."""
    if call.arg(2, "reduction", 1) not in (1, 2) or call.shapes[0] != call.shapes[1]:
        return None
    dims = _names(len(call.shapes[0]))
    return Factors((dims, dims), (), _sizes(dims, call.shapes[0]), frozenset(dims))


@_rule("sum", "mean")
def _reduction(call: Call) -> Factors:
    x = call.shapes[0]
    reduced = call.arg(1, "dim", None)
    reduced = list(range(len(x))) if not isinstance(reduced, list | tuple | int) or reduced == [] else reduced
    gone = {d % len(x) for d in ([reduced] if isinstance(reduced, int) else reduced)} if x else set()
    dims = _names(len(x))
    keep = bool(call.arg(2, "keepdim", False))
    out: Dims = tuple((None if i in gone else d) for i, d in enumerate(dims) if keep or i not in gone)
    sums = frozenset(dims[i] for i in gone)
    return Factors((dims,), out, _sizes(dims, x), sums)


@_rule("batch_norm", "_native_batch_norm_legit")
def _batch_norm(call: Call) -> Factors:
    """Channels are independent; the batch is not (its statistics are shared)."""
    x = call.shapes[0]
    dims: Dims = tuple("c" if i == 1 else None for i in range(len(x)))
    rest: list[Dims] = [("c",) if len(s) == 1 else (None,) * len(s) for s in call.shapes[1:]]
    return Factors((dims, *rest), dims, {"c": x[1]})


@_rule("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "upsample_nearest2d", "upsample_bilinear2d")
def _pool(call: Call) -> Factors:
    space: Dims = (None,) * (len(call.out) - 2)
    return Factors((("b", "c", *space),), ("b", "c", *space), {"b": call.out[0], "c": call.out[1]})


# --- views and moves -----------------------------------------------------------------------------------------------


@_rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze")
def _view(call: Call) -> Factors:
    inputs, output, sizes = view_factors(call.shapes[0], call.out)
    return Factors((inputs,), output, sizes, linear=True)


@_rule("transpose", "t", "permute", "mT", "adjoint", "numpy_T")
def _permute(call: Call) -> Factors:
    rank = len(call.shapes[0])
    order = list(range(rank))
    name = base_name(call.node.op)
    if name == "permute":
        order = [d % rank for d in call.arg(1, "dims")]
    elif rank >= 2:
        a, b = (call.arg(1, "dim0"), call.arg(2, "dim1")) if name == "transpose" else (-2, -1)
        order[a % rank], order[b % rank] = b % rank, a % rank
    dims = _names(rank)
    return Factors((dims,), tuple(dims[d] for d in order), _sizes(dims, call.shapes[0]), linear=True)


@_rule("expand", "broadcast_to")
def _expand(call: Call) -> Factors:
    out = _names(len(call.out))
    return Factors((_broadcast(call.shapes[0], call.out, out),), out, _sizes(out, call.out), linear=False)


@_rule("slice", "narrow", "split", "chunk", "split_with_sizes", "roll", "flip")
def _along_dim(call: Call) -> Factors | None:
    """Works along one dimension, which stays whole."""
    name = base_name(call.node.op)
    if name in ("roll", "flip"):
        return None
    dim = call.arg(1, "dim", 0) if name in ("slice", "narrow") else call.arg(2, "dim", 0)
    rank = len(call.shapes[0])
    whole = call.out == call.shapes[0]
    dims = tuple(f"d{i}" if i != dim % rank or whole else None for i in range(rank))
    return Factors((dims,), dims, _sizes(dims, call.shapes[0]), linear=True)


@_rule("select", "unbind")
def _drop_dim(call: Call) -> Factors:
    dim = call.arg(1, "dim", 0) % len(call.shapes[0])
    dims = tuple(f"d{i}" if i != dim else None for i in range(len(call.shapes[0])))
    return Factors((dims,), tuple(d for d in dims if d), _sizes(dims, call.shapes[0]), linear=True)


@_rule("getitem")
def _getitem(call: Call) -> Factors:
    dims = _names(len(call.out))
    return Factors((dims,), dims, _sizes(dims, call.out), linear=True)


@_rule("broadcast_tensors")
def _broadcast_tensors(call: Call) -> Factors | None:
    """Of tensors that have one shape already, as in front of a loss."""
    dims = _names(len(call.out))
    if any(shape != call.out for shape in call.shapes):
        return None
    return Factors((dims,) * len(call.shapes), dims, _sizes(dims, call.out))


@_rule("cat", "stack")
def _join(call: Call) -> Factors:
    stacked = base_name(call.node.op) == "stack"
    dim = call.arg(1, "dim", 0) % len(call.out)
    out = tuple(f"d{i}" if i != dim else None for i in range(len(call.out)))
    operand = tuple(d for i, d in enumerate(out) if not (stacked and i == dim))
    return Factors((operand,) * len(call.shapes), out, _sizes(out, call.out), linear=True)


@lru_cache(maxsize=1)
def ruled_operators() -> tuple[str, ...]:
    """Names of the operators with a rule, sorted; for the documentation."""
    return tuple(sorted(_RULES))
