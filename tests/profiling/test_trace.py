"""Traces made on this CPU, and traces as a GPU makes them."""

import gc
import gzip
import json
import math
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from optexp.measurement.recorder import BRIEF_S, LONGEST_S
from optexp.profiling.breakdown import breakdown
from optexp.trace import STEP, Trace, record, short_name

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """Forward and backward of a small MLP: the path of the trace, and how often a step ran in all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    inputs, ran = torch.randn(32, 64), []

    def step():
        ran.append(1)
        for parameter in model.parameters():
            parameter.grad = None
        model(inputs).square().mean().backward()

    path = tmp_path_factory.mktemp("trace") / "cpu.json.gz"
    record(step, 5, path, CPU)
    return path, len(ran)


def test_only_marked_steps_are_in_a_recorded_trace(training):
    path, ran = training
    trace = Trace.read(path)
    assert len(trace.steps) == 5 < ran
    assert sum(op.name == "aten::addmm" for op in trace.ops) == 2 * 5  # two layers
    assert sum(op.name == "aten::mm" for op in trace.ops) == 3 * 5  # gradients: two of weights, one of an input
    assert trace.op_dtypes(("aten::addmm", "aten::mm")) == {"float32": 25}
    assert trace.timed_us is not None
    assert trace.timed_us > 0


def test_shapes_and_self_times(training):
    trace = Trace.read(training[0])
    first = next(op for op in trace.ops if op.name == "aten::addmm")
    assert first.inputs[:3] == (("float32", (128,)), ("float32", (32, 64)), ("float32", (64, 128)))
    assert all(0 <= op.self_us <= op.duration for op in trace.ops)
    linear = next(op for op in trace.ops if op.name == "aten::linear")
    assert linear.self_us < linear.duration
    # Every moment inside the operators of one thread belongs to exactly one of them.
    outermost = [op for op in trace.ops if not any(o.start < op.start and op.end < o.end for o in trace.ops)]
    assert math.isclose(sum(op.self_us for op in trace.ops), sum(op.duration for op in outermost), rel_tol=1e-3)


def test_top_ops_are_per_step(training):
    trace = Trace.read(training[0])
    rows, whole = trace.top_ops(100), sum(step.duration for step in trace.steps)
    assert {row.name: row.calls for row in rows}["aten::addmm"] == 2
    assert [row.us for row in rows] == sorted((row.us for row in rows), reverse=True)
    assert math.isclose(sum(row.share for row in rows), sum(op.self_us for op in trace.ops) / whole, rel_tol=1e-6)
    assert sum(row.share for row in rows) <= 1.001


def test_peak_counts_what_steps_allocate(tmp_path):
    def step():
        big = torch.ones(2**20)  # 4 MiB
        return (big * 2).sum()  # and 4 MiB beside it

    record(step, 5, tmp_path / "memory.json.gz", CPU)
    peak = Trace.read(tmp_path / "memory.json.gz").peak_cpu_bytes
    assert peak is not None
    assert 8 * 2**20 <= peak < 9 * 2**20


def test_a_cpu_trace_says_that_the_gpu_did_nothing(training):
    trace = Trace.read(training[0])
    parts = breakdown(trace)
    assert not trace.has_gpu
    assert parts.busy is parts.kernels is parts.launches is None
    assert "gpu_busy" not in parts.metrics()
    assert math.isclose(sum(parts.terms.values()), 1, abs_tol=0.01)
    assert parts.terms["matrix"] > 0


def test_a_step_without_operators_is_an_answer(tmp_path):
    record(lambda: sum(range(2000)), 3, tmp_path / "idle.json.gz", CPU)
    parts = breakdown(Trace.read(tmp_path / "idle.json.gz"))
    assert parts.terms == {"outside_ops": 1.0}


def test_a_trace_without_steps_is_refused(tmp_path):
    path = tmp_path / "empty.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": []}, file)
    with pytest.raises(ValueError, match=STEP):
        Trace.read(path)


def test_kernels_meet_their_launch_and_operator(eager):
    assert {k.name for k in eager.kernels} == {"void add<4>"}  # what ran before the first step is left out
    assert len(eager.kernels) == 45 * 5
    kernel = eager.kernels[7]
    assert kernel.op is eager.ops[7]
    assert kernel.launch is eager.api[7]
    assert not kernel.in_graph
    assert kernel.blocks == 16
    assert eager.calls("cudaLaunchKernel") == 45
    assert eager.calls("cudaDeviceSynchronize") == 0  # the one after the last step is ours
    assert eager.multiprocessors == 132


def test_launches_through_the_driver_count(chrome):
    build = chrome(driver=True)
    trace = build.steps(lambda: build.op("triton_poi_fused_add_0", 10.0, 5.0, "triton_poi_fused_add_0"))
    assert trace.calls("cuLaunchKernelEx") == 1
    assert trace.kernels[0].launch is not None
    assert breakdown(trace).launches == 1


def test_kernels_of_a_graph_know_it(captured):
    assert captured.calls("cudaGraphLaunch") == 1
    assert all(k.in_graph and k.op is None for k in captured.kernels)
    parts = breakdown(captured)
    assert (parts.kernels, parts.launches, parts.graph_launches, parts.graph_kernels) == (45, 1, 1, 45)


def test_versioned_names_of_calls(chrome):
    build = chrome()
    trace = build.steps(lambda: build.spend("cuda_runtime", "cudaGraphLaunch_ptsz_v10000", 5.0, correlation=1))
    assert trace.calls("cudaGraphLaunch") == 1


def test_copies(feeding):
    assert {(c.kind, c.pageable, c.bytes) for c in feeding.copies} == {("HtoD", True, 2**20)}


def test_top_kernels(feeding):
    rows = feeding.top_kernels(2)
    assert (rows[0].name, rows[0].calls, round(rows[0].us)) == ("gemm", 1, 300)
    assert len(rows) == 2
    assert math.isclose(rows[0].share, 300 / 500)


@pytest.mark.parametrize(
    ("long", "short"),
    [
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
            "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)",
            "vectorized_elementwise_kernel<CUDAFunctor_add>",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&, "
            "at::native::GeluType)::{lambda()#1}::operator()() const::{lambda(float)#1}, std::array<char*, 2ul> >(int)",
            "vectorized_elementwise_kernel<GeluCUDAKernelImpl>",
        ),
        ("triton_poi_fused_gelu_0", "triton_poi_fused_gelu_0"),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)"),
        (
            "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize64x64x8",
            "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize64x64x8",
        ),
        (
            "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>"
            "(cutlass_80_simt_sgemm_256x128_8x4_nn_align1::Params)",
            "cutlass_80_simt_sgemm_256x128_8x4_nn_align1",
        ),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, 5>(float*)", "softmax_warp_forward"),
    ],
)
def test_short_names(long, short):
    assert short_name(long) == short


def test_reading_collects_no_garbage(tmp_path):
    """Each collection looks at every object made before: two thirds of the time to read a long trace."""
    events = [{"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": t, "dur": 0.5, "args": {}} for t in range(20_000)]
    step = {"ph": "X", "cat": "user_annotation", "name": STEP, "ts": 0, "dur": 20_000}
    path, collections = tmp_path / "trace.json", list[str]()
    path.write_text(json.dumps({"traceEvents": [step, *events]}))
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        assert len(Trace.read(path).ops) == 20_000
    finally:
        gc.callbacks.pop()
    assert len(collections) <= 2  # one, as soon as reading has ended
    assert gc.isenabled()


@pytest.mark.parametrize(("step_s", "longest_s", "traced"), [(0.2, BRIEF_S, 2), (0.05, LONGEST_S, 4)])
def test_of_slow_steps_a_brief_look_traces_few(step_s: float, longest_s: float, traced: int, tmp_path: Path) -> None:
    record(lambda: time.sleep(step_s), 4, tmp_path / "t.json.gz", CPU, longest_s=longest_s)
    assert len(Trace.read(tmp_path / "t.json.gz").steps) == traced


def test_of_steps_with_very_many_operators_few_are_traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x = torch.ones(4)

    def step() -> None:
        for _ in range(300):
            x.add(1)

    monkeypatch.setattr("optexp.measurement.recorder.DENSE_S", 0.0)
    for most, traced in ((300, 1), (10**9, 4)):
        monkeypatch.setattr("optexp.measurement.recorder.MOST_EVENTS", most)
        record(step, 4, tmp_path / "t.json.gz", CPU)
        assert len(Trace.read(tmp_path / "t.json.gz").steps) == traced
