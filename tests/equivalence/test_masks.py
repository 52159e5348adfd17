"""Results of which a part is a large finite number, where a mask says so: the rest is judged by its own size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from optexp.equivalence.autocast import autocast
from optexp.strategy import precision


class Logits(nn.Module):
    """Half of them masked, in one of the usual ways."""

    def __init__(self, fill):
        super().__init__()
        self.linear, self.fill = nn.Linear(192, 64), fill

    def forward(self, x):
        return self.masked(self.linear(x.flatten(1)))

    def masked(self, logits):
        mask = torch.arange(64) % 2 == 0
        if self.fill == "added":
            return logits + mask * -1e9
        return logits.masked_fill(mask, torch.finfo(logits.dtype).min if self.fill == "least" else self.fill)


def calling(function):
    """The same program, whose logits are `function(linear, x)`."""

    def change(program):
        model = program.model
        return replace(program, forward=lambda x: model.masked(function(model.linear, x.flatten(1))))

    return change


def reassociated(linear, x):
    return x[:, 96:] @ linear.weight.T[96:] + (linear.bias + x[:, :96] @ linear.weight.T[:96])


def nothing(linear, x):
    return torch.zeros(len(x), 64, dtype=linear.weight.dtype)


def narrow(linear, x):
    return nn.functional.linear(x.bfloat16(), linear.weight.bfloat16(), linear.bias.bfloat16()).float()


@pytest.mark.parametrize("fill", [-1e9, -1e4, "added", "least"])
def test_the_rest_is_judged_by_its_own_size(check, net, fill):
    workload = net(mode="forward", make=lambda: Logits(fill))
    honest = check(workload, calling(reassociated))
    assert honest.ok, honest.headline
    assert "output (unmasked)" in honest.visible
    assert not any("output (unmasked)" in row.passed for row in honest.mutants.values())
    for wrong in (nothing, narrow):
        found = check(workload, calling(wrong))
        assert not found.ok
        assert "output (unmasked) fails G1" in found.headline


def test_so_it_is_at_a_lower_precision(check, net):
    workload = net(mode="forward", make=lambda: Logits(-1e9))
    for function, ok in ((reassociated, True), (nothing, False)):
        changed = calling(function)

        def candidate(program, changed=changed):
            return autocast(changed(program), "bfloat16")

        assert check(workload, candidate, precision("bfloat16")).ok is ok


def test_rounding_below_a_mask_is_no_size(check, net):
    """What cancels in fp64 is not zero in float32, and no yardstick for anybody."""

    class Cancels(nn.Module):
        def forward(self, x):
            x = x.flatten(1)[:, :64]
            one = x.sin().square() + x.cos().square()
            return (one - 1).masked_fill(torch.arange(64) % 2 == 0, -1e9)

    found = check(net(mode="forward", make=Cancels), power=False)
    assert "output (unmasked)" not in found.tensors
