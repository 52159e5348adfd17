"""What a model keeps in Python is read, put back, described, and taken over by the same model in another process."""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import replace

import numpy
import pytest
import torch
from torch import Tensor, nn

from optexp.kernels.softmax import softmax
from optexp.program import Program, ResidentFeed, Snapshot, forward, keeping, preserved
from optexp.python_state.model_state import ModelState, unpacked
from optexp.python_state.variables import places

CPU = torch.device("cpu")
calls = 0


class Ring:
    """An object of a user's class."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self.at = 0


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.step(x)
        return self.inner(x)

    def step(self, x: Tensor) -> None:
        raise NotImplementedError


class Counter(Base):
    position = 0  # which an attribute of the same name will hide

    def step(self, x):
        self.position += 1


class History(Base):
    def __init__(self):
        super().__init__()
        self.seen, self.last, self.kept = [], deque(maxlen=2), {"sum": 0.0}

    def step(self, x):
        self.seen.append(float(x.sum()))
        self.last.append(len(self.seen))
        self.kept["sum"] += float(x.sum())


class PlainTensor(Base):
    def __init__(self):
        super().__init__()
        self.average, self.count = torch.zeros(4), numpy.zeros(1)

    def step(self, x):
        self.average.lerp_(x.mean(0), 0.5)
        self.count += 1


class Rebound(PlainTensor):
    def step(self, x):
        self.average = 0.5 * self.average + 0.5 * x.mean(0)


class Holder(Base):
    def __init__(self):
        super().__init__()
        self.ring = Ring()

    def step(self, x):
        self.ring.rows.append(x.mean(0))
        self.ring.at += 1


class Anew(Base):
    """A new object each time."""

    ring: Ring | None = None

    def step(self, x):
        before = self.ring.at if self.ring is not None else 0
        self.ring = Ring()
        self.ring.at = before + 1


class Shared(Base):
    """One dict that two attributes know."""

    def __init__(self):
        super().__init__()
        self.one = {"n": 0}
        self.inner.other = [self.one, self]  # and a circle

    def step(self, x):
        self.inner.other[0]["n"] += 1


class Global(Base):
    def step(self, x):
        global calls
        calls += 1


class OfClass(Base):
    total = 0

    def step(self, x):
        type(self).total += 1


class Hidden(Base):
    """A module that is in no list of modules."""

    def __init__(self):
        super().__init__()
        self.others = [nn.BatchNorm1d(4)]

    def step(self, x):
        self.others[0](x)


class Counts(Base):
    def __init__(self):
        super().__init__()
        self.numbers = itertools.count()

    def step(self, x):
        next(self.numbers)


class GrowingBuffer(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(1, 4))

    def step(self, x):
        self.bank = torch.cat([self.bank, x.mean(0, keepdim=True)])


def closure() -> nn.Module:
    count = 0

    class Closed(Base):
        def step(self, x):
            nonlocal count
            count += 1
            self.seen = count

    return Closed()


MODELS = {
    "a counter": (Counter, {"position"}),
    "a list, a deque and a dict": (History, {"seen", "last", "kept"}),
    "a tensor and an array": (PlainTensor, {"average", "count"}),
    "a tensor, assigned anew": (Rebound, {"average"}),
    "an object": (Holder, {"ring"}),
    "a new object each time": (Anew, {"ring"}),
    "one dict of two": (Shared, {"one"}),
    "a global": (Global, {"calls"}),
    "of the class": (OfClass, {"OfClass.total"}),
    "a hidden module": (Hidden, {"others[0].num_batches_tracked", "others[0].running_mean", "others[0].running_var"}),
    "an iterator that counts": (Counts, {"numbers"}),
    "in a closure": (closure, {"count", "seen"}),
}


def made(build) -> tuple[nn.Module, ModelState]:
    torch.manual_seed(0)
    model = build()
    return model, ModelState(model)


def stepped(model: nn.Module, times: int) -> None:
    generator = torch.Generator().manual_seed(times)
    for _ in range(times):
        model(torch.randn(8, 4, generator=generator))


@pytest.mark.parametrize(("build", "names"), MODELS.values(), ids=MODELS)
def test_what_a_step_changes_is_told_and_put_back(build, names):
    model, state = made(build)
    assert state.changes(state.first, state.read()) == {}
    stepped(model, 3)
    after = state.read()
    assert state.changes(state.first, after).keys() == names
    state.write(state.first)
    assert state.changes(state.first, state.read()) == {}
    stepped(model, 3)
    again = {name: change.pair for name, change in state.changes(state.first, state.read()).items()}
    for name, change in state.changes(state.first, after).items():
        assert str(change.pair) == str(again[name])
    state.write(state.first)


@pytest.mark.parametrize(("build", "names"), MODELS.values(), ids=MODELS)
def test_another_process_takes_it_over(build, names):
    model, state = made(build)
    if names & {"calls", "OfClass.total"}:
        pytest.skip("in one process both are the same variable")
    _, there = made(build)
    stepped(model, 3)
    told = state.news(state.read())
    assert told.keys() == names
    there.adopt(told)
    ours, theirs = (s.changes(s.first, s.read()) for s in (state, there))
    assert {name: str(change.after) for name, change in ours.items()} == {
        name: str(change.after) for name, change in theirs.items()
    }
    there.adopt({})
    assert there.changes(there.first, there.read()) == {}
    assert state.changes(state.first, state.read()).keys() == names, "the other's own stay what they were"


def test_objects_stay_the_same_ones():
    model, state = made(Shared)
    kept = model.one
    stepped(model, 2)
    state.write(state.first)
    assert model.one is kept is model.inner.other[0]
    assert kept == {"n": 0}


def test_a_flag_that_hides_an_attribute_of_the_class_goes_again():
    model, state = made(Counter)
    stepped(model, 1)
    assert vars(model)["position"] == 1
    state.write(state.first)
    assert "position" not in vars(model)
    assert model.position == 0


def test_a_buffer_that_was_assigned_anew_is_put_back_with_its_shape():
    program = keeping(Program(GrowingBuffer(), forward, ResidentFeed(CPU)))
    program.feed.reset([(torch.randn(8, 4),)])
    start = Snapshot(program)
    program.run()
    assert program.model.bank.shape == (2, 4)
    start.restore(program)
    assert program.model.bank.shape == (1, 4)


def test_a_model_without_any_module_of_the_baselines_is_another_one():
    program = keeping(Program(Counter(), forward, ResidentFeed(CPU)))
    assert program.keeps is not None
    assert not program.keeps.another
    for model, another in ((nn.Sequential(program.model), False), (Counter(), True), (program.model, False)):
        changed = keeping(replace(program, model=model)).keeps
        assert changed is not None
        assert changed.another is another


def test_warming_up_leaves_no_trace():
    program = Program(Counter(), forward, ResidentFeed(CPU))
    program.feed.reset([(torch.randn(8, 4),)])
    with preserved(program):
        program.run()
    assert "position" not in vars(program.model)


def test_what_a_strategy_set_before_is_what_checks_start_from():
    program = keeping(Program(nn.Sequential(nn.ReLU()), forward, ResidentFeed(CPU)))
    start = Snapshot(program)
    program.model[0].inplace = True
    program = keeping(program)
    start.remember(program)
    start.restore(program)
    assert program.model[0].inplace


def test_a_module_keeps_its_name_in_a_wrapper():
    model, _ = made(Counter)
    outer = nn.Sequential(model)
    state = ModelState(outer)
    model(torch.randn(8, 4))
    assert state.changes(state.first, state.read()).keys() == {"position"}


def test_random_numbers_of_python_and_numpy_are_put_back_but_not_compared():
    _, state = made(Counter)
    state.begin()
    drawn = random.random(), numpy.random.rand()
    state.write(state.first)
    assert (random.random(), numpy.random.rand()) == drawn
    assert state.moves(state.first) == {}


class Cached(Base):
    """Makes a mask at the first call, a table for each length, and keeps a map for its readers."""

    mask = weights = None

    def __init__(self):
        super().__init__()
        self.tables = {}

    def step(self, x):
        if self.mask is None:
            self.mask = torch.ones(4)
        self.weights = x.softmax(-1)
        self.tables.setdefault(len(x), x.new_ones(len(x)))


def test_caches_are_no_state():
    model, state = made(Cached)
    stepped(model, 1)
    before = state.read()
    model(torch.randn(5, 4))
    found = {name: unpacked(packed) for name, packed in state.moves(before).items()}
    assert {name: change.state for name, change in found.items()} == {"weights": False, "tables": False}


class OurSoftmax(nn.Module):
    def forward(self, x):
        return softmax(x)


def test_caches_of_the_kernel_kit_are_no_state():
    """Else the configs that a rehearsal raced would be forgotten when the program is put back."""
    names = {place.name for place in places(OurSoftmax().forward)}
    assert not names & {"_chosen", "_ready", "rehearsals"}, names


def test_state_that_is_told_as_such():
    model, state = made(PlainTensor)
    stepped(model, 1)
    before = state.read()
    stepped(model, 1)
    assert all(unpacked(packed).state for packed in state.moves(before).values())
    assert all(unpacked(packed).begun for packed in state.moves(before).values())


class Odd(Base):
    def __init__(self):
        super().__init__()
        self.source = iter([1, 2, 3])

    def step(self, x):
        next(self.source)


def test_what_cannot_be_put_back_is_named():
    _, state = made(Odd)
    assert state.strange() == ["source (list_iterator)"]


def test_ordinary_models_keep_nothing():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 2)
    state = ModelState(model)
    model(torch.randn(3, 5, 16)).sum().backward()
    assert state.changes(state.first, state.read()) == {}
    assert state.strange() == []
    recurrent = nn.LSTM(4, 4)
    state = ModelState(recurrent)
    recurrent(torch.randn(3, 5, 4))
    assert state.changes(state.first, state.read()) == {}
