"""A weight that is a tensor around others is named, and no error of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optexp.errors import NoReference
from optexp.workloads.module import Module

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

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Int8Weight(args[0].values, args[0].scale)
        plain = [a.values.float() * a.scale if isinstance(a, Int8Weight) else a for a in args]
        return func(*plain, **(kwargs or {}))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        weight = Int8Weight(torch.randint(-8, 8, (4, 4), dtype=torch.int8), torch.tensor(0.1))
        self.lin.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x):
        return self.lin(x)


def get_inputs():
    return [torch.randn(2, 4)]
"""


def test_a_weight_that_is_a_tensor_around_others_is_named(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(WRAPPED)
    workload = Module(path=str(tmp_path / "net.py")).resolve("cpu")
    with pytest.raises(NoReference, match=r"^lin.weight is a Int8Weight, a tensor around others"):
        workload.build(torch.device("cpu"), torch.float32, 0)
