"""ComputeModel: how long one operator takes on one device, forward or backward.

In order of trust: the measured time of that operator at that local shape; the roofline corrected by the measured over
predicted ratio of its nearest measured neighbours (in the logarithm of the shape); the roofline itself,
``max(flops / (peak x efficiency(shape)), bytes / (bandwidth x efficiency(class))) + launch`` (Williams et al. 2009).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from autopar.cost.operators import Work, narrow, work_of
from autopar.hardware.device import Device
from autopar.hardware.efficiency import AttentionShape, MatmulShape
from autopar.hardware.profiles import MeasuredOperator
from autopar.model.graph import TensorMeta

NEIGHBOURS = 4
ITEMSIZE = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


class ComputeModel:
    """Operator times on one device.

    Args:
        device: with or without a measured profile.
        kernels: library whose attention kernel runs: PyTorch's own, or one that the device file names
            (``flash_attention_1``, ``transformer_engine``).
        gradient_bytes: bytes per element that gradients of weights are added up in by the product that makes them
            (4 where it adds into fp32 gradients of 16-bit weights); unset, as the operands.
    """

    def __init__(self, device: Device, kernels: str = "pytorch", gradient_bytes: int | None = None) -> None:
        self.device, self.gradient_bytes = device, gradient_bytes
        self.attention = device.attention_of(kernels)
        self._cache: dict[object, float] = {}

    def operator_time(
        self,
        op: str,
        inputs: Sequence[TensorMeta],
        outputs: Sequence[TensorMeta],
        flops: float,
        direction: str = "forward",
        precision: str = "fp32",
        attributes: str = "",
    ) -> float:
        """Seconds of one operator.

        Args:
            op: the ATen overload (``aten.linear.default``).
            inputs: local metas of its tensor operands.
            outputs: local metas of its results.
            flops: local FLOPs of this direction, as torch.utils.flop_counter counts.
            direction: ``forward`` or ``backward``.
            precision: that the plan computes in; floating tensors wider than it are taken to be narrowed.
            attributes: as ``autopar.cost.operators.attributes_of(fx_node)`` gives; tells whether attention is causal.
        """
        key = (op, tuple(inputs), tuple(outputs), flops, direction, precision, "is_causal=True" in attributes)
        if key not in self._cache:
            dispatch = self.device.dispatch_s[0 if direction == "forward" else 1]
            ins = [narrow(m, precision) for m in inputs]
            outs = [narrow(m, precision) for m in outputs]
            measured = _times(self.device.measured.exact(op, ins, outs), direction)
            if measured:
                self._cache[key] = fmean(measured) + dispatch
            else:
                roofline = self.work_time(work_of(op, ins, outs, flops, direction, attributes), precision)
                ratio = self._neighbour_ratio(op, ins, outs, direction, precision)
                self._cache[key] = roofline * ratio + dispatch
        return self._cache[key]

    def work_time(self, work: Work, precision: str) -> float:
        """Seconds of what an operator does, by the roofline: its products, its attention, its memory traffic."""
        if work.is_free:
            return self.device.host_overhead_s if self.device.kind == "cpu" else 0.0
        time = sum(self.product_time(product, precision) for product in work.products)
        if precision == "fp8":
            time += sum(self.memory_time(nbytes) for nbytes in _casts(work))
        if work.attention is not None:
            time += self.attention_time(work.attention, work.attention_bytes, precision, work.direction)
        return time + sum(self.memory_time(nbytes, kind) for kind, nbytes in work.traffic)

    def product_time(self, shape: MatmulShape, precision: str) -> float:
        """Seconds of one matrix product: as published for just this shape, else by the efficiency surface."""
        out_bytes, slow = self._result_bytes(shape, precision), self.device.in_step_slowdown
        if self.device.products and ITEMSIZE[precision] == 2:
            rows = self.device.products.exact(shape)
            same = [row for row in rows if row.out_bytes == out_bytes] or rows
            if same:
                return slow * fmean(row.seconds for row in same) + self.device.launch_overhead_s
        added = shape.layout == "NT" and self.gradient_bytes is not None
        return slow * self.surface_time(shape, precision, out_bytes * (2 if added else 1))

    def _result_bytes(self, shape: MatmulShape, precision: str) -> int:
        if shape.layout == "NT" and self.gradient_bytes is not None:
            return self.gradient_bytes
        return max(ITEMSIZE[precision], 2)

    def surface_time(self, shape: MatmulShape, precision: str, result_traffic: int) -> float:
        """Seconds of one matrix product by the efficiency surface alone.

        Args:
            shape: local m, n, k.
            precision: of the operands.
            result_traffic: bytes written (and read, if added into) per element of the result.
        """
        arithmetic = self.device.matmul.time(shape, self.device.peak(precision), self.device.compute_units)
        elements = shape.batch * (shape.m * shape.k + shape.k * shape.n)
        traffic = elements * ITEMSIZE[precision] + shape.batch * shape.m * shape.n * result_traffic
        return max(arithmetic, traffic / self.device.bandwidth("product")) + self.device.launch_overhead_s

    def attention_time(self, shape: AttentionShape, nbytes: float, precision: str, direction: str) -> float:
        """Seconds of one fused attention, forward or backward; its products stay in bf16 where others are fp8."""
        slow = self.device.in_step_slowdown
        measured = self.device.products.exact_attention(shape, direction) if self.device.products else []
        if measured and ITEMSIZE[precision] <= 2:
            return slow * fmean(row.seconds for row in measured) + self.device.launch_overhead_s
        peak = self.device.peak("bf16" if precision == "fp8" else precision)
        arithmetic = self.attention.time(shape, peak, self.device.compute_units, direction)
        return slow * max(arithmetic, nbytes / self.device.bandwidth("copy")) + self.device.launch_overhead_s

    def memory_time(self, nbytes: float, kind: str = "pointwise") -> float:
        """Seconds of one memory-bound kernel that moves ``nbytes`` (reads and writes)."""
        return nbytes / self.device.bandwidth(kind) + self.device.launch_overhead_s

    def _neighbour_ratio(
        self,
        op: str,
        inputs: Sequence[TensorMeta],
        outputs: Sequence[TensorMeta],
        direction: str,
        precision: str,
    ) -> float:
        """Measured over predicted time at the nearest measured shapes of this operator; 1 if there are none."""
        near: list[tuple[float, MeasuredOperator]] = []
        for entry in self.device.measured.of_operator(op):
            distance = _distance(entry, inputs, outputs)
            if distance < math.inf and _times([entry], direction):
                near.append((distance, entry))
        near.sort(key=lambda pair: pair[0])
        total = weighted = 0.0
        for distance, entry in near[:NEIGHBOURS]:
            flops = entry.forward_flops if direction == "forward" else entry.backward_flops
            work = work_of(op, entry.inputs, entry.outputs, flops, direction, entry.attributes)
            predicted = self.work_time(work, precision)
            weight = 1 / (1e-3 + distance**2)
            weighted += weight * math.log(max(_times([entry], direction)[0], 1e-9) / max(predicted, 1e-9))
            total += weight
        return math.exp(weighted / total) if total else 1.0


def _casts(work: Work) -> list[float]:
    """Bytes moved to make fp8 operands of the products: each is read in bf16 and written straight and transposed.

    Forward casts operand and weight, backward the output's gradient; the other operands are kept from forward.
    """
    if work.direction == "forward":
        return [4.0 * p.batch * (p.m * p.k + p.k * p.n) for p in work.products]
    return [4.0 * p.batch * p.m * p.k for p in work.products if p.layout == "NN"]


def _times(entries: Sequence[MeasuredOperator], direction: str) -> list[float]:
    if direction == "forward":
        return [e.forward_s for e in entries]
    return [e.backward_s for e in entries if e.backward_s is not None]


def _distance(entry: MeasuredOperator, inputs: Sequence[TensorMeta], outputs: Sequence[TensorMeta]) -> float:
    """Distance of two shapes in the logarithm of their dimensions; infinite if ranks or dtypes differ."""
    mine, theirs = [*inputs, *outputs], [*entry.inputs, *entry.outputs]
    if [(len(m.shape), m.dtype) for m in mine] != [(len(m.shape), m.dtype) for m in theirs]:
        return math.inf
    square = 0.0
    for a, b in zip(mine, theirs, strict=True):
        for x, y in zip(a.shape, b.shape, strict=True):
            square += math.log(max(x, 1) / max(y, 1)) ** 2
    return math.sqrt(square)
