"""Device: one accelerator or processor; peak rates, memory, efficiency surfaces, measured tables."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from autopar.errors import ProfileError
from autopar.hardware.efficiency import AttentionSurface, MatmulSurface, power_limited_fraction
from autopar.hardware.locations import find
from autopar.hardware.matmul_table import MatmulTable
from autopar.hardware.profiles import MeasuredOperators, Profile
from autopar.hardware.schema import AttentionSpec, DeviceFile, read_device
from autopar.units import GIB

DEFAULT_MEMORY_EFFICIENCY = 0.8


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        name: as in its file.
        kind: ``cpu``, ``cuda`` or ``rocm``.
        memory_bytes: what the device has, before any reserve.
        memory_bandwidth: bytes/s of the data sheet (or as measured).
        peak_flops: FLOP/s by precision; see :meth:`peak`.
        compute_units: streaming multiprocessors, compute units or cores, for wave quantisation.
        launch_overhead_s: least time between the starts of two kernels on a busy device.
        host_overhead_s: time that the host needs to issue one operator in eager mode; bounds a device that is fed
            with small operators.
        context_bytes: taken by the runtime context on top of tensors.
        allocator_overhead_fraction: reserved beyond allocated.
        matmul, attention: efficiency surfaces.
        attention_kernels: attention surfaces of other kernel libraries; see :meth:`attention_of`.
        in_step_slowdown: time of products and attention in a step over the time that benchmarks of them alone give.
        memory_efficiency: fraction of ``memory_bandwidth`` by class of memory-bound operator.
        products: measured matrix products, attention and grouped products, if the device file names a table.
        measured: operators measured on the device itself, if a profile was attached.
        dispatch_s: (forward, backward) seconds that every operator call takes beyond its own measured time.
    """

    name: str
    kind: str
    memory_bytes: int
    memory_bandwidth: float
    peak_flops: dict[str, float]
    compute_units: int
    launch_overhead_s: float
    host_overhead_s: float
    context_bytes: int
    allocator_overhead_fraction: float
    matmul: MatmulSurface
    attention: AttentionSurface
    memory_efficiency: dict[str, float]
    attention_kernels: dict[str, AttentionSurface] = field(default_factory=dict)
    in_step_slowdown: float = 1.0
    sources: tuple[str, ...] = ()
    description: str = ""
    products: MatmulTable | None = None
    measured: MeasuredOperators = field(default_factory=MeasuredOperators)
    dispatch_s: tuple[float, float] = (0.0, 0.0)

    @staticmethod
    def load(name_or_path: str | Path, beside: Path | None = None) -> Device:
        """Reads a device by name or path.

        Args:
            name_or_path: ``a100-sxm-80gb``, or the path of a JSON file.
            beside: folder that relative paths are also looked for in.

        Raises:
            ProfileError: it does not exist, or a field is wrong.
        """
        path = find("devices", str(name_or_path), beside)
        return from_file(read_device(path), path)

    def peak(self, precision: str) -> float:
        """Peak matrix-product rate in FLOP/s; a precision that the device lacks runs at the next wider one it has."""
        for candidate in _WIDER[precision]:
            if candidate in self.peak_flops:
                return self.peak_flops[candidate]
        return max(self.peak_flops.values())

    def attention_of(self, kernels: str) -> AttentionSurface:
        """The attention surface of a kernel library, PyTorch's own where the device file does not tell it apart."""
        return self.attention_kernels.get(kernels, self.attention)

    def bandwidth(self, kind: str = "pointwise") -> float:
        """Bytes/s that a class of memory-bound operators reaches."""
        fallback = self.memory_efficiency.get("pointwise", DEFAULT_MEMORY_EFFICIENCY)
        return self.memory_bandwidth * self.memory_efficiency.get(kind, fallback)

    def with_profile(self, profile: Profile | str | Path) -> Device:
        """The same device with operators measured on it, and the memory it was found to take.

        Raises:
            ProfileError: the profile is unreadable or was taken on another device.
        """
        if not isinstance(profile, Profile):
            profile = Profile.load(profile)
        if profile.device != self.name:
            raise ProfileError(
                f"profile of device {profile.device!r} cannot serve the device {self.name!r}",
                f"Measure {self.name!r} with 'autopar profile', or name the cluster that the profile was made for",
            )
        overheads = profile.overheads
        dispatch = (overheads.dispatch_forward_s or 0.0, overheads.dispatch_backward_s or 0.0)
        changed = replace(self, measured=profile.operators, dispatch_s=dispatch)
        if profile.memory.context_bytes is not None:
            changed = replace(changed, context_bytes=profile.memory.context_bytes)
        return changed


_WIDER = {
    "fp8": ("fp8", "bf16", "fp16", "tf32", "fp32"),
    "bf16": ("bf16", "fp16", "tf32", "fp32"),
    "fp16": ("fp16", "bf16", "tf32", "fp32"),
    "tf32": ("tf32", "fp32"),
    "fp32": ("fp32",),
}


def from_file(spec: DeviceFile, path: Path) -> Device:
    """The device that a checked file describes."""
    table = None
    if spec.operator_table:
        table_path = path.parent / spec.operator_table
        table = MatmulTable.load(table_path)
    matmul, attention = spec.matmul, spec.attention
    return Device(
        name=spec.name,
        kind=spec.kind,
        memory_bytes=int(spec.memory_gib * GIB),
        memory_bandwidth=spec.memory_bandwidth_gb_s * 1e9,
        peak_flops={p: v * 1e12 for p, v in spec.peak_tflops.items()},
        compute_units=spec.compute_units,
        launch_overhead_s=spec.launch_overhead_us * 1e-6,
        host_overhead_s=spec.host_overhead_us * 1e-6,
        context_bytes=int(spec.context_gib * GIB),
        allocator_overhead_fraction=spec.allocator_overhead_fraction,
        matmul=MatmulSurface(
            peak_fraction=matmul.peak_fraction,
            k_overhead=matmul.k_overhead,
            tile_intensity=matmul.tile_intensity,
            wave_smoothing=matmul.wave_smoothing,
            tiles=tuple(matmul.tiles),
            layout_time={str(layout): value for layout, value in matmul.layout_time.items()},
            fixed_s=matmul.fixed_us * 1e-6,
            rate_cap=_rate_cap(spec),
            grouped_fixed_s=matmul.grouped_fixed_us * 1e-6,
        ),
        attention=_attention(attention),
        attention_kernels={name: _attention(kernel) for name, kernel in spec.attention_kernels.items()},
        in_step_slowdown=spec.in_step_slowdown,
        memory_efficiency=dict(spec.memory_efficiency),
        sources=tuple(spec.sources),
        description=spec.description,
        products=table,
    )


def _attention(spec: AttentionSpec) -> AttentionSurface:
    return AttentionSurface(
        forward_fraction=spec.forward_fraction,
        backward_fraction=spec.backward_fraction,
        half_length=spec.half_length,
        query_tile=spec.query_tile,
        fixed_s=spec.fixed_us * 1e-6,
    )


def _rate_cap(spec: DeviceFile) -> float:
    """As given, else from the power limit."""
    if spec.matmul.rate_cap is not None:
        return spec.matmul.rate_cap
    if spec.power is None:
        return 1.0
    return power_limited_fraction(**spec.power.model_dump())
