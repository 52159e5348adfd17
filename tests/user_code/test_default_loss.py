"""The loss of a model without one tells results of another sign or in another order apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from optexp.user_code.adapters import own_loss

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "another sign": torch.neg,
    "columns": lambda x: x.flip(-1),
    "rows": lambda x: x.flip(0),
    "heads and places": lambda x: x.transpose(1, 2),
    "one row": lambda x: torch.cat([x[1:], x[:1]]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_another_result_is_another_loss(change: str, size: float) -> None:
    output = torch.randn(4, 6, 6, 8, generator=torch.Generator().manual_seed(0)) * size
    right, wrong = (own_loss(x, ()).item() for x in (output, CHANGES[change](output)))
    assert abs(right - wrong) > 1e-3 * right > 0


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_outputs_of_zero_have_gradients(size: float) -> None:
    output = (torch.randn(8, 8, generator=torch.Generator().manual_seed(0)) * size).relu().requires_grad_()
    own_loss(output, ()).backward()
    assert output.grad is not None
    zeros, others = (output.grad[chosen].abs() for chosen in (output == 0, output != 0))
    assert zeros.min() > others.mean() / 100


def test_an_output_without_elements_leaves_the_loss_as_it_is() -> None:
    output = torch.randn(3, 4)
    none = torch.empty(0, 4)
    assert own_loss((output, none), ()).item() == own_loss((output,), ()).item()
