"""Step time of plans against hand-written PyTorch, on 2 processes: DDP, FSDP2, tensor parallel, pipelining.

Run: ``python -m tests.benchmarks.bench_runtime [--steps N]``. Both sides of a pair take turns in the same processes, so
that other load falls on both alike; at every step both must have the same loss. Autopar's side always measures the
gradient norm and the global loss; by hand, the norm is taken with DDP and FSDP2 only. Prints one row a pair: medians
and the median ratio of neighbouring steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from autopar.model.capture import capture
from autopar.model.spec import TrainingJob, load
from autopar.plan import Layout
from autopar.runtime.parallelize import parallelize
from autopar.zoo import gpt
from tests.distributed.plans import make_plan
from tests.processes import spawn

GPT = str(Path(gpt.__file__))
GLOBAL_BATCH, MICRO_BATCHES = 8, 4
Step = Callable[[], torch.Tensor | None]  # gives the loss of this process's share, where it has one


def data_parallel(job: TrainingJob) -> Step:
    return _whole(job, DistributedDataParallel(job.loss_module()))


def sharded(job: TrainingJob) -> Step:
    module = job.loss_module()
    for part in (*module.model.blocks, module):
        fully_shard(part)
    return _whole(job, module)


def _whole(job: TrainingJob, module: nn.Module) -> Step:
    optimizer = job.build_optimizer(module.parameters())
    rank, size = dist.get_rank(), GLOBAL_BATCH // dist.get_world_size()
    batch = {k: v[rank * size : (rank + 1) * size] for k, v in job.example_batch(GLOBAL_BATCH).items()}

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(**batch)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), float("inf"))
        optimizer.step()
        return loss.detach()

    return step


class _LocalHeads(gpt.Attention):
    """Attention on this process's heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        size = width // self.heads
        q, k, v = (p(x).view(batch, length, -1, size).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def tensor_parallel(job: TrainingJob) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = job.loss_module()
    columns = dict.fromkeys(("attn.q", "attn.k", "attn.v", "up"), ColwiseParallel())
    for block in module.model.blocks:
        block.attn.__class__ = _LocalHeads
        parallelize_module(block, mesh, {**columns, "attn.out": RowwiseParallel(), "down": RowwiseParallel()})
    optimizer, batch = job.build_optimizer(module.parameters()), job.example_batch(GLOBAL_BATCH)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(**batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class _Half(nn.Module):
    """Half of the model: the embeddings and two blocks, or two blocks and the head."""

    def __init__(self, model: nn.Module, first: bool) -> None:
        super().__init__()
        count = len(model.blocks) // 2
        self.first, self.blocks = first, nn.ModuleList(model.blocks[:count] if first else model.blocks[count:])
        if first:
            self.tokens, self.positions = model.tokens, model.positions
        else:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.first else self.head(self.norm(x))


def pipeline(job: TrainingJob) -> Step:
    rank = dist.get_rank()
    half = _Half(job.build_model(), rank == 0)
    optimizer, batch = job.build_optimizer(half.parameters()), job.example_batch(GLOBAL_BATCH)
    loss = lambda out, labels: job.compute_loss(out, {"labels": labels})  # noqa: E731
    schedule = Schedule1F1B(PipelineStage(half, rank, 2, torch.device("cpu")), MICRO_BATCHES, loss_fn=loss)

    def step() -> torch.Tensor | None:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(batch["input_ids"])
        else:
            schedule.step(target=batch["labels"], losses=losses)
        optimizer.step()
        return torch.stack(losses).mean().detach() if losses else None

    return step


def planned(job: TrainingJob, mesh: dict[str, int], compiled: str) -> Step:
    """autopar's side: the same cut, written as a plan."""
    count = MICRO_BATCHES if "pp" in mesh else 1
    shards = mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
    size = GLOBAL_BATCH // count // shards
    plan = make_plan(capture(job, size), mesh, size, count, compile=compiled)
    kept = {kind: layout if kind == "blocks" else Layout() for kind, layout in plan.layouts.items()}
    model, batch = parallelize(job, plan.model_copy(update={"layouts": kept})), job.example_batch(GLOBAL_BATCH)
    return lambda: model.step(batch)


PAIRS: dict[str, tuple[Callable[[TrainingJob], Step], dict[str, int]]] = {
    "DDP": (data_parallel, {"dp_replicate": 2}),
    "FSDP2": (sharded, {"dp_shard": 2}),
    "parallelize_module": (tensor_parallel, {"tp": 2}),
    "pipelining 1F1B": (pipeline, {"pp": 2}),
}


def _mean(loss: torch.Tensor | None) -> float:
    """Over the processes that have a loss; not timed."""
    every: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, None if loss is None else loss.item())
    return statistics.mean(one for one in every if one is not None)


def compare(width: int, steps: int, compiled: str) -> None:
    """Rows of one width; the first process prints."""
    build = lambda: gpt.GPT(gpt.VOCABULARY, width, gpt.HEADS, gpt.LAYERS, gpt.SEQUENCE)  # noqa: E731
    job = replace(load(GPT), build_model=build)
    for name, (by_hand, mesh) in PAIRS.items():
        torch.manual_seed(0)
        sides = (by_hand(job), planned(job, mesh, compiled))
        times: tuple[list[float], list[float]] = ([], [])
        losses: list[float] = []
        for i in range(steps + 3):
            for side, taken in zip(sides, times, strict=True):
                dist.barrier()
                begun = time.perf_counter()
                loss = side()
                if i >= 3:
                    taken.append(time.perf_counter() - begun)
                losses.append(_mean(loss))
            assert abs(losses[-2] / losses[-1] - 1) < 1e-3, f"{name}: the two sides train differently: {losses[-2:]}"
        ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
        if dist.get_rank() == 0:
            hand, ours = (1e3 * statistics.median(t) for t in times)
            print(f"width {width:4}  {name:20} by hand {hand:8.1f} ms  autopar {ours:8.1f} ms  ratio {ratio:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--compile", default="none", choices=["none", "aot_eager", "inductor"])
    options = parser.parse_args()
    for width in (128, 256):
        spawn(2, compare, width, options.steps, options.compile)


if __name__ == "__main__":
    main()
