"""Lower precision chooses otherwise now and then: how often is said beside a verdict of equality."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from optexp.equivalence.autocast import autocast
from optexp.equivalence.far_off import far_off
from optexp.equivalence.gates import PRECISION_CAP, Limits
from optexp.equivalence.quantities import Quantity
from optexp.equivalence.tensor_math import rms
from optexp.records.verification import Verification
from optexp.reporting.wording import FAR_OFF, at_precision
from optexp.strategy import precision
from optexp.support.tolerances import TOLERANCES
from tests.equivalence.conftest import Net

ROW = TOLERANCES["bfloat16"]


def quantity(value: Tensor, reference: Tensor, name: str = "out/output") -> Quantity:
    return Quantity(name, value, reference, Limits(ROW), scale=rms(reference) if reference.is_floating_point() else 1.0)


def test_rows_are_counted_in_both_arms() -> None:
    reference = torch.randn(64, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, theirs = reference.bfloat16(), reference.bfloat16()
    ours[3], ours[9], theirs[5] = -ours[3], ours[8], theirs[6]
    found = far_off(quantity(ours, reference), theirs)
    assert found is not None
    assert found.to_tuple() == (2, 1, 64)
    chosen = torch.arange(64)
    assert far_off(quantity(chosen.roll(1), chosen), chosen).to_tuple() == (64, 0, 64)
    assert far_off(quantity(ours, reference, "grad/weight"), theirs) is None
    assert far_off(quantity(ours[:1, :4], reference[:1, :4]), theirs[:1, :4]) is None


def test_the_words_have_the_limit_of_the_code() -> None:
    assert FAR_OFF == PRECISION_CAP
    said = at_precision("bfloat16", Verification("", far_off={"output": (12, 10, 4096)}))
    assert said.startswith(
        ", at bfloat16 precision; 12 of 4096 rows of output are off by more than 32 u (other choices"
    )
    assert said.endswith("of plain autocast 10")
    assert at_precision("bfloat16", Verification("")) == ", at bfloat16 precision"
    assert at_precision("float32", Verification("", far_off={"output": (12, 10, 4096)})) == ""


class Experts(nn.Module):
    """Each row goes to the expert that scores highest, of two that hardly differ."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(192, 2), nn.ModuleList(nn.Linear(192, 32) for _ in range(2))
        with torch.no_grad():
            self.gate.weight[1] = self.gate.weight[0] + 2e-3 * torch.randn(192)
            self.gate.bias[1] = self.gate.bias[0]

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        first = self.gate(x).argmax(1, keepdim=True) == 0
        return torch.where(first, self.experts[0](x), self.experts[1](x))


@pytest.mark.parametrize("make", [Experts, lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 32))])
def test_other_experts_are_said_beside_the_verdict(check, make) -> None:
    workload = Net(mode="forward", make=make, batch_size=256)
    found = check(workload, lambda program: autocast(program, "bfloat16"), precision("bfloat16"))
    if make is Experts:
        off, plain, rows = found.far_off["output"]
        assert 0 < off == plain < rows / 2
    else:
        assert found.ok
        assert found.far_off == {}
    assert check(workload).far_off == {}
