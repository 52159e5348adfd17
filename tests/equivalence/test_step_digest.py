"""What a timed step left is what the same steps leave again: for honest steps, however they round."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from math import nan

import pytest
import torch

from optexp.equivalence.missed import End
from optexp.equivalence.step_digest import FLOOR, Digest, astray, digest, unsteady
from optexp.records.verification import Finding
from optexp.verification.recheck import repeated
from optexp.workers.arm import Arm
from optexp.workers.client import InProcess
from optexp.workers.spec import Spec
from optexp.workloads.mlp import Mlp


def made(mode: str, noise: float = 0.0) -> Arm:
    """An arm whose steps move every parameter by as much, at random."""
    arm = Arm()
    arm.setup(Spec(Mlp(mode=mode, dim=16, layers=2, batch_size=8), (), "cpu", "float32", 0).pack())
    inner, generator = arm.program.step, torch.Generator()
    generator.seed()

    def step(program, batch):
        outputs = inner(program, batch)
        with torch.no_grad():
            for parameter in program.model.parameters() if noise else ():
                parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=generator))
        return outputs

    arm.program = replace(arm.program, step=step)
    return arm


def held(mode: str, arm: Arm, ends: list[End] | None = None) -> tuple[list[Finding], int]:
    """`repeated`, beside a plain arm."""
    return repeated(InProcess(made(mode), "baseline"), InProcess(arm, "candidate"), ends or arm.timed_ends())


@pytest.mark.parametrize("mode", ["forward", "forward_backward", "train"])
def test_a_block_leaves_what_its_repetition_leaves(mode: str) -> None:
    arm = made(mode)
    arm.block(steps=7, lead_in=2)
    assert held(mode, arm) == ([], 1)
    kinds = {name.partition("/")[0] for name in arm.timed(0)}
    assert kinds == {"forward": {"out"}, "forward_backward": {"out", "grad"}, "train": {"out", "grad", "after"}}[mode]


@pytest.mark.slow
def test_training_that_never_repeats_itself_is_no_alarm() -> None:
    """Now and then the first repetition lies near enough, by chance."""
    arm, total = made("train", noise=1e-6), 0
    for _ in range(20):
        arm.blocks, arm.kept = 0, {}
        arm.block(steps=7, lead_in=2)
        messages, repetitions = held("train", arm)
        assert not messages
        total += repetitions
    assert total > 30


def test_another_number_of_steps_shows() -> None:
    arm = made("train", noise=1e-6)
    arm.block(steps=7, lead_in=2)
    messages, _ = held("train", arm, [End(arm.timed_ends()[0].steps + 1)])
    found = {message.tensor for message in messages}
    assert {"loss", "grad/0.weight", "after/optimizer/0.weight/step"} <= found
    assert all(message.gate == "REPEATED" and not message.ok for message in messages)


def test_gradients_of_steps_that_do_not_build_on_each_other_do_not_grow_apart() -> None:
    """Those of an earlier step, kept while the clock runs, are of the right size."""
    arm, steps = made("forward_backward"), 151
    inner, generator, stale = arm.program.step, torch.Generator(), []

    def step(program, batch):
        outputs = inner(program, stale[0] if stale else batch)
        for parameter in program.model.parameters():
            parameter.grad.mul_(1 + 1e-7 * torch.randn(parameter.shape, generator=generator))
        return outputs

    arm.program = replace(arm.program, step=step)
    arm.block(steps=steps, lead_in=2)
    assert held("forward_backward", arm)[0] == []
    arm.blocks, arm.kept = 0, {}
    other = tuple(tensor + 0.01 * tensor.std() for tensor in arm.batches[0])
    stale.append(other)
    arm.block(steps=steps, lead_in=2)
    stale.clear()
    assert held("forward_backward", arm)[0]


def test_what_is_missing_or_new_is_said() -> None:
    one, two = {"out/a": (1.0, 1.0)}, {"grad/b": (1.0, 1.0)}
    assert astray(one, [two]) == {
        "grad/b": "the timed step does not leave it, its repetition does",
        "out/a": "the timed step leaves it, its repetition does not",
    }


def test_a_last_bit_is_no_difference_and_more_is() -> None:
    first = {"out/a": (0.5, 1.0)}
    assert not astray({"out/a": (0.5 + FLOOR, 1.0)}, [first])
    assert "its mean is" in astray({"out/a": (0.5 + 2 * FLOOR, 1.0)}, [first])["out/a"]
    assert not astray({"out/a": (0.5 + 2 * FLOOR, 1.0)}, [first, {"out/a": (0.5 + FLOOR, 1.0)}])


def test_what_rounds_at_random_may_stray_as_far_as_noise_takes_it() -> None:
    first, off = {"grad/a": (0.5, 1.0)}, {"grad/a": (0.51, 1.0)}
    near, far = {"grad/a": (0.5 + FLOOR, 1.0)}, {"grad/a": (0.495, 1.0)}
    assert astray(off, [first, near])
    assert not astray(off, [first, near], [first, far])
    assert astray({"grad/a": (0.52, 1.0)}, [first, near], [first, far, near])


def test_repetitions_that_differ_by_more_than_rounding_explain_nothing() -> None:
    """A fault of one step in four shows in some of them."""
    first, off = {"grad/a": (0.5, 1.0)}, {"grad/a": (0.51, 1.0)}
    assert not astray(off, [first, off])
    assert astray(off, [first, off], [first, {"grad/a": (0.5 + FLOOR, 1.0)}])
    assert not astray(off, [first, off], [first, first], unit=2.0**-8), "a rounding at lower precision"


def test_equal_steps_that_are_apart_show_a_baseline_without_a_yardstick() -> None:
    runs = [{"out/a": (0.5, 2.0), "out/b": (1.0, 1.0)}, {"out/a": (0.6, 2.0), "out/b": (1.0, 1.01)}]
    assert unsteady(runs, 2.0**-24, {}) == {"out/a": pytest.approx(0.05)}
    assert unsteady(runs, 2.0**-8, {}) == {}
    assert unsteady(runs, 2.0**-24, {"out/a": 10.0}) == {}, "beside its terms it is nothing"


def test_an_optimizer_state_of_a_gradient_that_is_zero_but_for_rounding_shows_nothing() -> None:
    state = "after/optimizer/conv.bias/exp_avg_sq"
    runs = [{state: (size**2, size**2), "grad/conv.bias": (size, size)} for size in (1e-8, 2e-8)]
    sizes = {"grad/conv.bias": 1e-3}
    assert state in unsteady(runs, 2.0**-24, sizes)
    assert not unsteady(runs, 2.0**-24, sizes, ["grad/conv.bias"])
    others = [{name.replace("conv.bias", "conv.bias2"): numbers for name, numbers in run.items()} for run in runs]
    assert unsteady(others, 2.0**-24, sizes, ["grad/conv.bias"])


def test_repetitions_tell_a_gradient_that_is_zero_by_its_terms_and_nothing_of_state_that_follows_from_it() -> None:
    name, state = "grad/conv.bias", "after/optimizer/conv.bias/exp_avg_sq"
    zeros, again = {name: 1e-3}, [{name: (0.0, size), state: (size**2, size**2)} for size in (1e-9, 2e-9)]
    assert astray({name: (0.0, 2e-8), state: (4e-16, 4e-16)}, again).keys() == {name, state}
    assert not astray({name: (0.0, 2e-8), state: (4e-16, 4e-16)}, again, zeros=zeros)
    assert astray({name: (0.0, 1e-6), state: (1e-12, 1e-12)}, again, zeros=zeros).keys() == {name}


class Flips(Arm):
    """An arm whose timed block took another branch than all its repetitions; from noisy parameters it does `wild`."""

    def __init__(self, timed: float, rounds: bool, wild: float) -> None:
        super().__init__()
        self.told, self.wild = timed, wild
        self.last_bits = cycle([0.0, FLOOR] if rounds else [0.0])

    def timed(self, index: int) -> Digest:
        return {"grad/a": (self.told, 1.0)}

    def repeated(self, end: End, noise: int | None = None) -> Digest:
        return {"grad/a": (0.5 + next(self.last_bits) + (self.wild if noise else 0.0), 1.0)}


@pytest.mark.parametrize(
    ("timed", "rounds", "alarms"), [(0.51, True, 0), (0.54, True, 1), (0.51, False, 1)], ids=["flip", "far", "exact"]
)
def test_a_flip_that_no_repetition_meets_is_no_alarm(timed: float, rounds: bool, alarms: int) -> None:
    baseline = InProcess(Flips(0.5, False, wild=0.01), "baseline")
    candidate = InProcess(Flips(timed, rounds, wild=1e9), "candidate")
    assert len(repeated(baseline, candidate, [End(7)])[0]) == alarms


def test_noise_leaves_the_parameters_as_they_were() -> None:
    arm = made("forward_backward")
    before = [parameter.clone() for parameter in arm.program.model.parameters()]
    plain = arm.repeated(End(3))
    assert arm.repeated(End(3), noise=1) != plain
    assert all(map(torch.equal, arm.program.model.parameters(), before))
    assert arm.repeated(End(3)) == plain


@pytest.mark.parametrize(
    ("tensor", "numbers"),
    [
        (torch.tensor([3.0, 4.0]).bfloat16(), (3.5, 12.5**0.5)),
        (torch.tensor([True, False]), (0.5, 0.5**0.5)),
        (torch.tensor([2 + 2j]), (2.0, 2.0)),
        (torch.tensor([nan, 1.0]), (0.0, 0.0)),
        (torch.empty(0), (0.0, 0.0)),
        (torch.tensor([[0.0, 2.0]]).to_sparse(), (1.0, 2**0.5)),
    ],
)
def test_two_numbers_of_any_tensor(tensor: torch.Tensor, numbers: tuple[float, float]) -> None:
    assert digest({"out/a": tensor, "flag/b": tensor})["out/a"] == pytest.approx(numbers)
