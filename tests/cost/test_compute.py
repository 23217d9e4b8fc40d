"""Operator times: monotone, measured first, interpolated next."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.compute import ComputeModel
from autopar.cost.operators import work_of
from autopar.hardware import Device
from autopar.hardware.efficiency import MatmulShape
from autopar.hardware.profiles import MeasuredOperator, MeasuredOperators
from autopar.model.graph import TensorMeta

LINEAR, GELU, SDPA = "aten.linear.default", "aten.gelu.default", "aten.scaled_dot_product_attention.default"
GPU = Device.load("a100-sxm-80gb")
sizes = st.integers(1, 4096)


def f32(*shape: int) -> TensorMeta:
    return TensorMeta(shape, torch.float32)


def linear_time(model: ComputeModel, m: int, k: int, n: int, direction: str = "forward") -> float:
    flops = 2 * m * k * n * (1 if direction == "forward" else 2)
    return model.operator_time(LINEAR, [f32(m, k), f32(n, k)], [f32(m, n)], flops, direction)


@given(m=sizes, k=sizes, n=sizes)
def test_products_never_beat_the_peak_and_grow(m: int, k: int, n: int) -> None:
    model = ComputeModel(GPU)
    shape = MatmulShape(m, n, k)
    time = model.product_time(shape, "bf16")
    assert time * GPU.peak("bf16") >= shape.flops
    assert model.product_time(MatmulShape(m, n, 2 * k), "bf16") >= time
    assert model.product_time(MatmulShape(2 * m, n, k), "bf16") >= time * (1 - 1e-9)


@pytest.mark.parametrize("name", ["a100-sxm-80gb", "b200-sxm", "cpu-local"])
def test_large_products_reach_the_stated_fraction(name: str) -> None:
    device = Device.load(name)
    shape = MatmulShape(16384, 16384, 16384)
    reached = shape.flops / ComputeModel(device).product_time(shape, "bf16") / device.peak("bf16")
    assert 0.7 * min(device.matmul.rate_cap, device.matmul.peak_fraction) <= reached <= device.matmul.rate_cap


def test_backward_of_a_linear_is_two_products() -> None:
    work = work_of(LINEAR, [f32(8, 4, 16), f32(32, 16), f32(32)], [f32(8, 4, 32)], 2 * 2 * 32 * 16 * 32, "backward")
    assert [(p.m, p.n, p.k, p.layout) for p in work.products] == [(32, 16, 32, "NN"), (32, 16, 32, "NT")]
    frozen = work_of(LINEAR, [f32(8, 4, 16), f32(32, 16)], [f32(8, 4, 32)], 2 * 32 * 16 * 32, "backward")
    assert len(frozen.products) == 1


@pytest.mark.parametrize(
    ("op", "inputs", "output", "want"),
    [
        ("aten.mm.default", [f32(3, 5), f32(5, 7)], f32(3, 7), MatmulShape(3, 7, 5)),
        ("aten.addmm.default", [f32(7), f32(3, 5), f32(5, 7)], f32(3, 7), MatmulShape(3, 7, 5)),
        ("aten.bmm.default", [f32(2, 3, 5), f32(2, 5, 7)], f32(2, 3, 7), MatmulShape(3, 7, 5, 2, "NN")),
        ("aten.matmul.default", [f32(2, 4, 3, 5), f32(2, 4, 5, 7)], f32(2, 4, 3, 7), MatmulShape(3, 7, 5, 8, "NN")),
        ("aten.conv2d.default", [f32(2, 3, 8, 8), f32(16, 3, 4, 4)], f32(2, 16, 2, 2), MatmulShape(8, 16, 48)),
        (
            "aten._grouped_mm.default",
            [f32(64, 5), f32(8, 5, 7), TensorMeta((8,), torch.int32)],
            f32(64, 7),
            MatmulShape(8, 7, 5, 8, grouped=True),
        ),
    ],
)
def test_products_are_recognised(op: str, inputs: list[TensorMeta], output: TensorMeta, want: MatmulShape) -> None:
    assert work_of(op, inputs, [output], 0, "forward").products == (want,)


def test_embedding_reads_rows_not_the_table() -> None:
    model = ComputeModel(GPU)
    ids = TensorMeta((4,), torch.int64)
    small = model.operator_time("aten.embedding.default", [f32(1000, 64), ids], [f32(4, 64)], 0)
    large = model.operator_time("aten.embedding.default", [f32(10**8, 64), ids], [f32(4, 64)], 0)
    assert small == large


def test_causal_attention_is_about_half() -> None:
    model = ComputeModel(GPU)
    args = (SDPA, [f32(8, 16, 4096, 64)] * 3, [f32(8, 16, 4096, 64)], 0, "forward", "bf16")
    full, causal = model.operator_time(*args), model.operator_time(*args, attributes="is_causal=True")
    assert 0.45 < causal / full < 0.7


def test_narrower_precision_moves_fewer_bytes() -> None:
    model = ComputeModel(GPU)
    big = [f32(2**20, 64)]
    assert model.operator_time(GELU, big, big, 0, precision="bf16") < 0.6 * model.operator_time(GELU, big, big, 0)


def measured(entries: list[tuple[int, float]]) -> ComputeModel:
    table = MeasuredOperators(tuple(MeasuredOperator(GELU, (f32(n),), (f32(n),), "", t, 2 * t) for n, t in entries))
    return ComputeModel(replace(GPU, measured=table))


def test_measured_times_come_first() -> None:
    model = measured([(1024, 0.5), (4096, 2.0)])
    assert model.operator_time(GELU, [f32(1024)], [f32(1024)], 0) == 0.5
    assert model.operator_time(GELU, [f32(1024)], [f32(1024)], 0, "backward") == 1.0


def test_between_measured_shapes_the_roofline_is_corrected() -> None:
    plain = ComputeModel(GPU)
    true = {n: 3.0 * plain.operator_time(GELU, [f32(n)], [f32(n)], 0) for n in (2**22, 2**24, 2**26)}
    model = measured([(2**22, true[2**22]), (2**26, true[2**26])])
    assert model.operator_time(GELU, [f32(2**24)], [f32(2**24)], 0) == pytest.approx(true[2**24], rel=1e-6)
    # another rank is another kind of shape: nothing is known of it
    shape = [f32(2**12, 2**12)]
    assert model.operator_time(GELU, shape, shape, 0) == plain.operator_time(GELU, shape, shape, 0)


def test_views_are_free_on_a_gpu() -> None:
    model = ComputeModel(GPU)
    assert model.operator_time("aten.transpose.int", [f32(4, 5)], [f32(5, 4)], 0) == 0.0
    assert model.operator_time("aten.split.Tensor", [f32(4, 6)], [f32(4, 3)] * 2, 0) == 0.0
    assert model.operator_time("aten.split.Tensor", [f32(4, 6)], [f32(4, 3)] * 2, 0, "backward") > 0.0


def test_fp8_products_pay_for_their_casts() -> None:
    device = Device.load("h100-sxm")
    model = ComputeModel(device)
    shapes = ([f32(8192, 4096), f32(4096, 4096)], [f32(8192, 4096)])
    work = work_of(LINEAR, *shapes, 2.0 * 8192 * 4096 * 4096, "forward")
    bare = model.product_time(work.products[0], "fp8")
    cast = 4 * (8192 * 4096 + 4096 * 4096)
    assert model.work_time(work, "fp8") == pytest.approx(bare + model.memory_time(cast))
    assert bare < model.product_time(work.products[0], "bf16")


def test_attention_kernels_of_other_libraries() -> None:
    device = Device.load("h100-sxm")
    args = (SDPA, [f32(1, 32, 8192, 128)] * 3, [f32(1, 32, 8192, 128)], 0, "forward", "bf16", "is_causal=True")
    times = [
        ComputeModel(device, k).operator_time(*args) for k in ("transformer_engine", "pytorch", "flash_attention_1")
    ]
    assert times == sorted(times)
    assert ComputeModel(device, "unheard-of").operator_time(*args) == times[1]


def test_published_shapes_are_looked_up() -> None:
    device = Device.load("b200-sxm")
    assert device.products is not None
    slow, launch = device.in_step_slowdown, device.launch_overhead_s
    shape = next(r.shape for r in device.products.products if r.shape.layout == "NT" and r.out_bytes == 4)
    for gradient_bytes in (2, 4):
        same = [r.seconds for r in device.products.exact(shape) if r.out_bytes == gradient_bytes]
        if same:
            time = ComputeModel(device, gradient_bytes=gradient_bytes).product_time(shape, "bf16")
            assert time == pytest.approx(slow * sum(same) / len(same) + launch)
    model = ComputeModel(device)
    assert model.product_time(shape, "fp8") < model.product_time(shape, "bf16")
    row = device.products.attention[0]
    times = [r.seconds for r in device.products.exact_attention(row.shape, row.direction)]
    found = model.attention_time(row.shape, 0, "bf16", row.direction)
    assert found == pytest.approx(slow * sum(times) / len(times) + launch)


def test_gradients_added_up_in_fp32_move_more_bytes() -> None:
    thin = MatmulShape(8192, 8192, 64, layout="NT")
    plain, wide = ComputeModel(GPU), ComputeModel(GPU, gradient_bytes=4)
    assert wide.product_time(thin, "bf16") > 2 * plain.product_time(thin, "bf16")
    forward = replace(thin, layout="TN")
    assert wide.product_time(forward, "bf16") == plain.product_time(forward, "bf16")


def test_dispatch_is_added_to_every_call() -> None:
    slow = replace(GPU, dispatch_s=(0.25, 0.5))
    shape = [f32(1024)]
    for index, direction in enumerate(("forward", "backward")):
        plain = ComputeModel(GPU).operator_time(GELU, shape, shape, 0, direction)
        with_it = ComputeModel(slow).operator_time(GELU, shape, shape, 0, direction)
        assert with_it == pytest.approx(plain + (0.25, 0.5)[index])
