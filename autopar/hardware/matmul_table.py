"""MatmulTable: measured efficiencies of matrix products, attention and grouped products, as published.

The CSV has columns ``device, op, shape, peak_tflops, efficiency``; ``op`` is ``matmul``, ``group_matmul``, ``sdp_fwd``
or ``sdp_bwd``, ``shape`` is ``key=value`` pairs, and efficiency is FLOPs over time over peak. Attention counts the
FLOPs of the whole score matrix though the kernel is causal.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path

from autopar.errors import ProfileError
from autopar.hardware.efficiency import AttentionShape, MatmulShape


@dataclass(frozen=True)
class ProductRow:
    """One measured product: its shape, whether it adds into an fp32 result, seconds."""

    shape: MatmulShape
    out_bytes: int
    accumulate: bool
    seconds: float


@dataclass(frozen=True)
class AttentionRow:
    """One measured fused attention."""

    shape: AttentionShape
    kv_heads: int
    direction: str
    seconds: float


@dataclass(frozen=True)
class MatmulTable:
    """All rows of one device."""

    products: tuple[ProductRow, ...] = ()
    attention: tuple[AttentionRow, ...] = ()
    _by_shape: dict[MatmulShape, list[ProductRow]] = field(default_factory=dict, compare=False, repr=False)
    _attention: dict[tuple[AttentionShape, str], list[AttentionRow]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        for row in self.products:
            self._by_shape.setdefault(row.shape, []).append(row)
        for attention in self.attention:
            self._attention.setdefault((attention.shape, attention.direction), []).append(attention)

    def exact(self, shape: MatmulShape) -> list[ProductRow]:
        """Rows of just this shape and layout."""
        return self._by_shape.get(shape, [])

    def exact_attention(self, shape: AttentionShape, direction: str) -> list[AttentionRow]:
        """Rows of just this attention, whatever its number of key-value heads."""
        return self._attention.get((shape, direction), [])

    @staticmethod
    def load(path: Path) -> MatmulTable:
        """Reads the CSV.

        Raises:
            ProfileError: the file is missing, or a row is malformed; the line is named.
        """
        try:
            with path.open(newline="") as file:
                rows = list(csv.DictReader(file))
        except OSError as error:
            raise ProfileError(f"operator table {str(path)!r} cannot be read: {error.strerror}") from None
        products: list[ProductRow] = []
        attention: list[AttentionRow] = []
        for line, row in enumerate(rows, start=2):
            try:
                _add(row, products, attention)
            except (KeyError, ValueError, ZeroDivisionError) as error:
                raise ProfileError(f"operator table {str(path)!r}, line {line}: {error!r}") from None
        return MatmulTable(tuple(products), tuple(attention))


def _add(row: dict[str, str], products: list[ProductRow], attention: list[AttentionRow]) -> None:
    shape = dict(pair.split("=") for pair in row["shape"].split(", "))
    rate = float(row["peak_tflops"]) * 1e12 * float(row["efficiency"])
    if row["op"] == "matmul":
        product = MatmulShape(
            int(shape["m"]), int(shape["n"]), int(shape["k"]), batch=int(shape["b"]), layout=shape["layout"]
        )
        accumulate = shape["accumulate"] == "True"
        out_bytes = 4 if shape["out_dtype"] == "fp32" else 2
        products.append(ProductRow(product, out_bytes, accumulate, product.flops / rate))
    elif row["op"] == "group_matmul":
        m, n, k = int(shape["M"]), int(shape["N"]), int(shape["K"])
        stage = shape["stage"]
        if stage == "fwd":
            dims, layout = (m, n, k), "TN"
        elif stage == "bwd_grad_act":
            dims, layout = (m, k, n), "NN"
        else:
            dims, layout = (n, k, m), "NT"
        product = MatmulShape(*dims, batch=int(shape["ng"]), layout=layout, grouped=True)
        accumulate = shape["accumulate"] == "True"
        out_bytes = 4 if accumulate and shape["main_grad_dtype"] == "fp32" else 2
        products.append(ProductRow(product, out_bytes, accumulate, product.flops / rate))
    else:
        heads, length = int(shape["head_num"]), int(shape["seq_len"])
        qk, v = int(shape["qk_head_dim"]), int(shape["v_head_dim"])
        what = AttentionShape(int(shape["batch"]), heads, length, length, qk, v)
        direction = "forward" if row["op"] == "sdp_fwd" else "backward"
        whole = 2.0 * what.batch * heads * length * length * (qk + v) * (1.0 if direction == "forward" else 2.5)
        attention.append(AttentionRow(what, int(shape["kv_head_num"]), direction, whole / rate))
