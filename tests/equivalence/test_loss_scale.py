"""A GradScaler in an observation."""

from __future__ import annotations

import pytest
import torch

from optexp.equivalence import loss_scale

SCALER = {"before/scaler/scale": torch.tensor(8.0), "after/scaler/scale": torch.tensor(4.0)}
GROWTH = {"before/scaler/_growth_tracker": torch.tensor(3), "after/scaler/_growth_tracker": torch.tensor(0)}


@pytest.mark.parametrize("scaler", [True, False])
@pytest.mark.parametrize("gradient", [1.0, torch.inf, torch.nan])
def test_a_step_is_skipped_where_a_scaler_meets_what_is_not_finite(scaler: bool, gradient: float) -> None:
    seen = (SCALER if scaler else {}) | {"grad/weight": torch.tensor([0.0, gradient])}
    assert loss_scale.skipped(seen) is (scaler and gradient != 1.0)


def test_a_scale_is_compared_by_its_change_and_other_state_by_value() -> None:
    seen = SCALER | GROWTH
    assert float(loss_scale.change(seen, "after/scaler/scale")) == 0.5
    assert int(loss_scale.change(seen, "after/scaler/_growth_tracker")) == 0
