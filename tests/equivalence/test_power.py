"""Power of the gates: mutants of the baseline's own results fail, and what would pass is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from optexp.equivalence.autocast import autocast
from optexp.equivalence.mutants import MUTANTS
from optexp.equivalence.power import Power
from optexp.equivalence.tensor_math import SPREAD
from optexp.errors import NoReference
from optexp.program import Program
from optexp.records.verification import MutantCount
from optexp.strategy import precision
from optexp.support.tolerances import TOLERANCES
from optexp.workloads.mlp import Mlp


def mlp(mode: str, **options) -> Mlp:
    return Mlp(**{"mode": mode, "dim": 32, "layers": 2, "batch_size": 16, **options})


@pytest.mark.parametrize("mode", ["forward", "forward_backward", "train"])
def test_mutants_are_caught_at_full_precision(check, net, mode):
    found = check(net(mode=mode, layer_norm_eps=1e-2))
    names = {function.__name__.replace("_", " ") for functions in MUTANTS.values() for function in functions}
    left_out = {"forward": {"not cleared", "rate off by 1 percent", "no update"}}
    left_out["forward_backward"] = left_out["forward"] - {"not cleared"}
    returned = set() if mode == "forward" else {"one column dropped"}  # a loss has none
    assert set(found.mutants) == names - left_out.get(mode, set()) - returned
    for mutant, row in found.mutants.items():
        assert row.caught == row.tried, (mutant, row)
    assert all(0 < found.visible[name][0] < 1e-3 for name in ("loss", "output") if name in found.visible)


def test_what_passes_at_low_precision_is_named_with_what_would_show(check):
    found = check(mlp("train"), lambda program: autocast(program, "bfloat16"), precision("bfloat16"))
    row = found.mutants["lower precision"]
    assert row.caught < row.tried
    assert row.passed
    assert found.mutants["no update"].caught == found.mutants["no update"].tried
    assert all(found.visible[name][0] > 1e-3 for name in row.passed)


class Headed(nn.Module):
    """Large columns, and a small one beside them that a tensor's size hides."""

    def __init__(self, scored=True):
        super().__init__()
        self.linear, self.score, self.scored = nn.Linear(192, 31), nn.Linear(192, 1), scored

    def forward(self, x):
        x = x.flatten(1)
        score = self.score(x).sigmoid() if self.scored else x.new_full((len(x), 1), 0.5)
        return torch.cat([self.linear(x) * 1000, score], dim=-1)


def without_score(program: Program) -> Program:
    program.model.scored = False
    return program


def by_matmul(program: Program) -> Program:
    for layer in (program.model.linear, program.model.score):
        layer.forward = lambda x, w=layer: x[:, :96] @ w.weight[:, :96].T + x[:, 96:] @ w.weight[:, 96:].T + w.bias
    return program


def test_a_small_column_beside_large_ones_is_judged_by_its_own_size(check, net):
    headed = net(mode="forward", make=Headed, batch_size=64)
    found = check(headed, by_matmul, seeds=4)
    assert found.ok, found.headline
    assert found.mutants["one column dropped"].passed == []
    assert "output (small columns)" in found.tensors
    wrong = check(headed, without_score)
    assert not wrong.ok
    assert wrong.worst.tensor == "output (small columns)"
    assert wrong.worst.element.index[-1] == 31


def test_a_column_that_is_too_small_to_be_seen_is_named(check, net, monkeypatch):
    monkeypatch.setattr("optexp.equivalence.quantities.SMALLER", 0.0)
    monkeypatch.setattr("optexp.equivalence.quantities.TINY", -99)  # of what lies all over
    found = check(net(mode="forward", make=Tiny, batch_size=64))
    assert found.ok, found.headline
    assert found.mutants["one column dropped"] == MutantCount(1, 0, ["output"])


class Tiny(Headed):
    def forward(self, x):
        return super().forward(x) * torch.cat([torch.ones(31), torch.full((1,), 1e-3)]).to(x)


def test_gates_without_power_leave_equivalence_undecided(check, monkeypatch):
    lax = {name: replace(row, fail=1e6, peak_fail=1e6) for name, row in TOLERANCES.items()}
    for module in ("equivalence.arithmetic", "support.tolerances"):
        monkeypatch.setattr(f"optexp.{module}.TOLERANCES", lax)
    monkeypatch.setattr("optexp.equivalence.gates.BLOCK_FACTOR", 1e6)
    with pytest.raises(NoReference, match="no power: output passes them with the mutant"):
        check(mlp("forward"))


def test_the_distribution_of_errors_is_that_of_both_arms(check):
    found = check(mlp("forward")).distribution
    assert found.tensor == "output"
    assert len(found.baseline) == 1 + SPREAD[2]
    assert sum(found.baseline) == pytest.approx(1)
    assert found.baseline == found.candidate


class Imbalanced(nn.Module):
    """Images in which two of three channels are small."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 3, 1)
        self.register_buffer("size", torch.tensor([1.0, 1e-3, 1e-3]).reshape(3, 1, 1))

    def forward(self, x):
        return self.convolution(x) * self.size


def test_mutants_are_made_of_the_first_rows_of_large_channels(check, net, monkeypatch):
    monkeypatch.setattr("optexp.equivalence.mutants.FIRST", 256)
    found = check(net(mode="forward", make=Imbalanced))
    assert found.mutants
    assert all(row.caught == row.tried for row in found.mutants.values())


class OfManySizes(nn.Module):
    """Rows of two sizes, and figures of two sizes in one vector.

    wrong: what is 1 % off, and nothing beside what is large: "rows", "figures", or nothing
    """

    def __init__(self, wrong=""):
        super().__init__()
        self.linear, self.wrong = nn.Linear(192, 32), wrong

    def forward(self, x):
        y = self.linear(x.flatten(1))
        off = {name: 1.01 if name == self.wrong else 1.0 for name in ("rows", "figures")}
        figures = torch.stack([y.square().mean() * off["figures"], y.new_full((), 2.0**20), y.mean()])
        return torch.cat([y * 1e4, y * off["rows"]]), figures


@pytest.mark.parametrize(("wrong", "named"), [("", ""), ("rows", "output.0 (small rows)"), ("figures", "(element 0)")])
def test_small_rows_and_small_figures_of_a_vector_are_judged_by_their_own_size(check, net, wrong, named):
    def changed(program: Program) -> Program:
        program.model.wrong = wrong
        return program

    found = check(net(mode="forward", make=OfManySizes, batch_size=16), changed)
    assert found.ok is not bool(wrong), found.headline
    assert named in (found.worst.tensor if wrong else "")


def test_an_update_by_a_gradient_that_is_zero_needs_no_power(check, net, monkeypatch):
    """That of a bias before a batch norm is nothing but rounding; weight decay alone changes such a bias."""
    tried, inner = set(), Power._try

    def noted(self, quantity, *mutant):
        tried.add(quantity.name)
        return inner(self, quantity, *mutant)

    def biased():
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10))

    monkeypatch.setattr(Power, "_try", noted)
    found = check(net(mode="train", make=biased))
    assert found.ok, found.headline
    assert {"change/0.weight", "change/3.bias"} <= tried
    assert "change/0.bias" not in tried
