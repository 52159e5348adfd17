"""Each strategy's bound on hand-made traces: what it cannot shorten stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from optexp.profiling.bounds import Bound
from optexp.profiling.breakdown import breakdown
from optexp.profiling.view import View
from optexp.records.profile import Calibration
from optexp.strategies.amp import Amp
from optexp.strategies.channels_last import ChannelsLast
from optexp.strategies.compiled_optimizer import CompiledOptimizer
from optexp.strategies.cpu_affinity import CpuAffinity
from optexp.strategies.cuda_graph import CudaGraph
from optexp.strategies.fused_optimizer import FusedOptimizer
from optexp.strategies.fusion import Fusion
from optexp.strategies.inference_mode import InferenceMode
from optexp.strategies.inplace import Inplace
from optexp.strategies.memory_pool import MemoryPool
from optexp.strategies.pinned_memory import PinnedMemory
from optexp.strategies.prefetch import Prefetch
from optexp.strategies.replace import Replace
from optexp.strategies.streams import Streams
from optexp.strategies.tf32 import Tf32
from optexp.strategy import Strategy
from optexp.trace import Trace
from tests.profiling.conftest import ChromeTrace, small_kernels

CARD = Calibration(
    "card", 4e12, {"float32": 50e12, "tf32": 400e12, "bfloat16": 800e12}, launch_us=4.0, pinned=50e9, pageable=5e9
)
MARGIN = 0.9
Step = Callable[[ChromeTrace], None]


def viewed(step: Step, timed_us: float | None = None, count: int = 5) -> View:
    build = ChromeTrace(timed_us)
    return view_of(build.steps(lambda: step(build), count))


def view_of(trace: Trace) -> View:
    return View(trace, breakdown(trace, CARD))


def bound(strategy: Strategy, view: View, ceilings: Calibration | None = CARD) -> Bound:
    found = strategy.bound(view, ceilings)
    assert found is not None, strategy
    assert 0 < found.us <= view.breakdown.wall_us * 1.000001
    return found


def us_of(strategy: Strategy, view: View, ceilings: Calibration | None = CARD) -> float:
    return bound(strategy, view, ceilings).us


def tensors(*shapes: list[int], kind: str = "float") -> dict[str, Any]:
    return {"Input type": [kind] * len(shapes), "Input Dims": list(shapes)}


SIDE = 4096
PRODUCT = tensors([SIDE, SIDE], [SIDE, SIDE])
FLOP = 2 * SIDE**3
LONG = tensors([2**28])  # 1 GiB
PASS_US = 2 * 2**30 / 4e6  # reads and writes it once


def product_and_passes(build: ChromeTrace) -> None:
    """A product at 40 Tflop/s in float32, then three passes at 80 % of the bandwidth, issued ahead of the GPU."""
    build.op("aten::mm", 10.0, FLOP / 40e6, "gemm", **PRODUCT)
    for _ in range(3):
        build.op("aten::relu", 10.0, PASS_US / 0.8, "relu", **LONG)


WORK_US = FLOP / 40e6 + 3 * PASS_US / 0.8


# --- the host ----------------------------------------------------------------------------------------------------


def test_a_graph_leaves_kernels_alone() -> None:
    view = viewed(lambda build: small_kernels(build)())
    assert us_of(CudaGraph(), view) == pytest.approx(45 * 2.0)
    assert us_of(CudaGraph(scope="model"), view) == pytest.approx(45 * 2.0)


def test_a_graph_in_the_trace_is_not_captured_again() -> None:
    assert CudaGraph().bound(viewed(lambda build: build.graph(45, 2.0)), CARD) is None


def loading(build: ChromeTrace) -> None:
    build.spend("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 400.0)
    build.host += 1.0
    build.op("aten::relu", 20.0, 50.0)


def test_a_graph_does_not_make_batches() -> None:
    assert us_of(CudaGraph(), viewed(loading)) == pytest.approx(400.0)


def updating(build: ChromeTrace, name: str = "aten::sqrt") -> None:
    """Forward of 100 µs, and an update of ten kernels of 3 µs, of which the last takes 8 µs."""
    build.op("aten::mm", 20.0, 100.0, "gemm")
    build.host += 1.0
    start = build.host
    for index in range(10):
        build.op(name if index else "aten::addcdiv_", 30.0, 8.0 if index == 9 else 3.0, "update")
    build.event("user_annotation", "Optimizer.step#Adam.step", start, build.host - start)
    build.host += 1.0


def test_a_captured_update_may_become_a_fused_one() -> None:
    """Adam has a form that can be captured as it is."""
    assert us_of(CudaGraph(), viewed(updating)) == pytest.approx(100 + 9 * 3.0 + 8.0)
    assert us_of(CudaGraph(), viewed(lambda build: updating(build, "aten::add_"))) == pytest.approx(100 + 8.0)


def test_an_update_outside_of_a_graph_still_takes_the_host_time() -> None:
    """Ten operators in 300 µs, of which tracing may have added 5 µs each."""
    assert us_of(CudaGraph(scope="forward_backward"), viewed(updating)) == pytest.approx(300 - 50)


@pytest.mark.parametrize("strategy", [FusedOptimizer(), CompiledOptimizer()], ids=lambda s: s.name)
def test_one_kernel_updates_all_parameters(strategy: Strategy) -> None:
    view = viewed(updating)
    saved = 9 * 3.0 + 300.0
    assert us_of(strategy, view) == pytest.approx(max(view.breakdown.wall_us - saved, 108.0))


@pytest.mark.parametrize("strategy", [FusedOptimizer(), CompiledOptimizer()], ids=lambda s: s.name)
def test_without_an_update_nothing_is_known(strategy: Strategy) -> None:
    assert strategy.bound(viewed(product_and_passes), CARD) is None


def test_one_operator_updates_all_parameters_on_a_cpu() -> None:
    def step(build: ChromeTrace) -> None:
        build.spend("cpu_op", "aten::mm", 100.0, **{"External id": 1})
        build.host += 1.0
        build.event("user_annotation", "Optimizer.step#Adam.step", build.host, 60.0)
        for index, us in enumerate((10.0, 10.0, 40.0)):
            build.spend("cpu_op", "aten::add_", us, **{"External id": 2 + index})
        build.host += 1.0

    view = viewed(step)
    assert us_of(FusedOptimizer(), view) == pytest.approx(view.breakdown.wall_us - 20.0)


def test_the_driver_is_not_asked_for_memory() -> None:
    def step(build: ChromeTrace) -> None:
        build.op("aten::relu", 20.0, 10.0)
        build.spend("cuda_runtime", "cudaMalloc", 50.0, correlation=5)

    view = viewed(step)
    assert us_of(MemoryPool(), view) == pytest.approx(view.breakdown.wall_us - 50.0)


def test_dispatching_without_delay() -> None:
    view = viewed(lambda build: small_kernels(build)())
    left = view.breakdown.wall_us - view.breakdown.us("dispatch")
    assert us_of(InferenceMode(), view) == pytest.approx(left)
    assert us_of(CpuAffinity(), view) == pytest.approx(90.0)


def test_in_place_takes_the_same_time() -> None:
    view = viewed(product_and_passes)
    found = bound(Inplace(), view)
    assert found.us == view.breakdown.wall_us
    assert "time unchanged" in found.text


# --- copies and loaders ------------------------------------------------------------------------------------------


def copying(build: ChromeTrace, kind: str = "Pageable") -> None:
    """10 MiB to the device at 5 GB/s, then a kernel; the host waits for both."""
    build.copy(f"Memcpy HtoD ({kind} -> Device)", 10 * 2**20 / 5e3, 10 * 2**20)
    build.op("aten::relu", 20.0, 300.0)
    build.synchronise()


def test_a_copy_from_pinned_memory_is_as_fast_as_that_is() -> None:
    assert us_of(PinnedMemory(), viewed(copying)) == pytest.approx(300 + MARGIN * 10 * 2**20 / 50e3)


def test_a_prefetched_copy_is_hidden() -> None:
    view = viewed(lambda build: copying(build, "Pinned"))
    queued = view.breakdown.us("launch_gap") + view.breakdown.us("other")
    assert us_of(Prefetch(), view) == pytest.approx(view.breakdown.wall_us - 10 * 2**20 / 5e3 - queued)


def test_where_nothing_is_copied_pinned_memory_knows_nothing() -> None:
    assert PinnedMemory().bound(viewed(product_and_passes), CARD) is None


def test_workers_share_the_time_of_a_loader() -> None:
    view = viewed(loading)
    assert us_of(PinnedMemory(workers=2), view) == pytest.approx(200.0)
    assert us_of(PinnedMemory(workers=100), view) == pytest.approx(50.0), "of the device"


def test_workers_share_the_time_of_a_loader_on_a_cpu() -> None:
    def step(build: ChromeTrace) -> None:
        build.spend("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 400.0)
        build.host += 1.0
        build.spend("cpu_op", "aten::relu", 100.0, **{"External id": 1})

    view = viewed(step)
    assert us_of(PinnedMemory(workers=2), view) == pytest.approx(200.0, rel=0.01)
    assert us_of(PinnedMemory(workers=8), view) == pytest.approx(view.breakdown.wall_us - 400.0)


def test_chunks_run_beside_their_copies() -> None:
    """The longest way is the product, whose work is the card's."""

    def step(build: ChromeTrace) -> None:
        build.copy("Memcpy HtoD (Pinned -> Device)", 500.0, 25 * 10**6)
        build.op("aten::mm", 10.0, FLOP / 40e6, "gemm", **PRODUCT)
        build.copy("Memcpy DtoH (Device -> Pinned)", 400.0, 20 * 10**6)

    view = viewed(step)
    assert us_of(Streams(), view) == pytest.approx(MARGIN * FLOP / 50e6)
    assert us_of(Streams(), view, replace(CARD, matrix={})) == pytest.approx(25e6 / 55e9 * 1e6)


