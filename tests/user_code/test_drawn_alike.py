"""Random numbers of a step: the same in every arm, and in float64 those of float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from optexp.errors import Unsupported
from optexp.support.float64 import InFloat64
from optexp.user_code.drawn_alike import draws, seeded

CPU = torch.device("cpu")
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "randn": lambda like: torch.randn(like.shape),
    "rand_like": torch.rand_like,
    "normal_": lambda like: torch.empty_like(like).normal_(2.0, 3.0),
    "normal": lambda like: torch.distributions.Normal(like, like.exp()).rsample(),
    "bernoulli": lambda like: torch.bernoulli(like.sigmoid()),
    "multinomial": lambda like: torch.multinomial(like.softmax(-1), 3),
    "categorical": lambda like: torch.distributions.Categorical(logits=like).sample(),
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
