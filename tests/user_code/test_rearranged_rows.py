"""A replay buffer: a deque of rows in one file, a ring in a tensor in the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.result import Verdict
from tests.two_files import compared

PROGRAM = """
from collections import deque
import torch
from torch import nn

def Model():
    return nn.Linear(4, 1)

def get_inputs():
    return torch.randn(8, 4)

def get_optimizer(params):
    return torch.optim.SGD(params, lr=1e-2)

{}

def train_step(model, batch, optimizer):
    loss = model(rows(batch[0])).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()
"""
DEQUE = PROGRAM.format("""
kept = deque(maxlen=24)

def rows(batch):
    kept.extend(batch)
    return torch.stack([*kept])
""")
RING = PROGRAM.format("""
kept, place = torch.zeros(24, 4), [0, 0]

def rows(batch):
    at, full = place
    kept[torch.arange(at, at + 8) % 24] = batch
    place[:] = (at + 8) % 24, min(full + 8, 24)
    return kept[:place[1]]
""")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("second", "verdict"),
    [
        (RING, Verdict.VERIFIED),
        (RING.replace("] = batch", "] = 1.001 * batch"), Verdict.NOT_EQUIVALENT),
        (RING.replace("at + 8) % 24]", "at + 8) % 16]"), Verdict.NOT_EQUIVALENT),
    ],
    ids=["the same rows", "other rows", "a shorter ring"],
)
def test_rows_are_found_in_another_container(second: str, verdict: Verdict, tmp_path: Path) -> None:
    result = compared(tmp_path, DEQUE, second)
    assert result.verdict is verdict, result.headline