# --- kernels -----------------------------------------------------------------------------------------------------


def test_branches_share_the_card() -> None:
    """Two products that each use a fifth of it; none is shorter than it is."""

    def step(build: ChromeTrace) -> None:
        for _ in range(2):
            build.op("aten::mm", 5.0, FLOP / 10e6, "gemm", **PRODUCT)

    view = viewed(step)
    saved = 2 * FLOP / 10e6 - FLOP / 10e6
    assert us_of(Streams(mode="branches"), view) == pytest.approx(view.breakdown.wall_us - saved)
    together = 2 * MARGIN * FLOP / 50e6
    assert us_of(Streams(mode="split"), view) == pytest.approx(view.breakdown.wall_us - 2 * FLOP / 10e6 + together)


def test_products_in_16_bits_and_half_of_the_bytes() -> None:
    view = viewed(product_and_passes)
    saved = FLOP / 40e6 - MARGIN * FLOP / 800e6 + 3 * PASS_US / 0.8 / 2
    assert us_of(Amp(), view) == pytest.approx(view.breakdown.wall_us - saved)


def test_what_is_in_16_bits_stays() -> None:
    product = tensors([SIDE, SIDE], [SIDE, SIDE], kind="c10::BFloat16")
    view = viewed(lambda build: build.op("aten::mm", 10.0, 300.0, "gemm", **product))
    assert us_of(Amp(), view) == pytest.approx(view.breakdown.wall_us)


