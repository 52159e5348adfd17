"""Noisy runs of the baseline: as large as promised, the same for the same seed, gone afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from optexp.equivalence.noise import RUNS, amplitude, noisy, unhooked
from optexp.support.tolerances import tolerance_of


def relative(model, x, seed=1):
    clean = model(x)
    with noisy(model, seed):
        changed = model(x)
    return ((changed - clean).square().mean().sqrt() / clean.square().mean().sqrt()).item()


@pytest.mark.parametrize(("dtype", "units"), [(torch.float32, 64 * 2**-24), (torch.float64, 64 * 2**-53)])
def test_noise_is_in_proportion_to_rounding(dtype, units):
    model = nn.Sequential(nn.Identity())
    assert relative(model, torch.randn(4096, dtype=dtype)) == pytest.approx(units, rel=0.1)


@pytest.mark.parametrize(
    ("name", "share", "units"),
    [("float32", 0.25, 16.0), ("tf32", 0.25, 1.0), ("bfloat16", 0.25, 1.0), ("tf32", 1.0, 1.0), ("bfloat16", 1.0, 2.0)],
)
def test_a_share_of_the_noise_still_meets_the_ties_of_rounded_inputs(name: str, share: float, units: float) -> None:
    assert amplitude(name, share) == units * tolerance_of(name).unit


def test_a_model_without_children_is_its_own_leaf():
    assert relative(nn.GELU(), torch.randn(64)) > 0


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_torchscript_takes_no_hooks_and_has_its_parameters_disturbed():
    model = torch.jit.script(nn.Sequential(nn.Linear(64, 64), nn.GELU()))
    kept = [parameter.clone() for parameter in model.parameters()]
    assert relative(model, torch.randn(8, 64)) > 0
    assert all(map(torch.equal, model.parameters(), kept))


def test_parameter_lists_are_no_leaves():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList([torch.ones(64)])

        def forward(self, x):
            return x * self.weights[0]

    assert relative(Listed(), torch.randn(64)) > 0


class Learner(nn.Module):
    """Functions of its parameters, as in meta-learning."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(64, 64)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weights[0])


class Meta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = Learner(), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))


def test_parameters_that_functions_use_are_disturbed() -> None:
    model, x = Meta(), torch.randn(8, 64)
    assert [*unhooked(model)] == ["net.weights.0"]
    clean, weights, bias = model.net(x), model.net.weights[0].clone(), model.head.weight.clone()
    with noisy(model, 1):
        moved = model.net(x)
        assert torch.equal(model.head.weight, bias)
    assert 0 < float((moved - clean).detach().norm() / clean.detach().norm()) < 128 * 2.0**-24
    assert torch.equal(model.net.weights[0], weights)


def test_an_update_under_noise_remains() -> None:
    model = Meta()
    before = model.net.weights[0].clone()
    with noisy(model, 1), torch.no_grad():
        model.net.weights[0][0] += 0.5
    after = model.net.weights[0]
    assert torch.equal(after[1:], before[1:])
    assert torch.allclose(after[0], before[0] + 0.5, rtol=0, atol=4 * 2.0**-24 * float(before.abs().max() + 1))


def test_nested_outputs_and_integers():
    class Pair(nn.Module):
        def forward(self, x):
            return {"values": x, "indices": (x.argsort(),)}

    x = torch.randn(64)
    with noisy(model := Pair(), 1):
        seen = model(x)
    assert not torch.equal(seen["values"], x)
    assert torch.equal(seen["indices"][0], x.argsort())


def test_rows_of_nested_tensors_get_noise():
    class Rows(nn.Module):
        def forward(self, x, layout):
            return torch.nested.as_nested_tensor([x[:40], x[40:]], layout=layout)

    x = torch.randn(64, 3, requires_grad=True)
    with noisy(model := Rows(), 1):
        seen = model(x, torch.jagged)
        plain = model(x, torch.strided)
    assert [len(rows) for rows in seen.unbind()] == [40, 24]
    assert not torch.equal(seen.values(), x)
    assert torch.allclose(seen.values(), x, rtol=1e-3, atol=1e-3)
    assert torch.equal(torch.cat(plain.unbind()), x)
    seen.values().sum().backward()
    assert x.grad is not None


class Rounded(nn.Module):
    """Integers, and how often it was asked."""

    def __init__(self):
        super().__init__()
        self.scale, self.calls = nn.Parameter(torch.full((64,), 2.0**20)), 0

    def forward(self, x):
        self.calls += 1
        return (x * self.scale).round().to(torch.int32), x == 0


def test_what_a_lone_module_rounds_is_disturbed_by_its_parameters_once_only_integers_count():
    model, x = Rounded(), torch.randn(64)
    x[0] = 0.0
    (clean, zeros), found = model(x), list[torch.Tensor]()
    for seed in (RUNS, RUNS + 1):
        with noisy(model, seed):
            values, at = model(x)
        found.append(values)
        assert torch.equal(at, zeros), "what follows from the batch alone is as it was"
    assert torch.equal(found[0], clean)
    assert 0 < (found[1] - clean).abs().max() < 64  # 64·u times 2²⁰ is 4
    assert model.calls == 3
    assert torch.equal(model.scale, torch.full((64,), 2.0**20))


def test_dtypes_that_got_noise_are_told():
    model = nn.Sequential(nn.Identity(), Finer())
    with noisy(model, 1) as met:
        model(torch.randn(64))
    assert met == {torch.float32, torch.float64}


class Finer(nn.Module):
    def forward(self, x):
        return x.double()


def test_gradients_are_disturbed_on_their_way_back_too():
    x = torch.ones(64, requires_grad=True)
    with noisy(model := nn.Identity(), 1):
        model(x).sum().backward()
    assert 0 < (x.grad - 1).abs().max() < 1e-4


def test_noise_is_reproducible_and_leaves_the_global_generator_alone():
    model, x = nn.GELU(), torch.randn(64)
    before = torch.get_rng_state()
    with noisy(model, 1):
        first = model(x)
    with noisy(model, 1):
        second = model(x)
    with noisy(model, 2):
        third = model(x)
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    assert torch.equal(model(x), nn.GELU()(x))
    assert torch.equal(before, torch.get_rng_state())


def test_noise_reaches_modules_that_are_called_under_vmap() -> None:
    """As in meta-learning, whose steps were an error: vmap draws no random numbers unless it is told how."""
    model = nn.Linear(3, 3)

    def step(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, params, (x,)).square().sum()

    params, x = dict(model.named_parameters()), torch.randn(5, 2, 3)
    plain = vmap(grad(step), (None, 0))(params, x)["weight"]
    with noisy(model, 1):
        noised = vmap(grad(step), (None, 0))(params, x)["weight"]
    assert plain.shape == noised.shape
    assert 0 < float((plain - noised).abs().max()) < 1e-3


def test_gradients_of_gradients_are_disturbed_too() -> None:
    """Of a gradient penalty: where a gradient is differentiated, hooks may get none."""
    critic = nn.Sequential(nn.Conv2d(3, 4, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(4, 1, 4))
    images = torch.rand(2, 3, 8, 8, requires_grad=True)
    with noisy(critic, seed=1):
        (slope,) = torch.autograd.grad(critic(images).sum(), images, create_graph=True)
        (critic(images.detach()).mean() + (slope.flatten(1).norm(dim=1) - 1).square().mean()).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in critic.parameters())
