"""Ranges around modules' calls: closed whatever happens, gone afterwards, and absent where hooks would do harm."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from optexp.trace import Trace, record
from optexp.workers.module_marks import markable, marked

CPU = torch.device("cpu")


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("never")


class Tries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Raises(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.first(x)
        except ValueError:
            return self.second(x)


def test_each_call_is_a_range_inside_that_of_its_caller(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with marked(model):
        record(lambda: model(torch.ones(2, 4)), 2, tmp_path / "trace.json.gz", CPU)
    trace = Trace.read(tmp_path / "trace.json.gz")
    assert [(call.name, call.kind) for call in trace.modules[:3]] == [
        ("", "Sequential"),
        ("0", "Linear"),
        ("1", "ReLU"),
    ]
    outer, first, second = trace.modules[:3]
    assert outer.start <= first.start < first.end <= second.start < second.end <= outer.end
    assert len(trace.modules) == 6
    assert not any(call.name.startswith("optexp") for call in trace.annotations)


def test_a_call_that_raises_is_closed_with_its_caller(tmp_path: Path) -> None:
    model = Tries()
    with marked(model):
        record(lambda: model(torch.ones(2, 4)), 1, tmp_path / "trace.json.gz", CPU)
    calls = Trace.read(tmp_path / "trace.json.gz").modules
    assert sorted(call.name for call in calls) == ["", "first", "second"]


def test_no_hook_stays() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(RuntimeError), marked(model):
        model(torch.ones(2, 3))
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_compiled_or_scripted_model_takes_no_marks() -> None:
    model = nn.Linear(4, 4)
    torch._dynamo.utils.counters.clear()
    assert markable(model)
    assert not markable(nn.Sequential(torch.jit.script(model)))
    torch.compile(model, backend="eager")(torch.ones(1, 4))
    assert not markable(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
