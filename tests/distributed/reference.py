"""What one process computes: losses, gradient norms and final parameters to compare with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopar.model.spec import Batch, TrainingJob


@dataclass
class Reference:
    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]


def single_process(job: TrainingJob, batches: list[Batch], seed: int = 0, clip: float | None = None) -> Reference:
    """Trains plainly, one batch after the other."""
    torch.manual_seed(seed)
    module = job.loss_module()
    optimizer = job.build_optimizer([p for p in module.parameters() if p.requires_grad])
    losses, norms = [], []
    for batch in batches:
        optimizer.zero_grad()
        loss = module(**job.flatten_batch(batch))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), clip if clip is not None else float("inf"))
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return Reference(losses, norms, {k: v.detach().clone() for k, v in module.model.state_dict().items()})
