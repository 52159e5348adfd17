"""The physical bound on both sides, operators beside the ceilings, and the host ahead of the device."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from optexp.comparison import measure
from optexp.profiling.bounds import fastest, physical
from optexp.profiling.points import ahead, points
from optexp.profiling.work import amount, work
from optexp.records.profile import Calibration
from optexp.records.roofline import Roofline, StepWork
from optexp.strategy import REASSOCIATES, precision
from optexp.trace import Op, Trace
from tests.profiling.conftest import LONG_VECTOR, MATRICES, ChromeTrace
from tests.profiling.recording import undisturbed

CARD = Calibration("card", 4e12, {"float32": 5e13, "tf32": 3e14, "bfloat16": 7e14, "float16": 7e14})
CPU = Calibration("cpu", 2e10, {"float32": 1e11, "bfloat16": 1e10})


def us(work: StepWork, given: str = "float32", promised: str | None = None, card: Calibration = CARD) -> float | None:
    return physical(work, card, given, promised).us


def test_the_longer_of_memory_and_arithmetic_is_the_bound() -> None:
    assert us(StepWork(3e9, 1e9)) == pytest.approx(0.9 * 1000)
    both = physical(StepWork(3e9, 1e9, {"bfloat16": 1.4e12}), CARD, "float16")
    assert both.compute_us == pytest.approx(0.9 * 1000)  # 8-bit numbers may pass by the limits of bfloat16
    assert both.us == max(both.memory_us, both.compute_us)
    assert physical(StepWork(3e9, 1e9), CARD, "float32").text.startswith("0.9 · (3 GB of inputs + 1 GB of state")


def test_what_the_cache_holds_from_step_to_step_costs_nothing() -> None:
    assert us(StepWork(3e9, 1e9, cache_bytes=2e9)) == pytest.approx(0.9 * 500)
    none = physical(StepWork(1e6, 1e6, cache_bytes=5e7), CARD, "float32")
    assert none.us is None
    assert "than the caches hold" in none.reason


@pytest.mark.parametrize(
    ("dtype", "promised", "rate"),
    [
        ("float32", None, 1e14),  # three products of tf32 in its place
        ("float32", "tf32", 3e14), ("float32", "bfloat16", 14e14), ("tf32", None, 3e14),
        ("bfloat16", None, 14e14), ("float16", None, 14e14), ("float64", None, 0.0), ("float32", "float16", 14e14),
    ],
)  # fmt: skip
def test_arithmetic_counts_at_the_fastest_rate_that_a_promise_allows(
    dtype: str, promised: str | None, rate: float
) -> None:
    assert fastest(dtype, CARD.matrix, promised, on_cpu=False) == pytest.approx(rate)


def test_a_promise_of_less_precision_narrows_state_and_no_input() -> None:
    assert us(StepWork(4e9, 0), promised="bfloat16") == us(StepWork(4e9, 0))
    assert us(StepWork(0, 4e9), promised="float16") == pytest.approx(0.9 * 500)
    assert us(StepWork(0, 4e9), promised="bfloat16") == pytest.approx(0.9 * 250)


def test_a_cpu_has_a_wider_margin_and_no_rate_of_16_bits() -> None:
    assert us(StepWork(2e7, 0), card=CPU) == pytest.approx(0.5 * 1000)
    assert us(StepWork(0, 0, {"bfloat16": 1e9}), "bfloat16", card=CPU) is None


def test_a_step_that_fake_tensors_cannot_run_has_no_number() -> None:
    found = physical(StepWork(reason="the step asks for a value"), CARD, "float32")
    assert (found.us, found.reason) == (None, "the step asks for a value")


@pytest.mark.parametrize(("gpu", "operation", "seconds"), [(True, False, 9e-4), (True, True, 1.8e-3), (False, True, 0)])
def test_the_floor_of_the_watchdog(gpu: bool, operation: bool, seconds: float) -> None:
    """A whole model's floor is the bound; a single operation has its own, too; a CPU has none."""
    session: Any = SimpleNamespace(
        calibration=CARD,
        machine=SimpleNamespace(gpu=object() if gpu else None),
        workload=SimpleNamespace(operation=operation, flops=None),
        experiment=SimpleNamespace(dtype="float32"),
        contract=REASSOCIATES,
        work=StepWork(3e9, 1e9),
    )
    baseline: Any = SimpleNamespace(call=lambda method: (8_000_000_000, 0))
    assert measure.floor(session, baseline) == pytest.approx(seconds)
    session.work, session.workload.operation = StepWork(reason="unknown"), False
    assert measure.floor(session, baseline) == 0
    session.work, session.contract = StepWork(0, 4e9), precision("float16")
    assert measure.floor(session, baseline) == pytest.approx(4.5e-4 if gpu else 0)


