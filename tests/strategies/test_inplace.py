"""In place only where nobody can tell: the same bits, the caller's tensors intact, reasons for what stays."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optexp.errors import Unsupported
from optexp.program import Program, ResidentFeed, forward, forward_backward
from optexp.strategies.inplace import Inplace
from optexp.strategy import BITWISE
from optexp.workloads.gelu import Gelu
from optexp.workloads.mlp import Mlp


def program_of(model: nn.Module, *batch: Tensor, trains: bool = False) -> Program:
    """A program around a model; when it trains, the loss is the mean square of the output."""
    feed = ResidentFeed(torch.device("cpu"))
    feed.reset([batch])
    loss = (lambda output, batch: output.square().mean()) if trains else None
    return Program(model=model, step=forward_backward if trains else forward, feed=feed, loss=loss)


def operations(program: Program) -> int:
    return Inplace().apply(program)[1]["rewritten"]


def test_same_bits_in_every_mode(workload, build, observe):
    for ours, plain in zip(observe(build(workload, Inplace())), observe(build(workload)), strict=True):
        assert ours.keys() == plain.keys()
        assert [name for name in plain if not torch.equal(ours[name], plain[name])] == []


def test_batch_is_left_intact(build):
    program = build(Gelu(size=32), Inplace())
    before = program.feed.batches[0][0].clone()
    program.run()
    assert torch.equal(program.feed.batches[0][0], before)


def test_gelu_formula_allocates_only_twice(build):
    _, notes = Inplace().apply(build(Gelu(size=32)))
    assert notes["rewritten"] == 7  # of nine: 0.044715 * x and 0.5 * x read the input
    evidence = Inplace().evidence(None, None, notes, {})
    assert evidence.engaged
    assert "7 operations in place" in evidence.text


@pytest.mark.parametrize(
    ("activation", "mode", "expected"),
    [("gelu", "forward", 4), ("gelu", "train", 0), ("relu", "train", 4), ("tanh", "forward_backward", 4)],
)
def test_what_backward_reads_is_kept(build, activation: str, mode: str, expected: int):
    _, notes = Inplace().apply(build(Mlp(mode=mode, activation=activation, dim=8, batch_size=2)))
    assert notes["rewritten"] == expected
    evidence = Inplace().evidence(None, None, notes, {})
    assert evidence.engaged == bool(expected)
    assert expected or evidence.text == "4 kept: backward needs its operand"


class ReadAgain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        return torch.tanh(y) * y  # the product may overwrite tanh's result; tanh must not overwrite y


class Returned(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y.exp()


class Views(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x.view(-1)) + 1.0  # the sum alone: relu would overwrite the input


class Broadcast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x[:1] + 0.0) - x  # (1, n) cannot hold (n, n)


class Promoted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.float16) * 2) + x


class TrainedChain(nn.Module):
    """In training: tanh's result, which its own backward reads, must survive the sum after it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh() + 1.0
        return (y * self.linear.weight - 3.0).neg()


@pytest.mark.parametrize(
    ("model", "expected"), [(ReadAgain(), 1), (Returned(), 0), (Views(), 1), (Broadcast(), 0), (Promoted(), 0)]
)
def test_values_that_are_read_again_or_do_not_fit_stay(model: nn.Module, expected: int):
    x = torch.randn(4, 4)
    program = program_of(model, x.clone())
    rewritten, notes = Inplace().apply(program)
    assert notes["rewritten"] == expected
    for name, value in rewritten.run().items():
        assert torch.equal(value, forward(program, (x,))[name])
    assert torch.equal(program.feed.batches[0][0], x)  # type: ignore[attr-defined]


def test_training_keeps_results_that_backward_reads():
    torch.manual_seed(0)
    model, x = TrainedChain(), torch.randn(4, 4)
    plain, (rewritten, notes) = program_of(model, x, trains=True), Inplace().apply(program_of(model, x, trains=True))
    assert notes["operations"] == {"tanh": 1, "sub": 1, "neg": 1}
    plain.run()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    rewritten.run()
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())


