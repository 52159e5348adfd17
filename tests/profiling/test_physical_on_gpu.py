"""On a GPU: no honest step is faster than its bound, and a step that leaves its work out is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from optexp.api import compose
from optexp.config import resolve
from optexp.measurement import clock
from optexp.measurement.watchdogs import WATCHDOGS, impossible
from optexp.profiling.bounds import physical
from optexp.profiling.calibration import calibrate
from optexp.profiling.points import ahead, points
from optexp.strategy import Composed
from optexp.strategy import compose as fold
from optexp.trace import Trace, record
from optexp.workers.arm_bound import cache_bytes, fake_work
from tests.measurement.samples import constant, made

pytestmark = pytest.mark.gpu

LARGE_MLP = "mlp workload.dim=4096 workload.batch_size=4096"
WORKLOADS = (
    "mlp", LARGE_MLP, f"{LARGE_MLP} workload.mode=train", f"{LARGE_MLP} workload.mode=forward_backward",
    "lenet5 workload.mode=train workload.batch_size=4096", "add", "add workload.mode=forward_backward", "matmul",
    "matmul workload.mode=forward_backward", "gelu workload.variant=functional", "softmax", "layernorm_linear",
    "linear_gelu", "branches", "elementwise", "causal_lm", "bert", "vision",
)  # fmt: skip
STRATEGIES = ("none", "tf32", "amp", "fusion", "amp,fusion", "fusion strategy.fusion.backend=kernels", "inplace")


def built(workload: str, strategy: str = "none", dtype: str = "float32") -> tuple[Any, Any, Any, Any]:
    """The plain program and the one with a stack, one batch, and the stack; skipped where the stack does not apply."""
    words = [f"workload={word}" if index == 0 else word for index, word in enumerate(workload.split())]
    names, *options = strategy.split()
    stack_of: dict[str, dict[str, Any]] = {name: {} for name in names.split(",") if name != "none"}
    experiment = resolve(compose([*words, *options, f"dtype={dtype}", "device=cuda"], stack_of, {}))
    chosen, device = experiment.workload.resolve("cuda"), torch.device("cuda")
    plain = chosen.build(device, getattr(torch, dtype), 0)
    batch = chosen.batches(torch.Generator(device).manual_seed(0), 1)[0]
    batch = tuple(t.to(getattr(torch, dtype)) if t.is_floating_point() else t for t in batch)
    optimized = chosen.build(device, getattr(torch, dtype), 0)
    stack = Composed(experiment.strategies)
    for member in fold(stack):
        if reason := member.unsupported(optimized, device):
            pytest.skip(f"{member.name}: {reason}")
        optimized.feed.reset([batch])
        optimized, _ = member.apply(optimized)
    return plain, optimized, batch, stack


def quickest_us(program: Any, batch: Any) -> float:
    """A step of several blocks, the quickest one; the device alone."""
    for _ in range(5):
        program.step(program, batch)
    return 1e6 * min(clock.device_step_s(lambda: program.step(program, batch), 20, program.device) for _ in range(5))


def bound(plain: Any, batch: Any, dtype: str, promised: str | None) -> Any:
    device = torch.device("cuda")
    work = replace(fake_work(plain, batch), cache_bytes=float(cache_bytes(device)))
    return physical(work, calibrate(device), dtype, promised)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_no_plain_step_is_faster_than_its_bound(workload: str, dtype: str) -> None:
    plain, _, batch, _ = built(workload, dtype=dtype)
    found, measured = bound(plain, batch, dtype, None), quickest_us(plain, batch)
    assert found.us is None or found.us <= measured, f"{found.us:.1f} µs of {measured:.1f} µs: {found.text}"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize("workload", ["matmul", "linear_gelu", "gelu", LARGE_MLP, f"{LARGE_MLP} workload.mode=train"])
def test_no_strategy_is_faster_than_its_bound(workload: str, strategy: str) -> None:
    plain, optimized, batch, stack = built(workload, strategy)
    found, measured = bound(plain, batch, "float32", stack.contract.dtype), quickest_us(optimized, batch)
    assert found.us is None or found.us <= measured, f"{found.us:.1f} µs of {measured:.1f} µs: {found.text}"


@pytest.mark.parametrize("workload", ["add", "matmul", LARGE_MLP])
def test_a_close_bound_is_reached_by_a_quarter_at_least(workload: str) -> None:
    """Else it would catch nobody. The bound of a GEMM allows for 8-bit numbers, of twice bfloat16's rate."""
    plain, _, batch, _ = built(workload, dtype="bfloat16")
    found, measured = bound(plain, batch, "bfloat16", None), quickest_us(plain, batch)
    assert found.us is not None, found.reason
    assert found.us > measured / 4, f"{found.us:.1f} µs of {measured:.1f} µs: {found.text}"


def test_a_step_that_leaves_its_layers_out_is_refused() -> None:
    plain, _, batch, _ = built(LARGE_MLP)
    found, honest = bound(plain, batch, "float32", None), quickest_us(plain, batch)
    kept = plain.step(plain, batch)

    def skipping() -> object:
        return {name: tensor.clone() for name, tensor in kept.items()}

    skipped = 1e6 * min(clock.device_step_s(skipping, 20, plain.device) for _ in range(5))
    samples = made(constant(honest / 1e6), constant(skipped / 1e6))
    samples[-1].floor_s = found.us / 1e6
    assert impossible(samples).refuses, f"{skipped:.1f} µs beside a bound of {found.us:.1f} µs"
    samples = made(constant(honest / 1e6), constant(0.9 * honest / 1e6))
    samples[-1].floor_s = found.us / 1e6
    assert impossible(samples).ok, f"{0.9 * honest:.1f} µs beside a bound of {found.us:.1f} µs"
    assert impossible in WATCHDOGS


def test_operators_of_a_real_trace_stay_below_the_ceilings(tmp_path: Path) -> None:
    plain, _, batch, _ = built(LARGE_MLP)
    record(lambda: plain.step(plain, batch), 5, tmp_path / "t.json.gz", plain.device)
    trace, card = Trace.read(tmp_path / "t.json.gz"), calibrate(plain.device)
    found = {point.name: point for point in points(trace, card)}
    gemm = found.get("aten::addmm") or found["aten::_addmm_activation"]
    assert gemm.rate is not None, f"no rate of {gemm}"
    assert gemm.ceiling is not None, f"no ceiling of {gemm}"
    assert 0.3 < gemm.rate / gemm.ceiling < 1.15, f"{gemm.rate:.3g} of {gemm.ceiling:.3g} FLOP/s"
    hosts = ahead(trace)
    assert hosts is not None
    assert 0 < hosts.median_us <= hosts.most_us
