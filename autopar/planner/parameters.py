"""What parameters cost once a step, per byte: the linear part of what the engine charges whole stages.

The engine sums gradients in buckets and steps the optimizer stage by stage; a program over single parameters needs a
price per byte instead. Fixed costs (latencies) do not depend on placements and are left out, so that sums of these
prices stay below what the engine says of a whole plan.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.cost.engine import Engine
from autopar.cost.estimate import ADAMW_TRAFFIC
from autopar.cost.memory import FP32, OPTIMIZER_STATES
from autopar.plan import Mesh


class StepCosts:
    """Prices of one mesh.

    Args:
        scale_bytes: size of gradients around which prices are taken, about that of one stage.
    """

    def __init__(self, engine: Engine, mesh: Mesh, micro_batches: int, scale_bytes: int) -> None:
        self.engine, self.mesh, self.micro_batches = engine, mesh, micro_batches
        self.scale = max(1024.0, float(scale_bytes))
        self.divided = mesh.dp_shard if mesh.dp_shard > 1 else 1
        self.micro_s_per_byte = self._gather() + self._accumulate()
        self.once_s_per_byte = self._optimizer() + self._reduce()
        self.seconds_per_byte = self.once_s_per_byte + micro_batches * self.micro_s_per_byte

    def reduction(self, axis: str) -> float:
        """Seconds a step and local element to sum a replicated parameter's partial gradient over an axis."""
        group, comm = self.engine.group(self.mesh, axis), self.engine.communication
        per_byte = self._slope(lambda n: comm.collective_time("all_reduce", n, group)) + self._copy(4)
        return FP32 * per_byte

    def _slope(self, seconds: Callable[[float], float]) -> float:
        return max(0.0, (seconds(self.scale) - seconds(self.scale / 2)) / (self.scale / 2))

    def _copy(self, times: float) -> float:
        return self._slope(lambda n: self.engine.compute.memory_time(times * n, "copy"))

    def _optimizer(self) -> float:
        compute, rate = self.engine.compute, self.engine.cluster.overheads.optimizer_s_per_byte
        if rate is None:
            rate = self._slope(lambda n: compute.memory_time(ADAMW_TRAFFIC * n, "optimizer"))
        norm = self._slope(lambda n: compute.memory_time(n, "reduction"))
        return (rate + norm) / self.divided

    def _gather(self) -> float:
        """Whole parameters, gathered in each micro-batch forward and backward."""
        if self.divided == 1:
            return 0.0
        group, comm = self.engine.group(self.mesh, "dp_shard"), self.engine.communication
        return 2 * (self._slope(lambda n: comm.collective_time("all_gather", n, group)) + self._copy(2))

    def _reduce(self) -> float:
        """Gradients, summed over data once a step."""
        comm, mesh = self.engine.communication, self.mesh
        if self.divided > 1:
            group = self.engine.group(mesh, "dp_shard")
            total = self._slope(lambda n: comm.collective_time("reduce_scatter", n, group)) + self._copy(2)
            if mesh.dp_replicate > 1:
                outer = self.engine.group(mesh, "dp_replicate")
                total += self._slope(lambda n: comm.collective_time("all_reduce", n, outer)) / self.divided
            return total
        if mesh.dp > 1:
            group = self.engine.group(mesh, "dp")
            return self._slope(lambda n: comm.collective_time("all_reduce", n, group)) + self._copy(4)
        return 0.0

    def _accumulate(self) -> float:
        """Adding up gradients, in every micro-batch but the first, as an average of them all."""
        rate = self.engine.cluster.overheads.accumulate_s_per_byte
        rate = 3 / self.engine.cluster.device.bandwidth() if rate is None else rate
        return (self.micro_batches - 1) / self.micro_batches * rate

    @property
    def element_s(self) -> float:
        """Seconds per local element of what happens in every micro-batch."""
        return FP32 * self.micro_s_per_byte

    @property
    def once_s(self) -> float:
        """Seconds per local element of what happens once a step."""
        return FP32 * self.once_s_per_byte

    @property
    def element_bytes(self) -> float:
        """At rest, and whole gradients where sharded parameters keep them until the last micro-batch."""
        whole = FP32 if self.divided > 1 and self.micro_batches > 1 else 0
        return FP32 * (2 + OPTIMIZER_STATES) / self.divided + whole
