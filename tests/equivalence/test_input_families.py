"""Families of inputs: what they change, what they leave alone, and the mistakes that only they show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optexp.equivalence import input_families
from optexp.equivalence.input_families import FAMILIES, NONCONTIGUOUS, exchanged, of, refilled, with_gaps
from optexp.result import Verdict
from optexp.workloads.softmax import Softmax
from tests.two_files import compared


def batch():
    generator = torch.Generator().manual_seed(0)
    x, labels = torch.randn(6, 5, generator=generator), torch.randint(3, (6,), generator=generator)
    return x, labels, torch.randn(6, generator=generator)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_real_inputs_change(family):
    given = batch()
    x, labels, target = of(family, given, targets=1)
    assert not torch.equal(x, given[0])
    assert x.shape == given[0].shape
    assert labels is given[1]
    assert target is given[2]
    assert torch.equal(given[0], batch()[0])  # the caller's is as it was


def test_inputs_with_a_range_of_their_own_stay():
    x, _, target = given = batch()
    assert of("large", given, 0, bounded={"0"})[0] is x
    assert not torch.equal(of("large", given, 0, bounded={"0"})[2], target)
    assert of("large", given, 1, bounded={"0"}) is given
    assert of("large", {"a": x, "b": target}, 1, bounded={"b"})["a"] is not x


@pytest.mark.parametrize(
    ("values", "stays"),
    [
        ([0.0, 1.0], True),
        ([-1.0, 1.0], True),
        ([0.0, 1.0, -1.0], False),
        ([0.0, 0.5], False),
        ([0.0, 2.0], False),
        ([1.0, 1.0], False),
        ([0.0, float("nan")], False),
    ],
)
def test_masks_and_labels_stay_as_they_are(values, stays):
    x, choice = torch.randn(100), torch.tensor(values * 40)
    for mask in (choice, choice.sort().values.flip(0)):
        changed = of("corners", (x, mask), 0)
        assert changed[0] is not x
        assert (changed[1] is mask) is stays


def test_what_they_are():
    x = batch()[0]
    assert torch.equal(input_families.integers(x), input_families.integers(x).round())
    assert input_families.offset(x).mean() / input_families.offset(x).std() > 100
    assert input_families.constant_rows(x).std(dim=1).max() < 0.01
    zero, small, large, *others = input_families.corners(x)
    assert not zero.any()
    assert not zero.signbit().any()
    assert torch.equal(small * 512, (small * 512).round())
    assert torch.equal(torch.stack(others) * 2, (torch.stack(others) * 2).round())
    assert small.abs().max() < 0.02 < 4 < large.abs().max()
    assert not input_families.corners(x[None])[0, 0].any()
    assert input_families.corners(torch.tensor(1.3)) == 1.5
    assert input_families.nonfinite(x).isnan().sum() == 1
    assert input_families.nonfinite(x).isinf().sum() == 2
    assert input_families.nonfinite(torch.tensor(1.0)).dim() == 0
    assert input_families.large(x.half()).isfinite().all()


def test_inputs_are_exchanged_one_after_the_other():
    first, second = batch(), tuple(t + 1 for t in batch())
    made = exchanged(first, second)
    assert [[t is s for t, s in zip(b, second, strict=True)] for b in made] == [
        [False, False, False], [True, False, False], [False, True, False], [False, False, True], [False, True, False],
    ]  # fmt: skip
    half = made[-1][0]
    assert torch.equal(half, torch.cat([first[0][:3], second[0][3:]]))
    shorter = tuple(t[:2] for t in second)
    assert exchanged(first, shorter) == [first, shorter]
    named = exchanged({"a": first[0], "b": first[2]}, {"a": second[0], "b": second[2]})
    assert named[2]["b"] is second[2]


def test_gaps_and_memory_used_again():
    x = batch()[0]
    assert torch.equal(with_gaps(x), x)
    assert not with_gaps(x).is_contiguous()
    memory = (x.clone(),)
    again = refilled(memory, (x + 1,))
    assert again[0] is memory[0]
    assert torch.equal(memory[0], x + 1)
    assert refilled(memory, (x[:2],))[0].shape == (2, 5)
    assert refilled(None, memory) is memory


# --- mistakes that normal inputs do not show ---------------------------------------------------------------------


class Standardized(nn.Module):
    """Rows to mean 0 and variance 1; `variance(x)` may be written well or badly."""

    def __init__(self, variance):
        super().__init__()
        self.variance = variance

    def forward(self, x):
        x = x.flatten(1)
        return (x - x.mean(1, keepdim=True)) * torch.rsqrt(self.variance(x) + 1e-5)


def two_passes(x):
    return (x - x.mean(1, keepdim=True)).square().mean(1, keepdim=True)


def one_pass(x):
    return (x.square().mean(1, keepdim=True) - x.mean(1, keepdim=True).square()).clamp_min(0)


def nan_lost(x):
    return torch.where(x > 0, x, 0.0)


def softmax_without_maximum(x):
    return x.exp() / x.exp().sum(-1, keepdim=True)


class Expm1(nn.Module):
    def forward(self, x):
        return torch.expm1(x)


class Signs(nn.Module):
    def forward(self, x):
        return x.sign()


WRONG = {
    "offset": (Standardized(two_passes), Standardized(one_pass)),
    "nonfinite": (nn.ReLU(), nan_lost),
    "large": (nn.Softmax(-1), softmax_without_maximum),
    "corners": (Signs(), lambda x: torch.where(x > 0, 1.0, -1.0)),
    "small": (Expm1(), lambda x: x.exp() - 1),
    "integers": (nn.Identity(), lambda x: x * (1 + 2e-7)),
    "constant_rows": (Standardized(two_passes), lambda x: F.layer_norm(x.flatten(1), (192,), eps=1e-6)),
}


@pytest.mark.parametrize("family", WRONG)
def test_mistakes_show_in_their_family(check, net, family):
    right, wrong = WRONG[family]
    workload = net(mode="forward", make=lambda: right)

    def change(program):
        return replace(program, forward=wrong)

    honest = check(workload, families=FAMILIES)
    assert honest.ok, honest.headline
    overflow = {"large"} if family == "small" else set()  # of expm1
    assert set(honest.families) == {"normal", *FAMILIES} - overflow
    found = check(workload, change, families=[family])
    assert not found.ok
    assert found.worst.family in (family, "normal")
    if family in ("corners", "large", "nonfinite", "offset", "small"):
        assert check(workload, change).ok  # normal inputs do not show it
        assert family.replace("_", " ") in found.headline


def test_strides_are_followed(check, net):
    def by_memory(x):
        return x.as_strided(x.shape, torch.empty(x.shape).stride()) * 2

    class Double(nn.Module):
        def forward(self, x):
            return x * 2

    workload = net(mode="forward", make=Double)
    assert check(workload, families=[NONCONTIGUOUS]).ok
    found = check(workload, lambda program: replace(program, forward=by_memory), families=[NONCONTIGUOUS])
    assert "noncontiguous inputs" in found.headline


def test_a_family_without_a_yardstick_is_noted(check, net):
    class Cancelling(nn.Module):
        def forward(self, x):
            return (x * 1e4 + 1e13 * (x.mean() > 10)) - 1e13 * (x.mean() > 10)

    def wrong(program):
        return replace(program, forward=lambda x: x * 1e4 * (1 + 0.04 * (x.mean() > 10)))

    found = check(net(mode="forward", make=Cancelling), wrong, families=["offset"])
    assert found.ok
    assert not found.undecided
    assert any("offset prove nothing" in note for note in found.notes)


def test_a_family_on_which_the_baseline_overflows_or_that_it_refuses_is_noted(check, net):
    class Picky(nn.Module):
        def forward(self, x):
            if x.min() > 10:
                raise ValueError("too large")
            return (x / 8).exp()

    found = check(net(mode="forward", make=Picky), families=["offset", "large"])
    assert found.ok
    assert found.families == ["normal"]
    assert any("offset prove nothing" in note and "too large" in note for note in found.notes)
    assert any("large prove nothing" in note and "NaN or Inf" in note for note in found.notes)


def test_infinities_that_are_there_on_normal_inputs_too_leave_no_family_out(check, net):
    class Masked(nn.Module):
        def forward(self, x):
            return x.masked_fill(x == x.amax(-1, keepdim=True), -torch.inf)

    found = check(net(mode="forward", make=Masked), families=["small"])
    assert found.ok
    assert found.families == ["normal", "small"]


CORNERS = {
    "halves": (torch.round, lambda x: torch.floor(x + 0.5)),
    "an edge of a bucket": (lambda x: (x > 0.5).to(x), lambda x: (x >= 0.5).to(x)),
    "a row of zeros": (F.normalize, lambda x: x / x.norm(dim=1, keepdim=True)),
    "an eps": (lambda x: F.layer_norm(x, (8,)), lambda x: F.layer_norm(x, (8,), eps=1.001e-5)),
    "a bound": (F.relu6, F.relu),
}


@pytest.mark.parametrize(("right", "wrong"), CORNERS.values(), ids=CORNERS)
def test_corners_show_what_usual_values_do_not(check, net, right, wrong):
    class Right(nn.Module):
        def forward(self, x):
            return right(x)

    def change(program):
        return replace(program, forward=wrong)

    found = check(net(mode="forward", make=Right), change, families=["corners"])
    assert not found.ok
    assert found.worst.family == "corners"


MASKED = {"multiplied": (lambda x, mask: x * mask, True), "a half as one": (lambda x, mask: x * (mask > -1), False)}


@pytest.mark.parametrize(("how", "ok"), MASKED.values(), ids=MASKED)
def test_a_mask_is_one_in_every_family(check, how, ok):
    class Masking(nn.Module):
        def forward(self, x, mask):
            return x.where(mask > 0, 0)

    class Workload(Softmax):
        def model(self):
            return Masking()

        def batch(self, generator):
            x = torch.randn(32, 16, generator=generator)
            return x, torch.randint(2, x.shape, generator=generator).float()

        def inputs(self, batch):
            return batch, {}

    found = check(
        Workload(rows=32, columns=16), lambda program: replace(program, forward=how), families=["corners", "integers"]
    )
    assert found.ok is ok, found.headline


class Gate(nn.Module):
    """1 − exp(−r), whose root has no gradient in float32 where r is far below a rounding of 1."""

    def __init__(self, decayed=lambda r: 1 - (-r).exp()):
        super().__init__()
        self.rate, self.out, self.decayed = nn.Parameter(torch.zeros(192)), nn.Linear(192, 10), decayed

    def forward(self, x):
        rate = (x.flatten(1).square() + 1e-11) * self.rate.exp()
        return self.out(self.decayed(rate).sqrt())


@pytest.mark.parametrize("formula", [lambda r: -torch.expm1(-r), lambda r: 1 - (-r).exp()], ids=["expm1", "the same"])
def test_a_family_on_which_gradients_overflow_in_float32_alone_is_noted(check, net, formula):
    def stable(program):
        program.model.decayed = formula
        return program

    found = check(net(mode="forward_backward", make=Gate), stable, families=["corners"])
    assert found.ok, found.headline
    assert any("corners prove nothing" in note and "where float64 has numbers" in note for note in found.notes)


LOUDNESS = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return torch.log(x.square().mean(-1) + 1e-6)

def get_inputs():
    return [torch.randn(2, 64)]
"""


