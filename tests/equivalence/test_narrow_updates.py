"""The rounding of an optimizer in bfloat16 explains a difference, and allows none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optexp.equivalence import narrow_updates
from optexp.equivalence.gates import Limits
from optexp.equivalence.quantities import Quantity
from optexp.equivalence.yardsticks import StepYardsticks
from optexp.support.tolerances import TOLERANCES


def test_limits_are_the_old_ones_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = Quantity("change/w", torch.ones(32), torch.ones(32, dtype=torch.float64), Limits(TOLERANCES["float32"]))
    other = Quantity("change/w", exact.value, 1.01 * exact.reference, exact.limits)
    monkeypatch.setattr(narrow_updates, "updates", lambda *_, **__: iter([other]))
    yardsticks = StepYardsticks()
    inputs: Any = SimpleNamespace(yardsticks=SimpleNamespace(steps={0: yardsticks}))
    with narrow_updates.narrow_updates_allowed(inputs, 0, {}, {"change/w": exact}):
        assert yardsticks.allowed["change/w"].yardstick.rms == pytest.approx(0.01)
    assert not yardsticks.allowed
