"""Whether gradients are those of the loss, where steps draw random numbers: a mask that backward draws anew leaves the
distribution of every tensor by itself as it was.

Parameters move along the difference to another draw's gradient: a wrong mask is part of it and shows at its full size,
which in a random direction would be less than rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite, nan, sqrt
from statistics import fmean, median

import torch
from torch import Tensor

from optexp.program import Batch, Program, Snapshot, gradients
from optexp.support import random_state
from optexp.support.reading import read_all

DRAWS = 8
FAR = 2.0**-7  # by how much of itself the loss moves: above rounding inside the step, and few ReLUs switch on the way
FACTOR = 3.0  # times the baseline's scatter
LEAST = 0.03
PROVES = 0.25  # a larger limit would let most wrong masks pass


def slopes(program: Program, batch: Batch, start: Snapshot) -> list[float]:
    """For each draw, how far its gradient is from the loss's rise between two sides, where that of another draw is off
    by 1; empty where there is no loss, or no gradient."""

    def loss(seed: int) -> Tensor:
        random_state.seed(seed)
        found = read_all(program.step(program, program.feed.bring(batch))).get("loss")
        single = found is not None and found.is_floating_point() and found.numel() == 1
        return found.clone() if found is not None and single else torch.tensor(nan)

    def moved(far: float) -> tuple[float, float]:
        """By what the gradient and `along` say of it, as parameters have rounded it."""
        start.restore(program)
        state, ours, other = program.state(), 0.0, 0.0
        for name, direction in along.items():
            step = state[f"param/{name}"].add_(direction, alpha=far) - start.values[f"param/{name}"]
            ours, other = ours + _product(now[name], step), other + _product(direction, step)
        return ours, other

    errors: list[float] = []
    along: dict[str, Tensor] = {}
    before: dict[str, Tensor] = {}
    for seed in range(DRAWS + 1):
        start.restore(program)
        level = loss(seed)
        now = {name.removeprefix("grad/"): slope.clone() for name, slope in gradients(program).items()}
        if not level.isfinite() or not now:
            return []
        if seed:
            along = {name: slope.neg_().add_(now[name]) for name, slope in before.items() if name in now}
            along = {name: slope for name, slope in along.items() if slope.shape == start.values[f"param/{name}"].shape}
            size = sum(_product(slope, slope) for slope in along.values())
            share = max(FAR, sqrt(torch.finfo(level.dtype).eps))
            far = share * abs(float(level)) / (2 * size) if size else nan
            (up, up_other), above = moved(far), loss(seed)
            (down, down_other), below = moved(-far), loss(seed)
            by_other = up_other - down_other
            errors.append((float(above.double() - below.double()) - up + down) / by_other if by_other else nan)
        before = now
    return errors


def mismatch(candidate: Sequence[float], baseline: Sequence[float]) -> tuple[float, float]:
    """The candidate's in most draws, and its limit: infinite where either has hardly any number."""
    ours, theirs = (list(filter(isfinite, errors)) for errors in (candidate, baseline))
    if min(len(ours), len(theirs)) <= DRAWS // 2:
        return 0.0, inf
    usual = median(theirs)  # other than 0 where gradients are clipped, or the loss that is returned is a sum
    scatter = sqrt(fmean((error - usual) ** 2 for error in theirs))
    return median(abs(error - usual) for error in ours), FACTOR * scatter + LEAST


def _product(a: Tensor, b: Tensor) -> float:
    wide = torch.promote_types(a.dtype, torch.float32)  # products of halves underflow
    return float((a.to(wide).conj() * b.to(wide)).real.sum(dtype=torch.float64))
