"""A captured graph against the eager model and against what torch counts itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from autopar.model.capture import capture
from autopar.model.graph import OpGraph
from autopar.model.spec import Batch, TrainingJob
from autopar.model.summary import saved_bytes


def check_parameters(job: TrainingJob, graph: OpGraph) -> None:
    """Names, shapes, dtypes and tying equal the state_dict's."""
    model = job.build_model()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    also = {name for names in graph.tied.values() for name in names}
    unique = {k: (tuple(v.shape), v.dtype) for k, v in parameters.items() if k not in also}
    used = {n.op: (n.meta.shape, n.meta.dtype) for n in graph.of_kind("parameter")}
    assert used == {k: v for k, v in unique.items() if k in used}
    assert all(parameters[k] is parameters[other] for k, names in graph.tied.items() for other in names)
    unused = [k for k in unique if k not in used]
    assert not [k for k in unused if parameters[k].requires_grad and _has_grad(job, k)]


def _has_grad(job: TrainingJob, name: str) -> bool:
    module = job.loss_module()
    module(**job.flatten_batch(job.example_batch(2))).backward()
    return dict(module.model.named_parameters())[name].grad is not None


def check_flops(job: TrainingJob, graph: OpGraph) -> None:
    """Forward and backward FLOPs equal torch.utils.flop_counter's."""
    module = job.loss_module()
    batch = job.flatten_batch(job.example_batch(graph.batch_size))
    # the counter knows neither the CPU's fused attention nor its fused recurrent layers
    with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):
        with FlopCounterMode(display=False) as forward:
            loss = module(**batch)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    assert (graph.forward_flops, graph.backward_flops) == (forward.get_total_flops(), backward.get_total_flops())


def kept_bytes(
    job: TrainingJob, batch_size: int, autocast: torch.dtype | None = None, graph: OpGraph | None = None
) -> int:
    """Bytes that autograd keeps in one real forward pass; unique storages, parameters, buffers and inputs apart.

    Without oneDNN, whose recurrent layers keep a workspace of a size of their own.

    Args:
        autocast: dtype of an autocast around the pass.
        graph: runs its operators instead of the module.
    """
    module = job.loss_module()
    batch = job.flatten_batch(job.example_batch(batch_size))
    constants = graph.constants.values() if graph else []
    held = [*module.parameters(), *module.buffers(), *batch.values(), *constants]
    apart = {t.untyped_storage().data_ptr() for t in held}
    kept: dict[int, torch.Tensor] = {}  # the tensors, so that no storage is freed and its address used again

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in apart:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    narrowed = torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None)
    with hooks, torch.backends.mkldnn.flags(enabled=False), narrowed:
        loss = module(**batch) if graph is None else run_graph(graph, module.model, batch)
    total = sum(t.untyped_storage().nbytes() for t in kept.values())
    del loss
    return total


def check_saved(job: TrainingJob, graph: OpGraph) -> None:
    """Saved activations equal, to the byte, what autograd keeps."""
    assert saved_bytes(graph, graph.blocks) == kept_bytes(job, graph.batch_size)


def check_saved_under_autocast(job: TrainingJob, batch_size: int, reads_dtypes: bool) -> None:
    """The same of the graph in bf16.

    Args:
        reads_dtypes: the model turns tensors into the dtype that others have (``y.to(x.dtype)``), which capture fixes:
            then what runs, the graph, is compared and not the module.
    """
    graph = capture(job, batch_size, precision="bf16")
    expected = kept_bytes(job, batch_size, torch.bfloat16, graph)
    assert saved_bytes(graph, graph.blocks) == expected
    assert reads_dtypes == (expected != kept_bytes(job, batch_size, torch.bfloat16))


def in_bf16(job: TrainingJob) -> TrainingJob:
    """The same model with parameters, buffers and inputs in bf16 where they float."""

    def narrow(value: Any) -> Any:
        return value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def example_batch(size: int) -> Batch:
        batch = job.example_batch(size)
        return {k: narrow(v) for k, v in batch.items()} if isinstance(batch, dict) else tuple(map(narrow, batch))

    return replace(job, build_model=lambda: job.build_model().to(torch.bfloat16), example_batch=example_batch)


def run_graph(graph: OpGraph, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Runs the captured operators on real weights."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values: dict[fx.Node, Any] = {}
    for node in graph.fx_graph.nodes:
        if node.op == "placeholder":
            values[node] = batch[str(node.target)]
        elif node.op == "get_attr":
            values[node] = tensors.get(str(node.target), graph.constants.get(str(node.target)))
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            values[node] = node.target(*args, **{k: "cpu" if k == "device" else v for k, v in kwargs.items()})
    return values[graph.fx_node(graph.loss)]


def check_gradients(job: TrainingJob, graph: OpGraph) -> None:
    """The graph computes the model's loss and gradients."""
    torch.manual_seed(0)
    module = job.loss_module()
    batch = job.flatten_batch(job.example_batch(graph.batch_size))
    torch.manual_seed(1)
    expected = module(**batch)
    expected.backward()
    want = {k: p.grad.clone() for k, p in module.model.named_parameters() if p.grad is not None}
    module.zero_grad()
    torch.manual_seed(1)
    got = run_graph(graph, module.model, batch)
    got.backward()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for name, parameter in module.model.named_parameters():
        grad, expected = parameter.grad, want.get(name)
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
