"""Traces of different steps that contradict each other are told apart from those that agree."""

from __future__ import annotations

from optexp.profiling.passes import disagreement
from optexp.trace import Trace
from tests.profiling.conftest import ChromeTrace


def trace(pool_us: float) -> Trace:
    build = ChromeTrace()

    def step() -> None:
        build.spend("cpu_op", "aten::conv2d", 100.0)
        build.spend("cpu_op", "aten::linear", 20.0)
        build.spend("cpu_op", "aten::max_pool2d", pool_us)

    return build.steps(step)


def test_shares_of_different_passes_are_held_against_each_other() -> None:
    assert disagreement([trace(10.0), trace(12.0)]) == ""
    assert disagreement([trace(10.0)]) == ""
    said = disagreement([trace(100.0), trace(12.0), trace(2.0)])
    assert said.endswith("aten::max_pool2d takes 45 % of the operators' time in one and 2 % in another")
