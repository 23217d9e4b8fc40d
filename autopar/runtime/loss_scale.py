"""Loss scaling for fp16: small gradients are kept from vanishing (Micikevicius et al. 2018, arXiv 1710.03740).

The scale and its rule are those of torch.amp.GradScaler. Whether a step overflowed is read off the global gradient
norm, which is the same on every process, so all skip a step together.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

SMALLEST = 2.0**-10  # below, no gradient fits and the model itself has diverged


@dataclass
class LossScale:
    """The factor on the loss.

    Attributes:
        value: multiplies the loss before the backward pass.
        good_steps: steps without overflow since it last changed.
        growth_interval: after so many good steps it doubles.
    """

    value: float = 65536.0
    good_steps: int = 0
    growth_interval: int = 2000

    def update(self, overflowed: bool) -> None:
        """After a step: halves on overflow, doubles after a long time without."""
        if overflowed:
            self.value, self.good_steps = self.value / 2, 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0

    @property
    def exhausted(self) -> bool:
        """No scale helps any more."""
        return self.value < SMALLEST

    def to_json(self) -> dict[str, float]:
        """As plain values; ``LossScale(**values)`` reads them."""
        return asdict(self)
