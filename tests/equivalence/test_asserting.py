"""Steps whose kernels may assert on values are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

from optexp.equivalence.asserting import Asserting, IndicesAsBefore

X = torch.rand(8, 8, dtype=torch.float64)
INDEX = torch.arange(8)

ASSERTING = {
    "bce": lambda x: functional.binary_cross_entropy(x, x),
    "loss of classes": lambda x: functional.cross_entropy(x, INDEX),
    "row of an index": lambda x: x[(x[0] * 7).long()],
    "gather": lambda x: x.gather(1, INDEX[:, None]),
    "bernoulli": lambda x: torch.bernoulli(x),
    "poisson": lambda x: torch.poisson(x),
    "attention": lambda x: flex_attention(*[x.expand(1, 1, 8, 8).float()] * 3),
    "inside of a condition": lambda x: torch.cond(x.sum() > 0, torch.bernoulli, torch.cos, (x,)),
    "assertion": lambda x: torch._assert_async((x < 2).all()),
}
OTHERS = {
    "condition": lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "convolution": lambda x: functional.conv2d(x[None, None], torch.ones(1, 1, 3, 3, dtype=x.dtype)).softmax(-1),
    "mask": lambda x: torch.where(x > 0.5, x, 0.0).masked_fill(x > 0.9, 1.0).sum(),
    "counter": lambda x: x * torch.ones((), dtype=torch.long).add_(1).clone(),
    "sorted": lambda x: x.topk(2).values @ x[:2],
}


@pytest.mark.parametrize("step", ASSERTING.values(), ids=ASSERTING)
def test_a_step_with_values_that_a_kernel_checks_may_assert(step: Callable[[Tensor], Tensor]) -> None:
    asserting = Asserting()
    with asserting.looking():
        step(X)
    assert asserting.may


@pytest.mark.parametrize("step", OTHERS.values(), ids=OTHERS)
def test_others_do_not(step: Callable[[Tensor], Tensor]) -> None:
    asserting = Asserting()
    assert asserting.may, "no step was looked at"
    with pytest.raises(ValueError, match="wrong"), asserting.looking():
        raise ValueError("wrong")
    assert asserting.may, "the step did not end"
    with asserting.looking():
        step(X)
    assert not asserting.may
    assert asserting.looked


def test_an_index_far_beyond_those_before_is_an_error() -> None:
    table, count, indices = torch.randn(9, 2), torch.tensor(3), IndicesAsBefore()
    with indices:
        table[count + torch.arange(2)]
        indices.later = True
        table[count + torch.arange(3)]
        (count * 3600) ** 2  # no index
        with pytest.raises(IndexError, match="takes 10, and no more than 4"):
            torch.nn.functional.embedding(count + 7, table)