def test_an_eps_of_a_statistic_over_each_of_few_samples_shows(tmp_path):
    second = LOUDNESS.replace("x.square().mean(-1) + 1e-6", "x.square().mean(-1).clamp(min=1e-6)")
    result = compared(tmp_path, LOUDNESS, second, "workload.mode=forward", "measurement.verification_seeds=1")
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline
    assert "small inputs" in result.headline


REWARDED = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy = nn.Linear(6, 4)

    def forward(self, x):
        return self.policy(x)

def get_inputs():
    return torch.randn(16, 6), torch.randint(0, 4, (16,)), torch.randn(16)

def get_optimizer(params):
    return torch.optim.Adam(params, lr=1e-3)

def train_step(model, batch, optimizer):
    states, actions, rewards = batch
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
    loss = (nn.functional.cross_entropy(model(states), actions, reduction="none") * advantages).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
"""


@pytest.mark.parametrize(
    ("instead", "verdict"),
    [
        (("rewards.std()", "rewards.var().sqrt()"), Verdict.VERIFIED),
        (("+ 1e-8", "+ 2e-7"), Verdict.NOT_EQUIVALENT),
    ],
)
def test_small_rewards_show_another_eps(tmp_path: Path, instead: tuple[str, str], verdict: Verdict) -> None:
    result = compared(tmp_path, REWARDED, REWARDED.replace(*instead))
    assert result.verdict is verdict, result.headline
