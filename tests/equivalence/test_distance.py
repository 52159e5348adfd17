"""Whether two runs computed the same thing at all."""

from __future__ import annotations

from math import inf, isclose

import pytest
import torch
from torch import Tensor

from optexp.equivalence.distance import farthest

ONE = torch.tensor([3.0, 4.0])


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"out/a": ONE}, {"out/a": ONE}, 0.0),
        ({"out/a": ONE, "out/b": ONE * 1.1}, {"out/a": ONE, "out/b": ONE}, 0.1),
        ({"out/a": ONE * 0}, {"out/a": ONE}, 1.0),
        ({"out/a": ONE}, {"out/a": ONE * 0}, inf),
        ({"out/a": ONE}, {"out/b": ONE}, inf),
        ({"out/a": ONE[:1]}, {"out/a": ONE}, inf),
        ({"out/a": torch.tensor([1, 2, 3, 4])}, {"out/a": torch.tensor([1, 2, 3, 5])}, 0.5),
        ({"out/a": ONE * torch.nan}, {"out/a": ONE * torch.nan}, 0.0),
        ({"out/a": ONE * torch.nan}, {"out/a": ONE}, 1.0),
        ({"out/a": ONE + 1j}, {"out/a": ONE - 1j}, (8 / 27) ** 0.5),
        # A gradient that is nothing but rounding has no size of its own.
        ({"grad/a": ONE, "grad/b": ONE * 1e-9}, {"grad/a": ONE, "grad/b": -ONE * 1e-9}, 2e-9),
    ],
)
def test_the_farthest_result_counts(one: dict[str, Tensor], other: dict[str, Tensor], expected: float) -> None:
    assert isclose(farthest(one, other), expected, rel_tol=1e-3)
