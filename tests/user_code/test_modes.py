"""Modules that a file puts into another mode than the model's stay there, as in the user's own process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from optexp.program import set_training, take_modes
from optexp.result import Verdict
from tests.two_files import compared

FROZEN = """
import torch
from torch import nn

def get_model():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model[1].eval()
    return model

def get_inputs():
    return [torch.randn(12, 6), torch.randint(3, (12,))]

def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1)

def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch[1])
"""
TRAINED = FROZEN.replace("    model[1].eval()\n", "")
OVERRIDE = """
class Detector(nn.Sequential):
    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self
"""
BY_TRAIN = TRAINED.replace("nn.Sequential(", "Detector(") + OVERRIDE


def test_frozen_statistics_stay_frozen(tmp_path: Path) -> None:
    result = compared(tmp_path, FROZEN, FROZEN.replace("nn.ReLU()", "nn.ReLU(inplace=True)"))
    assert result.verdict is Verdict.VERIFIED
    assert "modules that the file puts into evaluation mode stay there: 1" in result.notes


@pytest.mark.parametrize("second", [TRAINED, BY_TRAIN], ids=["trains them", "freezes them in train()"])
def test_files_that_differ_once_a_loop_calls_train_are_undecided(tmp_path: Path, second: str) -> None:
    result = compared(tmp_path, FROZEN, second)
    assert result.verdict is Verdict.UNVERIFIED
    assert "one file alone puts the module 1 (BatchNorm1d) into a mode" in result.headline


def test_a_second_program_may_do_without_a_frozen_module(tmp_path: Path) -> None:
    folded = FROZEN.replace("nn.BatchNorm1d(8), ", "").replace("    model[1].eval()\n", "")
    scaled = "model[0].weight.data /= (1 + 1e-5) ** 0.5; model[0].bias.data /= (1 + 1e-5) ** 0.5\n    return model"
    result = compared(tmp_path, FROZEN, folded.replace("return model\n", f"{scaled}\n", 1))
    assert "into a mode" not in result.headline


def test_a_model_that_freezes_them_in_train_is_compared_so(tmp_path: Path) -> None:
    assert compared(tmp_path, BY_TRAIN, TRAINED).verdict is Verdict.NOT_EQUIVALENT


def test_a_model_in_the_other_mode_changes_as_a_whole() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout())).eval()
    assert set_training(model, True) == []
    assert all(part.training for part in model.modules())


def test_a_second_implementation_takes_the_modes_over() -> None:
    old, new = (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2))
    old[1].eval()
    take_modes(old, new)
    assert [part.training for part in new.modules()] == [True, True, False]


def test_dropout_that_draws_in_inference_goes_on() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.Dropout())).eval()
    model[1].train()
    assert set_training(model, False) == ["1"]
    assert [part.training for part in model.modules()] == [False, False, True, True]
    assert not torch.equal(*(model(torch.ones(64, 2)) for _ in range(2)))