def test_products_in_tf32() -> None:
    view = viewed(product_and_passes)
    assert us_of(Tf32(), view) == pytest.approx(view.breakdown.wall_us - FLOP / 40e6 + MARGIN * FLOP / 400e6)
    already = viewed(lambda build: build.op("aten::mm", 10.0, 300.0, "sm80_xmma_gemm_tf32", **PRODUCT))
    assert us_of(Tf32(), already) == pytest.approx(already.breakdown.wall_us)


@pytest.mark.parametrize(("strategy", "rate"), [(Amp(), 800e6), (Tf32(), 400e6)], ids=["amp", "tf32"])
def test_a_product_of_several_kernels_is_a_product(strategy: Strategy, rate: float) -> None:
    """cuBLAS scales its result first, or splits the sum, where the matrices are small."""

    def scaled(build: ChromeTrace) -> None:
        begun = build.host
        build.op("aten::mm", 10.0, 1.0, "scal_kernel", **PRODUCT)
        build.event("cuda_runtime", "cudaLaunchKernel", begun + 8, 1.0, correlation=20_000 + build.id)
        shape = {"stream": 7, "grid": [1024, 1, 1], "block": [128, 1, 1], "correlation": 20_000 + build.id}
        build.event("kernel", "sgemm_largek", build.gpu, FLOP / 40e6, **{"External id": build.id}, **shape)
        build.gpu += FLOP / 40e6

    view = viewed(scaled)
    saved = view.breakdown.wall_us - us_of(strategy, view)
    assert saved == pytest.approx(1.0 + FLOP / 40e6 - MARGIN * FLOP / rate)


