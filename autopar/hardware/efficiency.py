"""Efficiency surfaces: how much of its peak a device reaches on matrix products and attention, by shape.

Few parameters per device, each with a physical meaning, so that a fit on some shapes carries over to others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class MatmulShape:
    """A matrix product ``C[m, n] = A[m, k] B[k, n]``, ``batch`` times.

    Attributes:
        layout: which operand is stored transposed: ``TN`` (forward of a linear layer, ``x W^T``), ``NN`` (gradient of
            its input), ``NT`` (gradient of its weight).
        grouped: a grouped product (experts): ``batch`` unlike products of about this shape, issued together.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    layout: str = "TN"
    grouped: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class MatmulSurface:
    """Time of matrix products on a device of ``units`` equal compute units.

    The output is cut into tiles, a unit works on one tile at a time, and the tiles are worked off in waves: the last
    wave costs as much as a full one (tile and wave quantisation; NVIDIA, "Matrix Multiplication Background User's
    Guide", sections 3 and 4). A tile takes ``2 mt nt (k + k_overhead) / rate``: the pipeline fills and the result is
    written while no product is made. Small tiles reuse operands less: ``1 + tile_intensity (1/mt + 1/nt)``.
    The library is taken to choose the best tile. On top lies the rate at which the device can keep up tensor-core work
    within its power limit, ``rate_cap``; a product that is held up by its tiles does not notice it.

    Attributes:
        peak_fraction: of the peak rate, at large m, n and k.
        k_overhead: fill and drain of a tile, in steps of k.
        tile_intensity: see above, in elements.
        wave_smoothing: 0 quantised waves, 1 no quantisation (persistent and stream-k kernels lie between).
        tiles: (mt, nt) pairs that the library has.
        layout_time: factor on the time by layout (1 where unnamed).
        fixed_s: time of the kernel beside its tiles.
        rate_cap: greatest sustained fraction of the peak rate; see :func:`power_limited_fraction`.
        grouped_fixed_s: time per group of a grouped product beside its tiles.
    """

    peak_fraction: float
    k_overhead: float = 0.0
    tile_intensity: float = 0.0
    wave_smoothing: float = 1.0
    tiles: tuple[tuple[int, int], ...] = ((1, 1),)
    layout_time: dict[str, float] = field(default_factory=dict)
    fixed_s: float = 0.0
    rate_cap: float = 1.0
    grouped_fixed_s: float = 0.0

    def time(self, shape: MatmulShape, peak_flops: float, units: int) -> float:
        """Seconds that the arithmetic takes at a peak of ``peak_flops`` FLOP/s, memory traffic aside."""
        if shape.flops == 0:
            return self.fixed_s
        rate = peak_flops * self.peak_fraction / units
        best = math.inf
        for mt, nt in self.tiles:
            tiles = shape.batch * math.ceil(shape.m / mt) * math.ceil(shape.n / nt)
            waves = tiles / units
            quantised = math.ceil(waves)
            effective = self.wave_smoothing * max(waves, 1 / units) + (1 - self.wave_smoothing) * quantised
            tile_s = 2.0 * mt * nt * (shape.k + self.k_overhead) / rate
            best = min(best, effective * tile_s * (1 + self.tile_intensity * (1 / mt + 1 / nt)))
        best = max(best, shape.flops / (peak_flops * self.rate_cap)) * self.layout_time.get(shape.layout, 1.0)
        return best + self.fixed_s + (self.grouped_fixed_s * shape.batch if shape.grouped else 0.0)


def power_limited_fraction(limit_w: float, static_w: float, reference_w: float, reference_fraction: float) -> float:
    """Fraction of the peak rate that a power limit lets a device sustain.

    Dynamic power is ``activity x frequency x voltage**2``; voltage falls with frequency, so that the rate goes with the
    cube root of the power beside the static part.

    Args:
        limit_w: the board's power limit.
        static_w: drawn whatever the rate (leakage, memory, fans).
        reference_w, reference_fraction: a limit at which a device of this kind was seen to sustain that fraction.
    """
    scale: float = ((limit_w - static_w) / (reference_w - static_w)) ** (1 / 3)
    return min(1.0, reference_fraction * scale)


@dataclass(frozen=True)
class AttentionShape:
    """Fused attention: ``q[batch, heads, queries, qk_dim]`` against ``keys`` keys and values of ``v_dim``."""

    batch: int
    heads: int
    queries: int
    keys: int
    qk_dim: int
    v_dim: int
    causal: bool = True

    @property
    def forward_flops(self) -> float:
        """Of the two products, masked halves not counted (Dao 2023, arXiv 2307.08691, section 4.1)."""
        full = 2.0 * self.batch * self.heads * self.queries * self.keys * (self.qk_dim + self.v_dim)
        return full * self.visible

    @property
    def visible(self) -> float:
        """Fraction of the score matrix that is computed."""
        if not self.causal:
            return 1.0
        q, k = self.queries, self.keys
        return (k - (q - 1) / 2) / k if q <= k else 0.5


@dataclass(frozen=True)
class AttentionSurface:
    """Time of fused attention on a device of ``units`` equal compute units.

    One unit works on one tile of queries of one head; its rate grows with the number of keys that a tile walks over,
    ``keys / (keys + half_length)``. Causal tiles differ in length, so the last wave is not quantised, but a kernel
    with fewer tiles than units leaves units idle.

    Attributes:
        forward_fraction, backward_fraction: of the peak rate on long sequences; the backward pass makes five products
            where the forward makes two.
        half_length: keys at which half the rate is reached.
        query_tile: queries of one tile.
        fixed_s: time of the kernel beside its tiles.
    """

    forward_fraction: float
    backward_fraction: float
    half_length: float = 0.0
    query_tile: int = 128
    fixed_s: float = 0.0

    def time(self, shape: AttentionShape, peak_flops: float, units: int, direction: str) -> float:
        """Seconds of the arithmetic of the forward or backward pass."""
        tiles = shape.batch * shape.heads * math.ceil(shape.queries / self.query_tile)
        occupancy = min(1.0, tiles / units)
        walked = shape.keys * shape.visible
        depth = walked / (walked + self.half_length) if walked else 1.0
        fraction = self.forward_fraction if direction == "forward" else self.backward_fraction
        flops = shape.forward_flops * (1.0 if direction == "forward" else 2.5)
        return flops / (peak_flops * fraction * occupancy * depth) + self.fixed_s
