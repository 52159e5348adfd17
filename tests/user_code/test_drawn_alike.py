"""Random numbers of a step: the same in every arm, and in float64 those of float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from optexp.errors import Unsupported
from optexp.result import Verdict
from optexp.support.float64 import InFloat64, is_wide
from optexp.user_code.drawn_alike import draws, seeded
from tests.two_files import compared

CPU = torch.device("cpu")
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "randn": lambda like: torch.randn(like.shape),
    "rand_like": torch.rand_like,
    "normal_": lambda like: torch.empty_like(like).normal_(2.0, 3.0),
    "normal": lambda like: torch.distributions.Normal(like, like.exp()).rsample(),
    "bernoulli": lambda like: torch.bernoulli(like.sigmoid()),
    "multinomial": lambda like: torch.multinomial(like.softmax(-1), 3),
    "categorical": lambda like: torch.distributions.Categorical(logits=like).sample(),
    "complex": lambda like: torch.view_as_real(torch.randn(like.shape, dtype=torch.complex64)),
    "float64": lambda like: torch.rand(like.shape, dtype=torch.float64),
    "uniform_ of nn.init": lambda like: nn.init.uniform_(torch.empty_like(like), -1, 2),
    "normal_ of nn.init": lambda like: nn.init.normal_(torch.empty_like(like), 1, 2),
    "a layer": lambda like: nn.Linear(10, 4).weight.detach(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_float64_draws_what_float32_draws(kind: str) -> None:
    like = torch.linspace(-1, 1, 40).view(4, 10)
    with seeded(3, CPU, wide=False):
        narrow = KINDS[kind](like)
    with InFloat64(torch.float32), seeded(3, CPU, wide=True):
        wide = KINDS[kind](like.double())
    assert not wide.is_floating_point() or wide.dtype is torch.float64
    torch.testing.assert_close(wide.to(narrow.dtype), narrow)
    torch.manual_seed(4)
    narrow = KINDS[kind](like)
    with InFloat64(torch.float32):
        torch.manual_seed(4)
        torch.testing.assert_close(KINDS[kind](like.double()).to(narrow.dtype), narrow)


def test_generators_are_as_before() -> None:
    before = torch.get_rng_state()
    with seeded(3, CPU, wide=False):
        first = torch.rand(2)
    assert torch.equal(before, torch.get_rng_state())
    with seeded(4, CPU, wide=False):
        assert not torch.equal(torch.rand(2), first)


def test_which_steps_draw() -> None:
    x = torch.ones(8)
    assert draws(lambda: torch.randn(2), CPU)
    assert not draws(lambda: x + 1, CPU)
    assert not draws(lambda: torch.dropout(x, 0.5, True), CPU)
    assert not draws(lambda: torch.dropout(torch.randn(8), 0.5, True), CPU)  # left to what is known of dropout


def test_a_graph_holds_no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(Unsupported, match="a CUDA graph holds no seed"), seeded(0, torch.device("cuda"), wide=False):
        pass


OWN_GENERATOR: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "randn": lambda like, own: torch.randn(like.shape, generator=own),
    "normal_": lambda like, own: torch.empty_like(like).normal_(generator=own),
    "bernoulli": lambda like, own: torch.bernoulli(like.sigmoid(), generator=own),
}


@pytest.mark.parametrize("kind", OWN_GENERATOR)
def test_float64_draws_what_float32_draws_from_a_generator_of_the_users(kind: str) -> None:
    like, (first, second) = torch.linspace(-1, 1, 40), (torch.Generator().manual_seed(3) for _ in range(2))
    narrow = OWN_GENERATOR[kind](like, first)
    with InFloat64(torch.float32):
        wide = OWN_GENERATOR[kind](like.double(), second)
    assert is_wide(wide)
    torch.testing.assert_close(wide.float(), narrow)
    assert torch.equal(first.get_state(), second.get_state())


NOISY = """
import torch
from torch import nn

own = torch.Generator().manual_seed(1)

def Model():
    return nn.Linear(4, 2)

def get_inputs():
    return [torch.randn(8, 4), torch.randint(2, (8,))]

def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1)

def train_step(model, batch, optimizer):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    for p in model.parameters():
        p.grad += 0.1 * torch.randn(p.shape, generator=own)
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "verdict"), [("torch.randn", Verdict.VERIFIED), ("1.1 * torch.randn", Verdict.NOT_EQUIVALENT)]
)
def test_noise_of_a_generator_of_the_users_is_compared(tmp_path: Path, scale: str, verdict: Verdict) -> None:
    result = compared(tmp_path, NOISY, NOISY.replace("torch.randn(p", f"{scale}(p"), "measurement.verification_seeds=1")
    assert result.verdict is verdict, result.headline


SECOND_NETWORK = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x)

other = None

def get_inputs():
    return [torch.randn(8, 6)]

def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1)

def train_step(model, batch, optimizer):
    global other
    if other is None:
        other = nn.Linear(6, 3)
    optimizer.zero_grad()
    loss = (model(batch[0]) - other(batch[0])).square().mean()
    loss.backward()
    optimizer.step()
    return loss
"""


def test_a_network_that_the_first_call_makes_begins_in_float64_as_in_float32(tmp_path: Path) -> None:
    other_order = SECOND_NETWORK.replace(".square().mean()", ".square().sum(0).sum() / 24")
    assert compared(tmp_path, SECOND_NETWORK, other_order).verdict is Verdict.VERIFIED
