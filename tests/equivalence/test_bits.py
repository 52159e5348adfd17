"""A promise of equal bits is checked tensor by tensor, whatever the baseline does not repeat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from random import SystemRandom

import pytest
import torch
from torch import Tensor, nn

from optexp.equivalence import bits
from optexp.program import Program
from optexp.strategy import BITWISE, REASSOCIATES
from optexp.workloads.softmax import Softmax

RANDOM = SystemRandom()  # which nobody can put back


class Two(nn.Module):
    """Two results: a sum in another order every time, as by atomics, and one that is steady.

    obeys: deterministic algorithms give the first one order, too
    every: so many calls one takes another order
    """

    def __init__(self, obeys: bool = False, every: int = 1) -> None:
        super().__init__()
        self.obeys, self.every = obeys, every

    def total(self, x: Tensor) -> Tensor:
        settled = self.obeys and torch.are_deterministic_algorithms_enabled()
        if settled or (call := RANDOM.randrange(2**30)) % self.every:
            return x.sum(1)
        order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(call))
        return x[:, order].sum(1)

    def steady(self, x: Tensor) -> Tensor:
        return x.mean(1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"total": self.total(x), "steady": self.steady(x)}


def workload(**options: object) -> Softmax:
    class Summing(Softmax):
        def model(self) -> nn.Module:
            return Two(**options)  # type: ignore[arg-type]

    return Summing(rows=64, columns=256)


def with_method(name: str, method: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[Program], Program]:
    def change(program: Program) -> Program:
        setattr(program.model, name, lambda x: method(program.model, x))
        return program

    return change


def by_halves(model: nn.Module, x: Tensor) -> Tensor:
    return (x[:, :128].sum(1) + x[:, 128:].sum(1)) / 256


def by_parity(model: nn.Module, x: Tensor) -> Tensor:
    return x[:, ::2].sum(1) + x[:, 1::2].sum(1)


def test_only_what_varies_is_left_to_rounding(check) -> None:
    found = check(workload(), contract=BITWISE, seeds=3)
    assert found.ok, found.headline
    assert found.unchecked_bits == ["output.total"]
    assert found.headline.endswith("so that rounding alone was checked there")
    assert "could not be checked for output.total: runs of one step give others" in found.headline
    steady = check(workload(), with_method("steady", by_halves), BITWISE, seeds=3)
    assert not steady.ok
    assert {(m.tensor, m.gate) for m in steady.failures} == {("output.steady", "BITWISE")}
    assert check(workload(), with_method("steady", by_halves), REASSOCIATES, seeds=3).ok


def test_deterministic_algorithms_give_bits_to_compare_with(check) -> None:
    found = check(workload(obeys=True), contract=BITWISE, seeds=3)
    assert found.ok, found.headline
    assert found.unchecked_bits == []
    assert not found.repeats
    other = check(workload(obeys=True), with_method("total", by_parity), BITWISE, seeds=3)
    assert not other.ok
    assert {(m.tensor, m.gate) for m in other.failures} == {("output.total", "BITWISE")}
    assert "under torch.use_deterministic_algorithms" in other.headline


def test_what_seldom_varies_is_no_candidates_fault(check) -> None:
    found = check(workload(every=11), contract=BITWISE, seeds=5)
    assert found.ok, found.headline
    assert found.unchecked_bits in ([], ["output.total"])  # where no run of both met another order, bits were equal


def test_other_bits_in_one_run_alone_break_no_promise(check, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike those of every run, or of every second one."""
    monkeypatch.setattr("optexp.equivalence.observation.OUTLIVED", (4, 4))

    def now_and_then(odd: Callable[[int], bool]) -> Callable[[nn.Module, Tensor], Tensor]:
        calls = count()
        return lambda model, x: by_parity(model, x) if odd(next(calls)) else x.sum(1)

    once = check(workload(every=10**9), with_method("total", now_and_then(lambda call: call == 7)), BITWISE)
    assert once.ok, once.headline
    assert once.unchecked_bits == ["output.total"]
    often = check(workload(every=10**9), with_method("total", now_and_then(lambda call: call % 2 == 1)), BITWISE)
    assert [m.gate for m in often.failures] == ["BITWISE"] * len(often.failures) != []


def test_a_baseline_that_varies_beside_the_candidate_alone_varies(check, monkeypatch: pytest.MonkeyPatch) -> None:
    """As atomics do on a card that was idle while the baseline's steps were repeated."""
    monkeypatch.setattr(bits, "varying", lambda *_: [])
    found = check(workload(), contract=BITWISE)
    assert found.ok, found.headline
    assert found.unchecked_bits == ["output.total"]
    steady = check(workload(), with_method("steady", by_halves), BITWISE)
    assert {(m.tensor, m.gate) for m in steady.failures} == {("output.steady", "BITWISE")}


def test_of_a_steady_baseline_every_bit_is_compared(check) -> None:
    assert check(workload(every=10**9), contract=BITWISE).headline.count("bit for bit") == 1
    found = check(workload(every=10**9), with_method("total", by_parity), BITWISE)
    assert [m.gate for m in found.failures] == ["BITWISE"]
    assert found.repeats


class Scattered(nn.Module):
    """Rows are added to the row that they belong to: on a GPU by atomics, in any order."""

    def forward(self, x: Tensor) -> Tensor:
        owner = torch.arange(len(x), device=x.device) % 4
        return torch.zeros(4, x.shape[1], device=x.device, dtype=x.dtype).index_add(0, owner, x)


class InHalves(Scattered):
    """The same sums in an order of its own, which rounds otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        half = len(x) // 2
        return super().forward(x[:half]) + super().forward(x[half:])


@pytest.mark.gpu
def test_atomics_of_a_gpu_have_deterministic_bits(check) -> None:
    class Summing(Softmax):
        def model(self) -> nn.Module:
            return Scattered()

    cuda = torch.device("cuda")
    found = check(Summing(rows=8192, columns=256), contract=BITWISE, seeds=3, device=cuda)
    assert found.ok, found.headline
    assert not found.repeats
    assert found.unchecked_bits == []

    def change(program: Program) -> Program:
        program.model.forward = InHalves().forward
        return program

    other = check(Summing(rows=8192, columns=256), change, BITWISE, seeds=3, device=cuda)
    assert {m.gate for m in other.failures} == {"BITWISE"}


@pytest.mark.parametrize("enabled", [False, True])
def test_the_setting_is_put_back(enabled: bool) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(enabled)
        with bits.deterministic():
            assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled() is enabled
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(before)


def test_another_result_is_told_before_other_bits(check, net):
    """A step that starts from a wrong gradient has an update with other bits, which is right for that gradient."""

    def larger(program):
        loss = program.loss
        return replace(program, loss=lambda output, batch: loss(1.01 * output, batch))

    found = check(net(mode="train", optim="sgd"), larger, BITWISE, seeds=1, steps=1)
    assert {"BITWISE", "G1"} <= {failed.gate for failed in found.failures}
    assert "within rounding" not in found.headline
    assert found.worst.gate == "G1"