def test_parameters_are_shared_under_their_names(build):
    program = build(Mlp(dim=8, batch_size=2, activation="relu"))
    before = list(program.model.named_parameters())
    rewritten, _ = Inplace().apply(program)
    assert list(map(id, dict(rewritten.model.named_parameters()).values())) == [id(p) for _, p in before]


class Logs(nn.Module):
    """Parameters in another order than its forward takes them, which `clip_grad_norm_` adds in; a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.logged = nn.Linear(4, 4), nn.Linear(4, 4), [0.0]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.first(x))) + 1

    def training_step(self, x: Tensor) -> Tensor:
        self.logged.append(1.0)
        return self(x).sum()


def test_the_model_stays_what_it_is_to_its_user():
    model, x = Logs(), torch.randn(3, 4)
    names, expected = [name for name, _ in model.named_parameters()], model.training_step(x)
    made, notes = Inplace().apply(program_of(model, x))
    assert notes["rewritten"] == 2
    assert [name for name, _ in made.model.named_parameters()] == names
    assert isinstance(made.model, Logs)
    assert torch.equal(made.model.training_step(x), expected)
    assert made.model.logged == [0.0, 1.0, 1.0]
    assert "relu_" in inspect.getsource(type(made.model).forward)


class Hooked(nn.Module):
    """relu may overwrite neither what a hook keeps nor a view that a hook makes; the second ReLU's own hook stays."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)
        self.second, self.relu = nn.Linear(4, 4), nn.ReLU()
        self.kept: list[Tensor] = []
        self.first.register_full_backward_hook(lambda module, into, out: None)
        self.second.register_forward_hook(lambda module, given, out: self.kept.append(out))
        self.relu.register_forward_hook(lambda module, given, out: 2 * out)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(F.relu(self.norm(F.relu(self.first(x)))))
        return F.relu(y) + self.relu(x)


def test_hooks_find_what_they_found_before():
    torch.manual_seed(0)
    x, plain, model = torch.randn(8, 4), Hooked(), Hooked()
    model.load_state_dict(plain.state_dict())
    rewritten, notes = Inplace().apply(program_of(model, x, trains=True))
    assert notes["operations"] == {"relu": 1}  # that of the norm
    expected = program_of(plain, x, trains=True).run()["loss"]
    assert torch.equal(rewritten.run()["loss"], expected)
    assert torch.equal(model.kept[-1], plain.kept[-1])
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    plain.register_forward_hook(lambda module, given, out: 2 * out)
    with pytest.raises(Unsupported, match="the model itself has hooks, which a graph would leave out"):
        operations(program_of(plain, x))


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1


def test_a_branch_on_a_value_is_unsupported():
    with pytest.raises(Unsupported, match=r"torch\.fx cannot trace"):
        operations(program_of(Branches(), torch.ones(2)))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.neg().neg()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Adversary(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Reversed.apply(x) + 1


def test_a_function_with_a_backward_of_its_own_is_named():
    with pytest.raises(Unsupported, match=r"its forward calls Reversed\.apply, whose backward a graph would leave out"):
        operations(program_of(Adversary(), torch.ones(2)))


class Selects(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0] + 1


def test_shapes_that_depend_on_values_are_unsupported():
    with pytest.raises(Unsupported, match=r"cannot tell the shapes of all values .*: leave it out"):
        operations(program_of(Selects(), torch.ones(2)))


def test_promises_bits():
    assert Inplace().contract is BITWISE


class PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(4, 4), nn.ReLU()
        self.spare = nn.Sequential(nn.Linear(2, 2, bias=False))
        self.register_buffer("scale", torch.ones(4))
        self.spare.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x) + 1)


def test_what_the_forward_does_not_use_stays_in_the_state() -> None:
    program = program_of(model := PartlyUsed(), torch.randn(3, 4))
    kept, notes = Inplace().apply(program)
    assert notes["rewritten"] == 2
    assert dict(kept.model.named_parameters()) == dict(model.named_parameters())
    assert dict(kept.model.named_buffers()) == dict(model.named_buffers())
    assert kept.model.state_dict().keys() == model.state_dict().keys()
