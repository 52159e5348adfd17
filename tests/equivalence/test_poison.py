"""What of the allocator's free memory a plain request can reach."""

from __future__ import annotations

import pytest

from optexp.equivalence.poison import SMALL, _requests


@pytest.mark.parametrize(
    ("block", "small", "requests"),
    [
        (512, True, [512]),
        (SMALL, True, [SMALL]),
        (2 * SMALL, True, [SMALL, SMALL]),  # a segment of which nothing is in use any more
        (SMALL + 512, True, [SMALL, 512]),
        (SMALL, False, []),  # requests of this size go to other segments
        (20 * SMALL, False, [20 * SMALL]),
    ],
)
def test_free_blocks_are_asked_for_by_what_reaches_them(block: int, small: bool, requests: list[int]) -> None:
    assert _requests(block, small) == requests