# --- formulas and points -----------------------------------------------------------------------------------------


OPS: dict[str, list[tuple[str, tuple[int, ...]]]] = {
    "aten::addmm": [("float32", (32,)), ("float32", (64, 16)), ("float32", (16, 32))],
    "aten::bmm": [("bfloat16", (3, 64, 16)), ("bfloat16", (3, 16, 32))],
    "aten::add": [("float32", (64, 32)), ("float16", (32,))],
    "aten::sum": [("float32", (64, 32))],
    "aten::copy_": [("float16", (64,)), ("float32", (64,))],
    "optexp.linear_gelu_forward": [("float32", (64, 16)), ("float32", (32, 16)), ("float32", (64, 32))],
}


@pytest.mark.parametrize("name", OPS)
def test_formulas_come_to_their_numbers(name: str) -> None:
    found = work(Op(name, 0, 1, inputs=tuple(OPS[name])))
    assert found is not None
    formula = found.traffic().rpartition(": ")[2].partition(" B =")[0]
    assert eval(formula.replace("·", "*")) == found.bytes
    assert found.traffic().endswith(f"= {amount(found.bytes)}B")
    if found.flops:
        assert eval(found.formula.replace("·", "*")) == found.flops
        assert found.arithmetic().endswith(f"= {amount(found.flops)}FLOP")


def test_formulas_of_convolutions_of_a_real_trace(tmp_path: Path) -> None:
    x, filters = torch.randn(2, 3, 20, 20), torch.randn(5, 3, 3, 3, requires_grad=True)
    trace = undisturbed(lambda: F.conv2d(x, filters, stride=2).sum().backward(), tmp_path / "t.json.gz")
    every = [work(op) for op in trace.ops if "conv" in op.name]
    found = [each for each in every if each is not None and each.flops]
    assert len(found) >= 2
    for each in found:
        assert eval(each.formula.replace("·", "*")) == each.flops


def test_operators_stand_below_the_ceilings(products: Trace, passes: Trace, card: Calibration) -> None:
    (gemm,) = points(products, card)
    assert gemm.rate == pytest.approx(45e12, rel=0.01)
    assert gemm.ceiling == 50e12
    assert gemm.intensity == pytest.approx(2 * 4096**3 / (3 * 4 * 4096**2))
    assert gemm.arithmetic == "2·4096·4096·4096 = 137 GFLOP"
    (add,) = points(passes, card)
    assert add.bandwidth == pytest.approx(3.6e12, rel=0.01)
    assert add.ceiling is None  # its arithmetic is no product
    assert add.flops == 2**26
    assert "reads float32[67108864] + float32[67108864], writes float32[67108864]" in add.traffic


def test_real_operators_share_the_time_of_the_host(tmp_path: Path) -> None:
    a = torch.randn(256, 256)
    trace = undisturbed(lambda: (a @ a).relu().mean(), tmp_path / "t.json.gz")
    found = {point.name: point for point in points(trace, CPU)}
    assert found["aten::mm"].flops == 2 * 256**3
    assert found["aten::mm"].calls == 1
    assert "aten::mean" not in found or "aten::sum" not in found  # one of both does the work
    assert sum(point.share for point in found.values()) <= 1


def test_times_leave_with_a_verdict_and_formulas_stay(products: Trace, card: Calibration) -> None:
    shown = Roofline(physical(StepWork(3e9, 1e9), CARD, "float32"), points(products, card), ahead(products)).untimed()
    assert shown.bound is not None
    assert shown.bound.us
    assert shown.ahead is None
    assert [(p.us, p.rate, p.share) for p in shown.points] == [(None, None, 0.0)]
    assert shown.points[0].traffic


def test_the_host_runs_ahead_by_what_lies_between_launch_and_kernel(chrome: type[ChromeTrace]) -> None:
    build = chrome()
    trace = build.steps(lambda: [build.op("aten::mm", 10.0, 100.0, **MATRICES) for _ in range(4)] and None, count=1)
    found = ahead(trace)
    assert found is not None
    assert found.launches == 4
    # launches at 5, 15, 25, 35 µs; kernels from 8 µs on, one every 100 µs
    assert found.most_us == pytest.approx(308 - 35)
    assert found.median_us == pytest.approx((93 + 183) / 2)
    captured = chrome()
    assert ahead(captured.steps(lambda: captured.graph(10, 2.0))) is None


def test_a_pass_over_memory_is_named_in_bytes() -> None:
    assert re.fullmatch(r"37\.7 M", amount(37_748_736))
    assert amount(12) == "12 "
    assert LONG_VECTOR
