"""What `torch.randint` gives in a user's inputs has both ends of its range."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from optexp.user_code.both_ends import MANY, BothEnds


@pytest.mark.parametrize(
    ("args", "given", "least", "largest"),
    [
        ((30_000, (2, 2)), {}, 0, 29_999),
        ((-5, 5, (3,)), {}, -5, 4),
        ((0, np.int64(50), [3]), {}, 0, 49),
        ((), {"low": 2, "high": 900, "size": (4, 5)}, 2, 899),
        ((7,), {"high": 700, "size": (2,)}, 7, 699),
        ((256, (64,)), {"dtype": torch.uint8}, 0, 255),
        ((1000, (64,)), {"dtype": torch.float32}, 0, 999),
    ],
)
def test_both_ends_occur(args: tuple[Any, ...], given: dict[str, Any], least: int, largest: int) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        with BothEnds():
            drawn = torch.randint(*args, **given)
        assert (int(drawn.min()), int(drawn.max())) == (least, largest)
        assert int((drawn == least).sum()) >= 1 + (drawn.numel() >= MANY)


def test_other_numbers_and_the_generator_are_as_without_it() -> None:
    torch.manual_seed(0)
    plain = torch.randint(9, (100,)), torch.rand(3), torch.randint(9, ()), torch.randint(9, (0,))
    torch.manual_seed(0)
    with BothEnds():
        found = torch.randint(9, (100,)), torch.rand(3), torch.randint(9, ()), torch.randint(9, (0,))
    assert int((plain[0] != found[0]).sum()) <= 3
    assert all(map(torch.equal, plain[1:], found[1:]))
