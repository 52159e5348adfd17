"""Terms add up, and each kind of time is found where it was put."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from optexp.kernelkit.gemm import FLOAT32_TILINGS, launch_gemm
from optexp.profiling.breakdown import breakdown, fitted
from optexp.profiling.roofline import CLASSES
from optexp.profiling.work import work_of
from optexp.trace import Op
from tests.profiling.recording import undisturbed


@pytest.mark.parametrize("name", ["eager", "captured", "products", "passes", "feeding"])
@pytest.mark.parametrize("calibrated", [False, True])
def test_terms_add_up(request, name, calibrated, card):
    trace = request.getfixturevalue(name)
    parts = breakdown(trace, card if calibrated else None)
    assert math.isclose(sum(parts.terms.values()), 1, abs_tol=0.01)
    assert min(parts.terms.values()) >= 0
    start, end = trace.window
    assert math.isclose(parts.wall_us * parts.steps, end - start, rel_tol=1e-6)
    assert all(math.isfinite(value) for value in parts.metrics().values())


def test_eager_small_kernels_wait_for_dispatch(eager):
    parts = breakdown(eager)
    assert parts.busy == pytest.approx(2 / 15, abs=0.01)
    assert parts.terms["dispatch"] == pytest.approx(13 / 15, abs=0.02)
    assert parts.enqueue == pytest.approx(1, abs=0.02)
    assert parts.metrics()["host_wait"] == parts.host_late > 0.8


def test_kernels_of_a_graph_have_launch_gaps_only(captured):
    parts = breakdown(captured)
    assert parts.busy == pytest.approx(2 / 2.5, abs=0.03)
    assert parts.terms["launch_gap"] == pytest.approx(0.5 / 2.5, abs=0.03)
    assert parts.host_late < 0.03
    assert parts.enqueue < 0.2


def test_host_late_gaps_are_split_by_what_the_host_did(feeding):
    parts = breakdown(feeding)
    assert parts.us("data_loading") == pytest.approx(400, abs=5)
    assert parts.us("exposed_copies") == pytest.approx(100, abs=1)
    assert parts.pageable == parts.terms["exposed_copies"]
    assert parts.us("allocation") == 0  # hidden behind the kernel that ran
    assert 0 < parts.us("synchronisation") < 20


def test_an_allocation_that_the_gpu_waits_for(chrome):
    build = chrome()

    def step():
        build.spend("cuda_runtime", "cudaMalloc", 80.0, correlation=5)
        build.op("aten::add", 10.0, 20.0)

    parts = breakdown(build.steps(step))
    assert parts.us("allocation") == pytest.approx(64, abs=4)  # the first 16 of 80 µs the last kernel still ran
    assert parts.us("synchronisation") == 0


def test_side_by_side_kernels_count_once(chrome):
    build = chrome()

    def step():
        build.op("aten::add", 10.0, 30.0)
        build.event("kernel", "beside", build.gpu - 30.0, 30.0, correlation=10_000 + build.id, stream=9)

    parts = breakdown(build.steps(step))
    assert parts.busy is not None
    assert parts.busy <= 1
    assert parts.kernels == 2


def test_classes_by_measured_ceilings(products, passes, card):
    assert breakdown(products, card).terms["compute_bound"] > 0.95
    assert breakdown(passes, card).terms["memory_bound"] > 0.95
    assert breakdown(products).terms["unclassified"] > 0.95  # nothing is claimed without a calibration


def test_far_from_both_ceilings_is_latency(chrome, card):
    build = chrome()
    shapes = {"Input type": ["float", "float"], "Input Dims": [[256, 256], [256, 256]]}
    trace = build.steps(lambda: build.op("aten::mm", 2.0, 20.0, "gemm", grid=500, **shapes))
    assert breakdown(trace, card).terms["latency_bound"] > 0.9


def test_float32_products_faster_than_float32_were_tf32(chrome, card):
    build = chrome()
    shapes = {"Input type": ["float", "float"], "Input Dims": [[4096, 4096], [4096, 4096]]}
    trace = build.steps(lambda: build.op("aten::mm", 2.0, 2 * 4096**3 / 100e6, "gemm", **shapes))
    assert breakdown(trace, card).terms["latency_bound"] > 0.9  # 100 of 380 Tflop/s, not 200 % of 50


BY_THREE = {"Input type": ["float"] * 3, "Input Dims": [[4096, 4096]] * 3}


@pytest.mark.parametrize(
    ("op", "kernel", "tflops", "tf32", "expected"),
    [
        ("optexp.linear_gelu_forward", "linear_gelu_forward", 110, 380, "compute_bound"),
        ("optexp.float32_gemm", "float32_gemm", 110, 380, "compute_bound"),
        ("optexp.float32_gemm", "float32_gemm", 45, 380, "latency_bound"),
        ("optexp.float32_gemm", "float32_gemm", 45, 60, "compute_bound"),  # as fast as float32 itself can be
        ("optexp.float32_gemm", "float32_gemm", 20, 60, "latency_bound"),
        ("aten::mm", "cutlass_80_tensorop_s1688gemm_128x256_16x3_tn_align4", 45, 380, "latency_bound"),
        ("aten::mm", "sm90_xmma_gemm_f32f32_tf32f32_f32_tn", 110, 380, "latency_bound"),
        ("aten::mm", "sm90_xmma_gemm_f32f32_tf32f32_f32_tn", 330, 380, "compute_bound"),
    ],
)
def test_our_float32_gemms_are_three_of_tf32(chrome, card, op, kernel, tflops, tf32, expected):
    build, card = chrome(), replace(card, matrix={"float32": 50e12, "tf32": tf32 * 1e12})
    trace = build.steps(lambda: build.op(op, 2.0, 2 * 4096**3 / (tflops * 1e6), kernel, **BY_THREE))
    assert breakdown(trace, card).terms[expected] > 0.9


def test_a_few_blocks_for_a_short_time_are_latency(captured):
    assert breakdown(captured).terms["latency_bound"] > 0.7


def test_kernels_of_a_graph_are_what_they_were_outside(chrome, passes, card):
    build = chrome()
    trace = build.steps(lambda: build.graph(1, 3 * 2**28 / 3.6e6, kernel="void add<4>", grid=1024))
    assert breakdown(trace, card).terms["unclassified"] > 0.9
    assert breakdown(trace, card, beside=passes).terms["memory_bound"] > 0.9
    other = chrome()
    trace = other.steps(lambda: other.graph(1, 3 * 2**28 / 3.6e6, kernel="void add<4>", grid=512))
    assert breakdown(trace, card, beside=passes).terms["unclassified"] > 0.9  # another launch is other work


@pytest.mark.parametrize(
    ("kernel", "duration", "expected"),
    [
        ("triton_poi_fused_gelu_0", 40.0, "memory_bound"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<4>", 40.0, "memory_bound"),
        ("softmax_forward", 40.0, "memory_bound"),
        ("relu_bias_dropout_backward", 40.0, "memory_bound"),
        ("softmax_forward", 4.0, "unclassified"),  # so short that anything may bound it
        ("linear_gelu_forward", 40.0, "unclassified"),  # a GEMM
        ("add_forward_of_somebody", 40.0, "unclassified"),
    ],
)
def test_long_passes_through_memory_are_known_inside_a_graph(chrome, card, kernel, duration, expected):
    build = chrome()
    trace = build.steps(lambda: build.graph(1, duration, kernel=kernel, grid=1024))
    found = breakdown(trace, card).terms
    assert found[expected] > 5 * sum(found[name] for name in CLASSES if name != expected)


MATRICES = ("bfloat16", (8, 16)), ("bfloat16", (4, 16)), ("bfloat16", (8, 4))
STANDING, LYING, WEIGHT = ("float32", (16, 8)), ("float32", (8, 16)), ("float32", (4, 16))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (("aten::mm", ("float32", (8, 16)), ("float32", (16, 4))), (4 * (128 + 64 + 32), 2 * 8 * 16 * 4)),
        (("aten::addmm", ("bfloat16", (4,)), ("bfloat16", (8, 16)), ("bfloat16", (16, 4))), (456, 1024)),
        (("aten::bmm", ("float32", (3, 8, 16)), ("float32", (3, 16, 4))), (3 * 896, 3 * 1024)),
        (("aten::add", ("float32", (8, 1)), ("float32", (1, 4))), (4 * (8 + 4 + 32), 0)),
        (("aten::add_", ("float32", (8, 4)), ("float32", (4,))), (4 * (32 + 4 + 32), 0)),
        (("aten::copy_", ("bfloat16", (10,)), ("float32", (10,))), (60, 0)),
        (("aten::sum", ("float32", (100,))), (400, 0)),
        (("triton_poi_fused_gelu_0", ("float32", (100,)), ("float32", (100,))), (800, 0)),
        (("triton_tem_fused_mm_0", ("float32", (100,))), None),
        (("optexp.gelu_forward", ("float32", (100,)), ("float32", (100,))), (800, 0)),
        (("optexp.layernorm_linear_fold", *MATRICES[1:2], ("float32", (16,)), *MATRICES[1:2]), (320, 0)),
        (("optexp.linear_gelu_forward", ("bfloat16", (4,)), *MATRICES), (456, 1024)),
        (("optexp.linear_gelu_forward", *MATRICES[2:], *MATRICES), (512, 1024)),  # and what goes into GELU
        (("optexp.linear_gelu_forward", *[("float32", (8, 8))] * 3), (768, 1024)),
        (("optexp.hopper_gemm.layernorm_linear", *MATRICES[:2], ("float32", (256, 4)), *MATRICES[2:]), (4544, 1024)),
        (("optexp.few_rows_gemm.layernorm_linear", *[("float32", (8, n)) for n in (8, 8, 4, 4, 8)]), (1024, 1024)),
        (("optexp.few_rows_gemm.layernorm_linear", ("float32", (8,))), (32, 0)),
        (("optexp.float32_gemm", ("float32", (4,)), LYING, WEIGHT, ("float32", (8, 4))), (912, 1024)),
        (("optexp.float32_gemm", STANDING, WEIGHT, ("float32", (8, 4))), (896, 1024)),
        (("optexp.float32_gemm", LYING, WEIGHT, ("float32", (2 * 64, 4))), (2816, 1024)),  # halves of the sums
        (("optexp.float32_gemm", STANDING, WEIGHT, ("float32", (2 * 64, 4))), (2816, 1024)),
        (("optexp.float32_gemm", STANDING, ("float32", (16, 16)), ("float32", (4 * 64, 16))), (17920, 4096)),
        (("aten::convolution", ("float32", (1, 3, 8, 8)), ("float32", (3, 3, 3, 3))), None),
        (("aten::_foreach_add_", ("", (10,))), None),
        (("aten::empty",), None),
    ],
)
def test_work_of_an_operator(op, expected):
    name, *inputs = op
    assert work_of(Op(name, 0, 1, inputs=tuple(inputs))) == expected


def test_a_gemm_of_ours_is_given_what_its_work_is_counted_by(tmp_path):
    class Kernel:
        __name__ = "float32_gemm"
        arg_names = ("x_desc", "w_desc", "y_desc")
        fn = None

        def __getitem__(self, grid):
            return lambda *args, **constants: None

    x, w, bias, y = (torch.empty(shape) for shape in ((64, 32), (16, 32), (16,), (64, 16)))
    trace = undisturbed(lambda: launch_gemm(Kernel(), FLOAT32_TILINGS[0], x, w, y, bias), tmp_path / "trace.json.gz")
    works = [work_of(op) for op in trace.ops if op.name == "optexp.float32_gemm"]
    moved = 4 * sum(tensor.numel() for tensor in (x, w, bias, y))
    assert works == [(moved, 2 * 64 * 32 * 16)] * len(trace.steps)


def test_convolutions_are_counted_as_torch_counts_them(tmp_path):
    layers = torch.nn.Conv2d(4, 8, 3, stride=2, padding=1), torch.nn.Conv2d(8, 8, (3, 1), dilation=(2, 1))
    x = torch.randn(2, 4, 16, 12)

    def step():
        layers[1](layers[0](x)).sum().backward()

    with FlopCounterMode(display=False) as counter:
        step()
    trace = undisturbed(step, tmp_path / "trace.json.gz")
    works = [work_of(op) for op in trace.ops if op.name in ("aten::mkldnn_convolution", "aten::convolution_backward")]
    assert len(works) == 4 * len(trace.steps)
    assert sum(flops for _, flops in works) == len(trace.steps) * counter.get_total_flops()
    floats = 2 * 4 * 16 * 12 + 8 * 4 * 9 + 8 + 2 * 8 * 8 * 6  # x, weight and bias, and what is made of them
    assert works[0][0] == 4 * floats


def test_transposed_convolutions_are_left_out():
    tensors = [("float32", shape) for shape in ((2, 8, 8, 8), (2, 8, 8, 8), (8, 8, 1, 1))]
    written = ("", "", "", "[0]", "[1, 1]", "[0, 0]", "[1, 1]", "True", "[0, 0]", "1", "[True, True, False]")
    back = Op("aten::convolution_backward", 0, 1, inputs=tuple(tensors), written=written)
    assert work_of(back) is None
    usual = replace(back, written=(*written[:7], "False", *written[8:]))
    assert work_of(usual) == (4 * (1024 + 2 * 1024 + 2 * 64), 2 * 2 * 1024 * 8)  # both gradients: 8 terms an element


@pytest.mark.parametrize("name", ["_efficient_attention", "_flash_attention"])
def test_attention_without_a_mask_is_counted(name):
    batch, sequence, heads, width = 2, 16, 4, 8
    q = ("bfloat16", (batch, sequence, heads, width))
    gemm, tensor = 2 * batch * heads * sequence**2 * width, 2 * batch * sequence * heads * width
    mask = {"_efficient_attention": "01", "_flash_attention": ("False", "True")}[name]
    for part, tensors, gemms, moved, place in (
        ("_forward", 3, 2, 4, {"_efficient_attention": 9, "_flash_attention": 8}[name]),
        ("_backward", 4, 5, 7, {"_efficient_attention": 14, "_flash_attention": 11}[name]),
    ):
        op = Op(f"aten::{name}{part}", 0, 1, inputs=(q,) * tensors, written=("",) * place + (mask[0],))
        assert work_of(op) == (moved * tensor, gemms * gemm)
        assert work_of(replace(op, written=("",) * place + (mask[1],))) is None  # half of it would be a guess
        assert work_of(replace(op, written=())) is None


def test_what_tracing_slowed_is_scaled_back(chrome):
    build = chrome(timed_us=400.0)

    def step():
        for _ in range(45):
            build.op("aten::add", host_us=15.0, gpu_us=2.0, kernel="void add<4>", grid=16)

    parts = breakdown(build.steps(step))
    assert parts.stretched == pytest.approx(675 / 400, abs=0.02)
    assert parts.wall_us == pytest.approx(400)
    assert parts.busy == pytest.approx(90 / 400)  # the GPU's time stays as it was
    assert math.isclose(sum(parts.terms.values()), 1, abs_tol=1e-9)


def test_python_after_a_wait_is_not_the_waits_doing_where_the_host_takes_longer_than_the_gpu(chrome) -> None:
    build = chrome()

    def step() -> None:
        build.op("aten::mm", 20.0, 1000.0, "gemm")
        build.synchronise()
        build.host += 5000.0  # without the wait, 1000 µs of it would pass beside the kernel

    found = breakdown(build.steps(step))
    assert found.us("dispatch") == pytest.approx(4000.0, rel=0.05)
    assert found.us("synchronisation") == pytest.approx(1000.0, rel=0.05)


@pytest.mark.parametrize("name", ["eager", "captured", "products", "passes", "feeding"])
@pytest.mark.parametrize("longer", [0.9, 0.97, 1.0, 1.03, 1.1, 1.6])
def test_a_fitted_step_has_the_kernels_that_were_traced(request, name, longer):
    """At another clock, of at most five percent, where gaps do not account for the difference."""
    traced = breakdown(request.getfixturevalue(name))
    found = fitted(traced, longer * traced.wall_us)
    assert math.isclose(sum(found.terms.values()), 1, abs_tol=1e-9)
    assert min(found.terms.values()) >= 0
    assert found.busy * found.wall_us == pytest.approx(found.clock * traced.busy * traced.wall_us)
    assert found.kernel_share * found.wall_us == pytest.approx(found.clock * traced.kernel_share * traced.wall_us)
    by_gaps = traced.gaps >= 0.1 if longer < 1 else traced.host_late >= 0.05
    assert found.clock == 1 or (not by_gaps and abs(found.clock - 1) <= 0.05)
    if by_gaps or 0.96 < longer < 1.04:
        assert found.wall_us == pytest.approx(longer * traced.wall_us)


def test_without_late_gaps_a_longer_step_stays_unexplained(captured):
    traced = breakdown(captured)
    assert traced.host_late < 0.05
    assert fitted(traced, 1.6 * traced.wall_us).wall_us == pytest.approx(traced.wall_us)
