"""Learning rates: what a step's rate is as a share of the optimizer's own, and how it follows the global batch.

The share is a pure function of the step, so a run goes on from a checkpoint with the rate that it would have had.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import LambdaLR

from autopar.errors import InputError

SHAPES = ("constant", "linear", "cosine", "wsd")
SCALINGS = ("linear", "sqrt")


@dataclass(frozen=True)
class LearningRate:
    """How the learning rates of all parameter groups move over a run.

    Attributes:
        shape: after the warm-up: ``constant``; ``linear`` or ``cosine`` (Loshchilov and Hutter 2017, arXiv 1608.03983)
            down to ``floor`` at the last step; ``wsd``, warm-up, stable, then linear decay (Hu et al. 2024, MiniCPM,
            arXiv 2404.06395, section 4).
        warmup_steps: steps of linear rise; step ``k`` of them (from 1) has the share ``k / warmup_steps``.
        decay_steps: steps of the last phase of ``wsd``; by default a tenth of the run.
        floor: share of the rate at the last step.
        scaling: the rate grows with the global batch: ``linear`` (Goyal et al. 2017, arXiv 1706.02677) or ``sqrt``
            (Krizhevsky 2014, arXiv 1404.5997); None leaves it.
        reference_batch: global batch that the optimizer's own rate was chosen for; needed with ``scaling``.
    """

    shape: str = "constant"
    warmup_steps: int = 0
    decay_steps: int | None = None
    floor: float = 0.0
    scaling: str | None = None
    reference_batch: int | None = None

    def __post_init__(self) -> None:
        for name, value, known in (("schedule", self.shape, SHAPES), ("scaling", self.scaling, (*SCALINGS, None))):
            if value not in known:
                raise InputError(
                    f"learning-rate {name} {value!r} is unknown", f"Use one of {', '.join(k for k in known if k)}"
                )
        if self.warmup_steps < 0 or (self.decay_steps is not None and self.decay_steps < 1):
            raise InputError(
                f"warm-up of {self.warmup_steps} and decay of {self.decay_steps} steps", "Give 0 or more, 1 or more"
            )
        if not 0 <= self.floor <= 1:
            raise InputError(f"the learning-rate floor is {self.floor}", "Give a share between 0 and 1")
        if (self.scaling is None) != (self.reference_batch is None) or (self.reference_batch or 1) < 1:
            raise InputError(
                f"learning-rate scaling {self.scaling!r} with reference batch {self.reference_batch}",
                "Give both, or neither",
            )

    def share(self, step: int, steps: int) -> float:
        """The rate of a step (from 0) of a run of ``steps``, as a share of the rate without any schedule."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return 1.0
        last = max(steps - 1, 1)
        begin = self.warmup_steps
        if self.shape == "wsd":
            begin = max(begin, last - (self.decay_steps or max(1, steps // 10)))
        done = min(max((step - begin) / max(last - begin, 1), 0.0), 1.0)
        left = (1 + math.cos(math.pi * done)) / 2 if self.shape == "cosine" else 1 - done
        return self.floor + (1 - self.floor) * left

    def batch_factor(self, global_batch: int) -> float:
        """What the rule of ``scaling`` multiplies the optimizer's own rate with."""
        if self.reference_batch is None:
            return 1.0
        ratio = global_batch / self.reference_batch
        return ratio if self.scaling == "linear" else math.sqrt(ratio)

    def scheduler(self, optimizer: torch.optim.Optimizer, begin: int, steps: int, global_batch: int) -> LambdaLR:
        """Sets the rates of step ``begin``; each ``step()`` of the result sets those of the next.

        Groups keep their ratios to one another.
        """
        factor = self.batch_factor(global_batch)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        return LambdaLR(optimizer, lambda step: factor * self.share(step, steps), last_epoch=begin - 1)
