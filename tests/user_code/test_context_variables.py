"""What a model keeps in a ContextVar is put back before each check, and compared, as other variables are."""

from __future__ import annotations

from contextvars import ContextVar

import torch
from torch import Tensor, nn

from optexp.python_state.model_state import ModelState, unpacked

CALLS = ContextVar("calls", default=0)
UNSET = ContextVar[int]("unset")


class Counting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        CALLS.set(CALLS.get() + 1)
        return x * CALLS.get() + UNSET.get(2)


def test_a_count_in_a_context_variable_is_put_back_and_compared() -> None:
    model = Counting()
    state = ModelState(model)
    first, x = state.read(), torch.ones(())
    assert [float(model(x)), float(model(x))] == [3.0, 4.0]
    (name,) = moved = state.moves(first)
    assert name.endswith("CALLS")
    assert unpacked(moved[name]).pair == (0, 2)
    news = state.news(state.read())
    state.write(first)
    assert (CALLS.get(), UNSET.get(None)) == (0, None)
    state.adopt(news)
    assert CALLS.get() == 2
    state.write(first)
