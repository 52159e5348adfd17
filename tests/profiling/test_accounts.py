"""Accounts add up to the step, whatever a trace holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from optexp.profiling.accounts import Account, accounts
from optexp.profiling.breakdown import breakdown
from tests.profiling.conftest import ChromeTrace

Step = Callable[[ChromeTrace], None]


def of(step: Step) -> dict[str, Account]:
    """Accounts of a step, which add up to it."""
    build = ChromeTrace()
    trace = build.steps(lambda: step(build))
    split = breakdown(trace)
    found = accounts(trace, split)
    assert sum(account.us for account in found.values()) == pytest.approx(split.wall_us)
    return found


def test_a_custom_operator_is_no_gap() -> None:
    found = of(lambda build: build.op("mylib::foo", 20.0, 300.0, "foo"))
    assert found["other kernels"].us == pytest.approx(300.0)


def test_a_custom_operator_has_the_account_of_its_kernels_name() -> None:
    assert of(lambda build: build.op("mylib::foo", 20.0, 300.0, "rms_norm"))["normalization"].us == 300.0


def test_a_custom_operator_on_a_cpu_is_no_gap() -> None:
    found = of(lambda build: build.spend("cpu_op", "mylib::foo", 300.0))
    assert found["other operators"].us == pytest.approx(300.0)


def test_kernels_that_ran_while_compiling_count_beside_its_gaps() -> None:
    def step(build: ChromeTrace) -> None:
        build.event("cpu_op", "compile_inner (dynamo_timed)", build.host, 25.0)
        build.op("aten::mm", 20.0, 300.0, "gemm")
        build.host += 5.0

    assert of(step)["compilation"].us >= 300.0


@pytest.mark.parametrize(
    ("name", "account"),
    [
        ("MyFunction", "python"),
        ("autograd::engine::evaluate_function: MyFunctionBackward", "python"),
        ("aten::nonzero", "operators on the host"),
    ],
)
def test_python_inside_an_autograd_function_is_python(name: str, account: str) -> None:
    def step(build: ChromeTrace) -> None:
        build.event("cpu_op", name, build.host, 1000.0)
        build.host += 950.0
        build.op("aten::mm", 20.0, 100.0, "gemm")
        build.host += 30.0

    found = of(step)
    assert found[account].us > 800.0
    assert sum(found[kind].us for kind in ("python", "operators on the host") if kind in found) == found[account].us
