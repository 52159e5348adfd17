"""Random steps: honest ways to draw are alike, wrong ones are told apart."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optexp.equivalence import randomness
from optexp.program import Snapshot

CPU = torch.device("cpu")
UNIT = 2.0**-24


class Dropping(nn.Module):
    """x · W, then dropout by `drop(x, p)`."""

    def __init__(self, drop=F.dropout):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.drop = drop

    def forward(self, x):
        return self.drop(x.flatten(1)[:, :64] @ self.weight, 0.1)


def thrown(net, drop, mode="forward_backward", change=lambda program: program):
    program = change(net(mode=mode, batch_size=32, make=lambda: Dropping(drop)).build(CPU, torch.float32, 0))
    batch = net(mode=mode, batch_size=32).batch(torch.Generator().manual_seed(1))
    batch = (batch[0], *(label % 64 for label in batch[1:]))
    return randomness.throw(program, batch, Snapshot(program), UNIT)


def by_hand(x, p):
    return x * (torch.rand_like(x) >= p) / (1 - p)


def flipped(x, p):
    return torch.where(torch.rand_like(x) < 1 - p, x, 0.0) * (1 / (1 - p))


@pytest.mark.parametrize("mode", ["forward", "forward_backward", "train"])
@pytest.mark.parametrize("drop", [F.dropout, by_hand, flipped])
def test_honest_ways_to_draw_are_alike(net, mode, drop):
    baseline = thrown(net, F.dropout, mode)
    findings, facts = randomness.compare(thrown(net, drop, mode), baseline, UNIT)
    assert findings == []
    assert facts.seeds == 64
    assert facts.tests >= 6
    assert baseline == replace(baseline, repeat=True, differ=True, go_on=True, renew=True)


FROZEN = torch.rand(32, 64, generator=torch.Generator().manual_seed(0)) >= 0.1


def of_another_batch(x, p):
    return F.dropout(x.roll(1, 0), p)


def set_anew(x, p):
    torch.manual_seed(0)
    return F.dropout(x, p)


def kept_for_all_steps(x, p):
    """As an attribute of the model, which its first step makes."""
    model = sys._getframe(1).f_locals["self"]
    if not hasattr(model, "mask"):
        model.mask = (torch.rand(x.shape) >= p) / (1 - p)
    return x * model.mask


WRONG = {
    "a mask of the first step": (kept_for_all_steps, "kept for all"),
    "another rate": (lambda x, p: F.dropout(x, 0.12), "share of zeros"),
    "no scale": (lambda x, p: F.dropout(x, p) * (1 - p), "RMS is"),
    "one mask for all rows": (lambda x, p: x * (torch.rand(x.shape[-1]) >= p) / (1 - p), "scatters"),
    "forgotten": (lambda x, p: x, "frozen"),
    "a frozen mask": (lambda x, p: x * FROZEN / (1 - p), "frozen"),
    "a seed set anew": (set_anew, "set anew"),
    "another batch": (of_another_batch, "under random signs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_ways_to_draw_are_told_apart(net, name):
    drop, words = WRONG[name]
    findings, _ = randomness.compare(thrown(net, drop, "forward"), thrown(net, F.dropout, "forward"), UNIT)
    assert any(words in finding.message for finding in findings)
    assert not any(finding.ok for finding in findings)


def its_mean(drop, rate=0.1):
    """A step whose result tells next to nothing of one rate: a mean of what dropout scatters around zero."""
    return lambda x, p: drop(x, rate).mean().expand_as(x)


def test_a_rate_that_results_do_not_tell_is_seen(net):
    baseline = thrown(net, its_mean(F.dropout), "forward")
    findings, _ = randomness.compare(thrown(net, its_mean(F.dropout, 0.12), "forward"), baseline, UNIT)
    assert [finding.message for finding in findings] == ["dropout has the rate 0.12 where the baseline's has 0.1"]
    for honest in (
        its_mean(F.dropout),
        its_mean(by_hand),
        its_mean(lambda x, p: F.dropout(F.dropout(x, p / 2), p / 2)),
    ):
        assert randomness.compare(thrown(net, honest, "forward"), baseline, UNIT)[0] == []


def test_rates_that_follow_from_random_numbers_are_no_rates(net):
    assert thrown(net, lambda x, p: F.dropout(x, float(torch.rand(()) / 5)), "forward").rates == ()


def rounding_at_random(drop):
    """Sums that are added up in another order each time."""
    generator = torch.Generator()
    generator.seed()
    return lambda x, p: drop(x, p) * (1 + 1e-7 * torch.randn(x.shape, generator=generator))


def test_rounding_is_no_random_number(net):
    baseline = thrown(net, F.dropout)
    candidate = thrown(net, rounding_at_random(F.dropout))
    assert randomness.compare(candidate, baseline, UNIT)[0] == []
    assert candidate.repeat
    frozen = thrown(net, rounding_at_random(lambda x, p: x * FROZEN / (1 - p)))
    assert any("frozen" in finding.message for finding in randomness.compare(frozen, baseline, UNIT)[0])
    assert frozen.repeat


def test_what_follows_no_seed_does_not_repeat(net):
    generator = torch.Generator()

    def own_generator(x, p):
        return x * (torch.rand(x.shape, generator=generator) >= p) / (1 - p)

    baseline, candidate = thrown(net, F.dropout), thrown(net, own_generator)
    assert [f.message.split(",")[0] for f in randomness.compare(candidate, baseline, UNIT)[0]] == [
        "equal seeds give different results"
    ]
    assert randomness.compare(baseline, candidate, UNIT)[0] == []  # more than the baseline gives


def test_luck_raises_an_alarm_once_in_a_thousand():
    generator = torch.Generator().manual_seed(0)

    def throws():
        values = torch.randn(randomness.SEEDS, 3, generator=generator, dtype=torch.float64).abs()
        return randomness.Throws({"out/output": values.tolist()}, True, True, True)

    alarms = sum(bool(randomness.compare(throws(), throws(), UNIT)[0]) for _ in range(300))
    assert alarms <= 3


def test_rounding_of_what_does_not_scatter_is_no_difference():
    def throws(value):
        return randomness.Throws({"out/output": [[value, value, 0.0]] * randomness.SEEDS}, True, True, True)

    assert randomness.compare(throws(1.0 + 1e-5), throws(1.0), UNIT)[0] == []
    assert randomness.compare(throws(1.0 + 1e-3), throws(1.0), UNIT)[0] != []


def test_an_eighth_of_a_small_gradient_in_bfloat16_that_is_never_written_is_seen():
    """Rounding beside the largest gradient is a hundredth of it there: more than many elements of the smaller ones."""
    unit = 2.0**-8

    def throws(written=1.0):
        moments = {}
        for seed in range(randomness.SEEDS):
            generator = torch.Generator().manual_seed(seed)
            found = {"grad/large": torch.randn(512, generator=generator).bfloat16()}
            small = torch.randn(64, 8, generator=generator) * 0.06
            small[int(64 * written) :] = 0
            found["grad/small"] = small.bfloat16()
            told = {name: randomness._moments(tensor) for name, tensor in found.items()}
            for name, share in randomness._may_be_zero(found, told, unit).items():
                moments.setdefault(name, []).append([*told[name], share])
        return randomness.Throws(moments, True, True, True)

    assert randomness.compare(throws(), throws(), unit)[0] == []
    assert any("share of zeros" in f.message for f in randomness.compare(throws(0.875), throws(), unit)[0])


def test_rounding_of_a_gradient_that_cancels_is_no_difference():
    """How much of it is exactly zero differs between kernels, a masked or a captured one, or a layer that adds none."""

    def throws(size, zeros=0.01):
        moments = {}
        for seed in range(randomness.SEEDS):
            generator = torch.Generator().manual_seed(seed)
            found = {"grad/weight": torch.randn(256, generator=generator)}
            small = torch.randn(256, generator=generator) * size
            found["grad/key.bias"] = small * (torch.rand(256, generator=generator) >= zeros)
            told = {name: randomness._moments(tensor) for name, tensor in found.items()}
            for name, share in randomness._may_be_zero(found, told, UNIT).items():
                moments.setdefault(name, []).append([*told[name], share])
        return randomness.Throws(moments, True, True, True)

    def alike(ours, theirs):
        return randomness.compare(ours, theirs, UNIT)[0] == []

    for size in (3e-4 * UNIT, UNIT / 8, UNIT / 2):
        assert alike(throws(size, zeros=0.03), throws(size))
        assert alike(throws(0.0), throws(size))
        assert alike(throws(size), throws(0.0))
    assert alike(throws(3e-4 * UNIT), throws(1e-4 * UNIT))
    assert not alike(throws(3e-3), throws(1e-3))
    assert not alike(throws(1e4 * UNIT, zeros=0.3), throws(1e4 * UNIT)), "small, but larger than rounding may be"
    assert not alike(throws(0.0), throws(1e4 * UNIT)), "a parameter that no longer learns"
    assert not alike(throws(1.0), throws(3e-4 * UNIT))
    assert not alike(throws(3e-4 * UNIT), throws(1.0))


def test_a_gradient_that_is_zero_may_have_the_rounding_of_long_sums() -> None:
    """A compiled bias gradient before a batch norm has 8 u of its terms, and an eager one 0.5 u."""

    def alarms(size: float) -> list[str]:
        compiled, eager = (
            randomness.Throws({"grad/conv.bias": [[0.0, rms, 0.0]]}, True, True, True) for rms in (size, UNIT / 2)
        )
        return [f.message for f in randomness._zeros(compiled, eager, UNIT, {"grad/conv.bias": 1.0})]

    assert alarms(8 * UNIT) == []
    assert alarms(100 * UNIT) == []
    assert "rounding explains" in alarms(1e-3)[0]
