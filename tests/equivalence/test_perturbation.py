"""What a model begins with as zeros and ones is moved, likewise in every process, and nothing else is."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from optexp.equivalence.perturbation import move_parameters, told, turn_parameters, vary
from optexp.result import Verdict
from tests.two_files import compared


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.shut = nn.Parameter(torch.zeros(64, 64))
        self.small = nn.Parameter(torch.full((64,), 1e-3))
        self.forget = nn.Parameter(torch.cat([torch.zeros(32), torch.ones(32)]))
        self.gain = nn.Parameter(torch.ones(1))
        self.affine = nn.Parameter(torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0]))
        self.heads = nn.Parameter(torch.tensor(8.0))
        self.masked = nn.Parameter(torch.full((4,), -torch.inf))
        self.mean = nn.Parameter(torch.tensor([0.485, 0.456, 0.406]))
        self.register_buffer("positions", torch.zeros(64))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


MOVED = {
    "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "shut", "small", "forget", "gain",
    "affine",
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_was_filled_is_moved_and_what_was_drawn_is_not(dtype: torch.dtype) -> None:
    plain, model = Model().to(dtype), Model().to(dtype)
    assert set(vary(model, seed=3)) == MOVED
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name]) == (name not in MOVED), name
    again = Model().to(dtype)
    vary(again, seed=3)
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))


def test_signs_stay_and_matrices_keep_the_size_of_what_they_give() -> None:
    model = Model()
    vary(model, seed=0)
    assert (model.norm.running_var > 0).all()
    assert (model.small > 0).all()
    assert model.gain > 0
    assert 0.3 < (torch.randn(1000, 64) @ model.shut.T).std() < 0.7
    assert apart(model.forget)
    assert apart(model.norm.weight)


def apart(tensor: Tensor) -> bool:
    return len(tensor.unique()) == len(tensor)


def test_people_are_told_which() -> None:
    assert told([]) == ""
    assert told(["a", "b"]).startswith("a, b (2) began as one value, or as a copy")
    assert told(list("abcd")).startswith("a, b, c, ... (4)")


def test_other_values_of_parameters_are_given_twice_without_a_trace():
    drawn, second = torch.randn(4, 3), torch.randn(3)
    state = {"param/a": torch.zeros(3), "param/b": drawn.clone(), "param/c": torch.ones(3), "param/d": second.clone()}
    turn_parameters(state)
    assert state["param/a"].eq(0.125).all(), "a gate that is shut opens"
    assert state["param/c"].eq(0.5).all()
    assert torch.equal(state["param/b"], -drawn)
    turn_parameters(state)
    assert not state["param/a"].any()
    assert state["param/c"].eq(1).all()
    assert torch.equal(state["param/b"], drawn)
    assert torch.equal(state["param/d"], second)


def test_parameters_move_in_place_without_a_change_of_sign():
    drawn = {name: torch.rand(4, 3) + 0.1 for name in "abc"}
    held = {name: nn.Parameter(value.clone()) for name, value in drawn.items()}
    shut, indices = nn.Parameter(torch.zeros(3)), torch.arange(3)
    versions = {name: parameter._version for name, parameter in held.items()}
    move_parameters({**held, "z": shut, "indices": indices})
    for name, parameter in held.items():
        assert torch.equal(parameter, drawn[name] * (0.25 if name == "b" else 0.5))
        assert parameter._version > versions[name], "compiled code and a cache that asks see that it changed"
    assert shut.eq(0.125).all()
    assert indices.tolist() == [0, 1, 2]


class Targets(nn.Module):
    """Copies of what learns, beside what is equal for good."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.early, self.online = nn.Linear(8, 8), nn.Linear(8, 8)
        self.early.load_state_dict(self.online.state_dict())
        self.early.requires_grad_(False)
        self.register_buffer("shadow", self.online.weight.detach().clone())
        self.register_buffer("alias", self.online.weight.detach())
        self.fixed = nn.ParameterList(nn.Parameter(torch.arange(8.0), requires_grad=False) for _ in range(2))
        self.register_buffer("table", torch.linspace(0, 1, 64))
        self.register_buffer("same_table", torch.linspace(0, 1, 64))


def test_copies_of_what_learns_are_moved_apart() -> None:
    plain, model = Targets(), Targets()
    names = {"early.weight", "early.bias", "shadow"}
    assert set(vary(model, seed=3)) == names
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name]) == (name not in names), name
        assert torch.equal(tensor.sign(), plain.state_dict()[name].sign())
    assert not torch.equal(model.shadow, model.early.weight)


DOUBLE_Q = """
import copy

import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, before, after, rewards):
        best = self.online(after).argmax(1, keepdim=True)
        wanted = rewards + 0.9 * self.target(after).gather(1, best)[:, 0]
        return (self.online(before).amax(1) - wanted.detach()).square().mean()

def get_inputs():
    return torch.randn(64, 4), torch.randn(64, 4), torch.randn(64)

def get_optimizer(params):
    return torch.optim.Adam(params, lr=1e-4)
"""


@pytest.mark.parametrize(
    ("instead", "verdict"),
    [
        (("argmax(1, keepdim=True)", "max(1, keepdim=True).indices"), Verdict.VERIFIED),
        (("self.online(after)", "self.target(after)"), Verdict.NOT_EQUIVALENT),
        (("self.target(after)", "self.online(after)"), Verdict.NOT_EQUIVALENT),
    ],
    ids=["the same", "actions of the target", "values of what learns"],
)
def test_a_target_is_told_from_its_source(tmp_path: Path, instead: tuple[str, str], verdict: Verdict) -> None:
    found = compared(tmp_path, DOUBLE_Q, DOUBLE_Q.replace(*instead))
    assert found.verdict is verdict, found.headline
