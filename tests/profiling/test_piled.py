"""Work that one step does for several shows in its trace; steps that are alike, or differ in both arms, do not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from optexp.profiling.piled import lightest, piled_up, tells, usual, work
from optexp.trace import Call, Kernel, Op, Span, Trace


def traced(counts: Sequence[int], on_gpu: bool = False, us: float = 10.0) -> Trace:
    """Steps of 100 µs; of each, so many operators, or kernels that run much later than they were launched."""
    steps = tuple(Span("optexp.step", 100.0 * index, 100.0) for index in range(len(counts)))
    at = [100.0 * index + which for index, count in enumerate(counts) for which in range(count)]
    ops = tuple(Op("aten::mm", start, 1.0) for start in at)
    if not on_gpu:
        return Trace(steps, ops=ops)
    launches = [Span("cudaLaunchKernel", start, 1.0) for start in at]
    return Trace(steps, tuple(Kernel("gemm", 5e3 + 20.0 * i, us, launch=call) for i, call in enumerate(launches)))  # type: ignore[arg-type]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_work_belongs_to_the_step_that_asked_for_it(on_gpu: bool) -> None:
    assert work(traced([3, 1, 2], on_gpu)) == ([30.0, 10.0, 20.0] if on_gpu else [3.0, 1.0, 2.0])


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(
    "counts",
    [[40, 0, 0, 0, 40], [0, 0, 40, 0, 0], [40, 0], [0, 40], [41, 1, 1, 1, 41], [10, 10, 20, 0, 10], [9, 9, 9, 1]],
)
def test_a_block_that_one_step_computes(counts: Sequence[int], on_gpu: bool) -> None:
    found = piled_up(work(traced([10] * 5, on_gpu)), work(traced(counts, on_gpu)))
    assert found is not None
    assert "one step computes those of several" in found


@pytest.mark.parametrize("counts", [[10] * 5, [10], [3, 3], [10, 12, 9, 10, 14], [30, 10, 10, 10, 10]])
def test_steps_that_are_alike(counts: Sequence[int]) -> None:
    assert piled_up([10] * 5, counts) is None


def test_a_kernel_that_waited_on_a_shared_card_counts_as_the_others_of_its_name() -> None:
    trace = traced([2] * 5, on_gpu=True)
    one, *others = trace.kernels
    assert work(replace(trace, kernels=(replace(one, duration=5e3), *others))) == work(trace)


def test_steps_that_differ_in_the_baseline_too() -> None:
    """As an optimizer that steps every fourth time."""
    assert lightest([100, 2, 2, 2, 2]) < 0.1
    assert piled_up([100, 2, 2, 2, 2], [50, 1, 1, 1, 1]) is None


@pytest.mark.parametrize(("counts", "turn"), [([0] * 5, 4), ([10] * 3, 4), ([], 1)])
def test_a_trace_without_work_or_of_a_part_of_a_turn_tells_nothing(counts: Sequence[int], turn: int) -> None:
    assert not tells(work(traced(counts)), turn)


def test_ten_thousand_kernels_of_a_kind_take_no_minutes() -> None:
    """As of a recurrent step: the median of a kind is computed once, not for each kernel."""
    launches = [Call("cudaLaunchKernel", float(at), 1.0) for at in range(20_000)]
    kernels = [Kernel("cell", float(at), 1.0 + at % 3, launch=launch) for at, launch in enumerate(launches)]
    began = time.perf_counter()
    assert {us for _, us in usual(kernels)} == {2.0}
    assert time.perf_counter() - began < 5.0
