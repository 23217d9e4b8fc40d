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
from autopar.model.graph import OpNode
from autopar.plan import Mesh


class StepCosts:
    """Prices of one mesh.

    Args:
        scale_bytes: size of gradients around which prices are taken, about that of one stage.
        in_flight: micro-batches whose activations are held; parameters weigh by its inverse against activations.
    """

    def __init__(
        self, engine: Engine, mesh: Mesh, micro_batches: int, scale_bytes: int, in_flight: float = 1.0
    ) -> None:
        self.engine, self.mesh, self.micro_batches = engine, mesh, micro_batches
        self.scale = max(1024.0, float(scale_bytes))
        self.in_flight = in_flight
        self.divided = mesh.dp_shard if mesh.dp_shard > 1 else 1
        self.seconds_per_byte = self._optimizer() + self._data_parallel() + self._accumulate()

    def step(self, node: OpNode, local_numel: int) -> tuple[float, float]:
        """Seconds a step and bytes at rest of one trainable parameter with so many local elements."""
        nbytes = FP32 * local_numel
        return nbytes * self.seconds_per_byte, nbytes * (2 + OPTIMIZER_STATES) / self.divided / self.in_flight

    def reduction(self, axis: str, local_numel: int) -> float:
        """Seconds a step to sum a replicated parameter's partial gradient over an axis."""
        group, comm = self.engine.group(self.mesh, axis), self.engine.communication
        per_byte = self._slope(lambda n: comm.collective_time("all_reduce", n, group)) + self._copy(4)
        return FP32 * local_numel * per_byte

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

    def _data_parallel(self) -> float:
        comm, mesh = self.engine.communication, self.mesh
        if self.divided > 1:
            group = self.engine.group(mesh, "dp_shard")
            gather = self._slope(lambda n: comm.collective_time("all_gather", n, group)) + self._copy(2)
            scatter = self._slope(lambda n: comm.collective_time("reduce_scatter", n, group)) + self._copy(2)
            total = 2 * self.micro_batches * gather + scatter
            if mesh.dp_replicate > 1:
                outer = self.engine.group(mesh, "dp_replicate")
                total += self._slope(lambda n: comm.collective_time("all_reduce", n, outer)) / self.divided
            return total
        if mesh.dp > 1:
            group = self.engine.group(mesh, "dp")
            return self._slope(lambda n: comm.collective_time("all_reduce", n, group)) + self._copy(4)
        return 0.0

    def _accumulate(self) -> float:
        rate = self.engine.cluster.overheads.accumulate_s_per_byte
        return (self.micro_batches - 1) * (3 / self.engine.cluster.device.bandwidth() if rate is None else rate)


class _Free:
    """Parameters that cost nothing; what is found with them bounds what is found with any prices."""

    def step(self, node: OpNode, local_numel: int) -> tuple[float, float]:
        return 0.0, 0.0

    def reduction(self, axis: str, local_numel: int) -> float:
        return 0.0


FREE = _Free()
