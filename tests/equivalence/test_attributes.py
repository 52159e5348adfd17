"""What a model keeps in Python is judged: by results first, then by what is left for later calls."""

from __future__ import annotations

import pytest
import torch

from optexp.equivalence.attributes import LEFT
from optexp.program import Program
from optexp.result import Verdict
from tests.equivalence.counting import (
    Annealed,
    Flipped,
    Forgetful,
    FullRing,
    Growing,
    Lazy,
    Listed,
    ListOfKeys,
    Once,
    Plain,
    Recurrent,
    Reset,
    RingOfKeys,
    Rows,
    Statistics,
    Stopped,
    WarmedUp,
    captured,
    instead,
    of,
)
from tests.two_files import compared

STEPS = 6
MODES = ["forward", "forward_backward", "train"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", [Plain, Annealed, Rows, Growing, Listed, Recurrent, Statistics, Lazy, WarmedUp])
def test_a_model_is_like_itself(check, net, model, mode):
    found = check(net(mode=mode, make=model), steps=STEPS)
    assert found.ok, found.headline
    assert found.repeats
    assert found.bitwise


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("model", "wrong"), [(Annealed, Stopped), (Rows, Flipped), (Rows, Forgetful), (WarmedUp, Once), (Recurrent, Reset)]
)
@pytest.mark.parametrize("another", [False, True])
def test_a_wrong_second_implementation_is_caught(check, net, mode, model, wrong, another):
    if wrong is Once and mode == "forward":
        pytest.skip("statistics are kept in training alone")
    found = check(net(mode=mode, make=model), of(wrong, another), steps=STEPS)
    assert not found.ok, found.headline


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("model", "name"), [(Annealed, "calls"), (Rows, "at"), (Statistics, "seen")])
def test_what_stands_still_in_a_graph_is_named(check, net, mode, model, name):
    found = check(net(mode=mode, make=model), captured, steps=STEPS)
    assert not found.ok
    assert f"attribute {name}" in {message.tensor for message in found.failures}
    assert found.headline.startswith(f"attribute {name} fails G0: {LEFT}")


@pytest.mark.parametrize("mode", MODES)
def test_what_is_made_once_may_be_made_before_or_elsewhere(check, net, mode):
    """A graph binds a mask when it is recorded, and makes no map anew."""
    found = check(net(mode=mode, make=Lazy), captured, steps=STEPS)
    assert found.ok, found.headline
    begun = check(net(mode=mode, make=Lazy), called_before, steps=STEPS)
    assert begun.ok, begun.headline
    assert begun.bitwise


def called_before(program: Program) -> Program:
    with torch.no_grad():
        program.model(torch.randn(8, 3, 8, 8))
    return program


def test_what_shows_in_no_result_is_a_note_where_another_model_leaves_it(check, net):
    found = check(net(mode="forward", make=Statistics), of(Plain, another=True), steps=STEPS)
    assert found.ok, found.headline
    assert any("attribute seen" in note and "shows in no result" in note for note in found.notes)
    assert "attribute" not in found.headline
    assert not check(net(mode="forward", make=Statistics), of(Plain), steps=STEPS).ok


def test_a_cache_that_another_model_holds_under_another_name_is_its_own_affair(check, net):
    """Results of later steps show a cache that is wrong."""
    found = check(net(mode="forward", make=ListOfKeys), instead(RingOfKeys), steps=STEPS)
    assert found.ok, found.headline
    assert any("attribute keys" in note and "shows in no result" in note for note in found.notes)
    assert not check(net(mode="forward", make=ListOfKeys), instead(FullRing), steps=STEPS).ok


CACHED = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.keys = None

    def forward(self, x):
        keys = self.project(x)
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys])
        return keys @ self.keys.T

def get_inputs():
    return [torch.randn(3, 4)]
"""


def test_a_cache_that_begins_as_none_is_carried_from_step_to_step(tmp_path):
    second = CACHED.replace("torch.cat([self.keys, keys])", "torch.cat([self.keys, 1.01 * keys])")
    result = compared(tmp_path, CACHED, second, "workload.mode=forward", "measurement.verification_seeds=1")
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline


COUNTED = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.project(x) * (1 + self.calls / 100)

def get_inputs():
    return [torch.randn(3, 4)]
"""


def test_a_late_step_is_held_to_limits_of_its_own_python_state(tmp_path):
    """Runs that widen limits begin with the first state: beside float64 of the late one they allowed anything."""
    second = COUNTED.replace("self.calls / 100", "min(self.calls, 30) / 100")
    result = compared(tmp_path, COUNTED, second, "workload.mode=forward", "measurement.verification_seeds=1")
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline
    assert "after 48 steps: output" in result.headline


LENGTHS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x):
        return self.project(x) + PLACES

def get_inputs():
    return [torch.randn(2, int(torch.randint(3, 9, ())), 4)]
"""
SINES = "torch.arange(x.shape[1])[:, None].sin()"


def test_what_is_remembered_of_a_short_batch_is_tried_on_a_longer_one(tmp_path):
    second = LENGTHS.replace(
        "return self.project(x) + PLACES",
        "self.most = getattr(self, 'most', x.shape[1])\n"
        "        return self.project(x) + torch.arange(x.shape[1])[:, None].clamp(max=self.most - 1).sin()",
    )
    settings = ("workload.mode=forward", "measurement.verification_seeds=1", "seed=9")
    result = compared(tmp_path, LENGTHS.replace("PLACES", SINES), second, *settings)
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline
    assert "after 48 steps: output" in result.headline
