"""What a user's step keeps in an array of NumPy, beside a second program's."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.result import Verdict
from tests.two_files import compared

AVERAGED = """
import numpy as np
import torch
from torch import nn

mean = np.zeros(6)

def Model():
    return nn.Linear(6, 4)

def get_inputs():
    return [torch.randn(8, 6), torch.randn(8, 4)]

def get_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.01)

def train_step(model, batch, optimizer):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    optimizer.step()
    mean[:] = 0.9 * mean + 0.1 * batch[0].mean(0).numpy()

def normalized(x):
    return x - torch.from_numpy(mean).float()
"""


@pytest.mark.parametrize(
    ("there", "instead", "verdict"),
    [
        ("np.zeros(6)", "torch.zeros(6, dtype=torch.float64).numpy()", Verdict.VERIFIED),
        ("0.1 * batch", "0.2 * batch", Verdict.NOT_EQUIVALENT),
    ],
    ids=["made otherwise", "another average"],
)
def test_numbers_in_an_array_are_compared(tmp_path: Path, there: str, instead: str, verdict: Verdict) -> None:
    result = compared(tmp_path, AVERAGED, AVERAGED.replace(there, instead))
    assert result.verdict is verdict, result.headline


RING = (
    AVERAGED.replace("mean = np", "mean, at = np")
    .replace("np.zeros(6)", "np.zeros(6), [0]")
    .replace(
        "mean[:] = 0.9 * mean + 0.1 * batch[0].mean(0).numpy()",
        "mean[at[0] % 6] = float(batch[0].mean())\n    at[0] += 1",
    )
)


@pytest.mark.parametrize(
    ("there", "instead", "verdict"),
    [("", "", Verdict.VERIFIED), (".mean())", ".sum())", Verdict.NOT_EQUIVALENT)],
    ids=["the same numbers", "other numbers"],
)
def test_a_list_may_hold_the_numbers_of_an_array(tmp_path: Path, there: str, instead: str, verdict: Verdict) -> None:
    second = RING.replace("np.zeros(6)", "[0.0] * 6").replace("torch.from_numpy(mean).float()", "torch.tensor(mean)")
    result = compared(tmp_path, RING, second.replace(there, instead) if there else second)
    assert result.verdict is verdict, result.headline