@pytest.mark.parametrize("strategy", [Amp(), Tf32()], ids=lambda s: s.name)
def test_without_ceilings_a_precision_knows_nothing(strategy: Strategy) -> None:
    assert strategy.bound(viewed(product_and_passes), None) is None


def test_a_chain_becomes_one_kernel() -> None:
    """The product stays; the passes between it and the next step read once and write once."""
    view = viewed(product_and_passes)
    assert us_of(Fusion(), view) == pytest.approx(FLOP / 40e6 + MARGIN * PASS_US)


def test_a_chain_ends_with_its_step() -> None:
    view = viewed(lambda build: build.op("aten::relu", 10.0, PASS_US / 0.8, "relu", **LONG))
    assert us_of(Fusion(), view) == pytest.approx(MARGIN * PASS_US)


def test_templates_do_the_rest_at_the_end_of_a_product() -> None:
    view = viewed(product_and_passes)
    for strategy in (Fusion(mode="max-autotune"), Fusion(backend="kernels")):
        assert us_of(strategy, view) == pytest.approx(MARGIN * FLOP / (400e6 / 3))  # of three TF32 products


def test_a_product_of_an_odd_size_may_be_padded() -> None:
    odd = tensors([4095, 4095], [4095, 4095])
    view = viewed(lambda build: build.op("aten::mm", 10.0, FLOP / 10e6, "gemm", **odd))
    assert us_of(Fusion(), view) == pytest.approx(MARGIN * 2 * 4095**3 / 50e6)


def test_compiled_code_launches_what_is_left() -> None:
    """Twenty products of 2 µs with a chain between them: 40 launches, each half of an empty one's 4 µs."""

    def step(build: ChromeTrace) -> None:
        for _ in range(20):
            build.op("aten::mm", 15.0, 2.0, "gemm", **tensors([64, 64], [64, 64]))
            build.op("aten::relu", 15.0, 2.0, "relu", **tensors([64, 64]))
            build.op("aten::neg", 15.0, 2.0, "neg", **tensors([64, 64]))

    view = viewed(step)
    assert us_of(Fusion(), view) == pytest.approx(40 * 2.0)
    assert us_of(Fusion(mode="reduce-overhead"), view) == pytest.approx(
        20 * 2.0 + 20 * MARGIN * 2 * 4 * 64**2 / 4e6, rel=0.01
    )


def test_parts_of_the_compiler_run_the_same_kernels() -> None:
    assert us_of(Fusion(backend="eager"), viewed(lambda build: small_kernels(build)())) == pytest.approx(90.0)


def test_products_remain_on_a_cpu() -> None:
    def step(build: ChromeTrace) -> None:
        build.spend("cpu_op", "aten::mm", 105.0, **{"External id": 1})
        build.spend("cpu_op", "aten::relu", 100.0, **{"External id": 2})

    assert us_of(Fusion(), viewed(step)) == pytest.approx(100.0)
    assert Fusion(mode="max-autotune").bound(viewed(step), CARD) is None


