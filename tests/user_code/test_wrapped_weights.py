"""Weights that are tensors around others are judged by their parts; one that hides its parts is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optexp.errors import NoReference
from optexp.program import Snapshot
from optexp.result import Result
from optexp.workloads.module import Module
from tests.user_code.test_own_model import run

WRAPPED = """
import torch
from torch import nn


class Int8Weight(torch.Tensor):
    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values, scale):
        self.values, self.scale = values, scale

    def __tensor_flatten__(self):
        return ["values", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Int8Weight(inner["values"], inner["scale"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Int8Weight(args[0].values, args[0].scale)
        plain = [a.values.float() * a.scale if isinstance(a, Int8Weight) else a for a in args]
        return func(*plain, **(kwargs or {}))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        weight = Int8Weight(torch.randint(-8, 8, (8, 8), dtype=torch.int8), torch.rand(8, 1))
        self.lin.weight = nn.Parameter(weight, requires_grad=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.relu(self.lin(x)))


def get_inputs():
    return [torch.randn(16, 8)]


def dense(model: nn.Module):
    weight = model.lin.weight
    model.lin.weight = nn.Parameter(weight.values.float() * weight.scale, requires_grad=False)


def corrupted(model: nn.Module):
    model.lin.weight.values[0].zero_()


def corrupts(model: nn.Module):
    forward = model.lin.forward

    def corrupting(x):
        result = forward(x)
        with torch.no_grad():
            model.lin.weight.scale[0].mul_(1.01)
        return result

    model.lin.forward = corrupting
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(WRAPPED)
    return path


def ending(file: Path, made: str, *settings: str) -> Result:
    target = f"strategy.replace.target={file}:{made}"
    given = [f"workload.path={file}", "verify=only", "isolation=none", "strategy=replace", target]
    return run(file.parent, *given, *settings)


@pytest.mark.parametrize("made", [pytest.param("Model", marks=pytest.mark.slow), "dense"])
def test_an_honest_model_is_verified(file: Path, made: str) -> None:
    assert ending(file, made).verdict.name == "VERIFIED"


@pytest.mark.parametrize("made", ["corrupted", pytest.param("corrupts", marks=pytest.mark.slow)])
def test_a_part_that_is_or_becomes_wrong_is_seen(file: Path, made: str) -> None:
    assert ending(file, made).verdict.name == "NOT_EQUIVALENT"


@pytest.mark.slow
def test_a_frozen_one_is_judged_in_training(file: Path) -> None:
    assert ending(file, "Model", "workload.mode=train").verdict.name == "VERIFIED"
    wrong = ending(file, "corrupts", "workload.mode=train")
    assert wrong.verdict.name == "NOT_EQUIVALENT"
    assert "lin.weight.scale" in wrong.headline


def test_parts_are_put_back_in_place(file: Path) -> None:
    program = Module(path=str(file)).resolve("cpu").build(torch.device("cpu"), torch.float32, 0)
    weight, snapshot = program.model.lin.weight, Snapshot(program)
    before = weight.values.clone()
    weight.values.zero_()
    snapshot.restore(program)
    assert torch.equal(weight.values, before)
    assert {"param/lin.weight.values", "param/lin.weight.scale"} <= program.state().keys()


@pytest.mark.parametrize(
    ("change", "mode", "said"),
    [
        (("def __tensor_flatten__", "def flatten"), "forward", "without __tensor_flatten__"),
        (("nn.Parameter(weight, requires_grad=False)", "nn.Parameter(weight)"), "train", "and learns"),
    ],
)
def test_one_that_hides_its_parts_or_learns_is_named(file: Path, change: tuple[str, str], mode: str, said: str) -> None:
    file.write_text(file.read_text().replace(*change))
    workload = Module(path=str(file), mode=mode).resolve("cpu")
    with pytest.raises(NoReference, match=rf"^lin.weight is a Int8Weight, a tensor around others.* {said}"):
        workload.build(torch.device("cpu"), torch.float32, 0)
