"""A wrong step of the user's own: the sentence names the result that is wrong before what follows from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.result import Verdict
from tests.two_files import compared

AVERAGED = """
import torch
from torch import nn

average = {}

def Model():
    return nn.Linear(6, 4)

def get_inputs():
    return [torch.randn(8, 6), torch.randn(8, 4)]

def get_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)

def train_step(model, batch, optimizer):
    optimizer.zero_grad()
    loss = nn.functional.huber_loss(model(batch[0]), batch[1], delta=0.5)
    loss.backward()
    optimizer.step()
    for name, p in model.named_parameters():
        average.setdefault(name, p.detach().clone()).lerp_(p.detach(), 0.1)
    return loss
"""


@pytest.mark.parametrize(
    ("there", "instead", "named"),
    [("delta=0.5", "delta=0.6", ("loss", "grad/")), ("p.detach(), 0.1", "p.detach(), 0.11", ("average",))],
    ids=["another loss", "another average"],
)
def test_an_average_is_blamed_where_it_alone_is_wrong(
    tmp_path: Path, there: str, instead: str, named: tuple[str, ...]
) -> None:
    result = compared(tmp_path, AVERAGED, AVERAGED.replace(there, instead))
    assert result.verdict is Verdict.NOT_EQUIVALENT
    assert result.headline.removeprefix("NOT_EQUIVALENT: ").startswith(named), result.headline