def test_updates_remain_on_a_cpu() -> None:
    def step(build: ChromeTrace) -> None:
        build.spend("cpu_op", "aten::relu", 100.0, **{"External id": 1})
        build.host += 1.0
        build.event("user_annotation", "Optimizer.step#Adam.step", build.host, 60.0)
        build.spend("cpu_op", "aten::add_", 60.0, **{"External id": 2})
        build.host += 1.0

    assert us_of(Fusion(mode="max-autotune"), viewed(step)) == pytest.approx(55.0)


def test_convolutions_remain_on_a_cpu_at_their_best() -> None:
    """Half of the time of their flops at the processor's rate: other algorithms need fewer."""
    order = {"Concrete Inputs": ["", "", "", "[0, 0]", "[1, 1]", "[1, 1]", "1"]}
    shapes = tensors([8, 16, 64, 64], [16, 16, 1, 1], [16])
    view = viewed(lambda build: build.spend("cpu_op", "aten::mkldnn_convolution", 900.0, **shapes, **order))
    flop = 2 * 8 * 16 * 64 * 64 * 16
    ceilings = Calibration("cpu", 1e10, {"float32": 1e11})
    assert us_of(Fusion(), view, ceilings) == pytest.approx(flop / 1e5 / 2)
    assert Fusion().bound(view, None) is None
    found = Fusion().bound(view, ceilings)
    assert found is not None
    assert "as they are, convolutions at the peak rate, " in found.text


def test_convolutions_of_images_at_the_ceiling() -> None:
    """3 × 3 over 64 channels in TF32, then a transpose, and a pass that any layout needs."""
    image, weight = [32, 64, 256, 256], [64, 64, 3, 3]
    order = {"Concrete Inputs": ["", "", "[1, 1]", "[1, 1]", "[1, 1]", "1"]}  # padding, stride, dilation
    flop = 2 * 32 * 64 * 256 * 256 * 64 * 9

    def step(build: ChromeTrace) -> None:
        build.op("aten::cudnn_convolution", 10.0, 2000.0, "conv", **tensors(image, weight), **order)
        build.op("aten::relu", 10.0, 500.0, "void nchwToNhwcKernel<float>", **tensors(image))
        build.op("aten::relu", 10.0, 500.0, "relu", **tensors(image))

    view = viewed(step)
    moved = (2 * 32 * 64 * 256 * 256 + 64 * 64 * 9) * 4
    least = MARGIN * max(flop / 400e6, moved / 4e6)
    assert us_of(ChannelsLast(), view) == pytest.approx(view.breakdown.wall_us - (2000.0 - least) - 500.0)


# --- several, and none -------------------------------------------------------------------------------------------


def test_a_stack_saves_what_its_members_save() -> None:
    view = viewed(lambda build: small_kernels(build)())
    parts = view.parts(CARD)
    graph, pool = bound(CudaGraph(), view), bound(MemoryPool(), view)
    both = parts.together([graph, pool])
    assert both is not None
    assert both.us == pytest.approx(90.0)
    assert parts.together([graph, Bound("of somebody else", 50.0)]) is None


def test_fusion_and_a_graph_leave_the_fused_kernels() -> None:
    def step(build: ChromeTrace) -> None:
        product_and_passes(build)
        build.spend("cpu_op", "aten::item", 20_000.0)
        build.synchronise()

    view = viewed(step)
    fusion, graph = bound(Fusion(), view), bound(CudaGraph(), view)
    both = view.parts(CARD).together([fusion, graph])
    assert both is not None
    assert graph.us == pytest.approx(WORK_US)
    assert both.us == pytest.approx(FLOP / 40e6 + MARGIN * PASS_US)


def test_what_two_save_twice_leaves_nothing() -> None:
    view = viewed(lambda build: build.op("aten::relu", 10.0, PASS_US, "relu", **LONG))
    halves = Bound("half", view.breakdown.wall_us * 0.4, view.parts(CARD).device_us * 0.4)
    assert view.parts(CARD).together([halves, halves]) is None


def test_another_implementation_may_be_as_fast_as_it_likes() -> None:
    assert Replace.bound is Strategy.bound
