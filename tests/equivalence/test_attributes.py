"""What a model keeps in Python is judged: by results first, then by what is left for later calls."""

from __future__ import annotations

import pytest
import torch

from optexp.equivalence.attributes import LEFT
from optexp.program import Program
from tests.equivalence.counting import (
    Annealed,
    Flipped,
    Forgetful,
    Growing,
    Lazy,
    Listed,
    Once,
    Plain,
    Recurrent,
    Reset,
    Rows,
    Statistics,
    Stopped,
    WarmedUp,
    captured,
    of,
)

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
