"""A GradScaler in an observation: whether it left the step out, and how it changed its scale."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from optexp.equivalence.tensor_math import finite


def skipped(observation: Mapping[str, Tensor]) -> bool:
    """Whether a GradScaler left this step out: one is there, and a gradient has NaN or Inf."""
    scaled = any(name.startswith("before/scaler/") for name in observation)
    gradients = {name: t for name, t in observation.items() if name.startswith("grad/")}
    return scaled and finite(gradients) != gradients.keys()


def change(observation: Mapping[str, Tensor], name: str) -> Tensor:
    """The factor by which the step changed a loss scale; of other scaler state, its value after the step.

    Each arm has its own scale: the largest with which nothing overflowed.
    name: of the state after the step, `after/scaler/…`
    """
    after, before = observation[name], observation[name.replace("after/", "before/", 1)]
    return after / before if name.endswith("/scale") else after
