"""Many training steps under a changing learning rate: what a single step is too short to show.

Rounding makes two honest runs drift apart, at a rate that is not known beforehand. So the baseline is run from states
that differ by one rounding, and a candidate may stray three times as far as those do. Their updates are longer or
shorter by the rounding of a bias correction in float32, as an optimizer in a captured graph computes it: that has one
sign for all parameters. It is no proof of convergence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isclose, isfinite

import torch
from torch import Tensor

from optexp.equivalence.hyperparameters import bias_correction_error
from optexp.equivalence.noise import move
from optexp.equivalence.optimizer_rules import LATER
from optexp.program import Batch, NotCalled, Program, rate_of
from optexp.support.reading import read

RATES = (1.0, 0.5, 2.0)  # of single steps that are compared with fp64, in turn: a rate that is frozen shows
TIMED = len(RATES)  # stands for a step of a timed block: not the first one, at the full rate
STEPS = 32
PERTURBED = 4  # runs that the envelope is made of
MOST, MOST_S = 32, 20.0  # such runs where the candidate strays, and seconds for them
FACTOR = 3.0
FLOOR = 16.0  # roundings of the loss itself


class Rates:
    """The learning rates of a program's optimizer, each a multiple of what it is when this is made.

    kept: steps alone set the rates
    """

    kept = False

    def __init__(self, program: Program) -> None:
        self.groups = program.optimizer.param_groups if program.optimizer is not None else []
        self.own = [*map(rate_of, self.groups)]

    def set(self, factor: float) -> None:
        """As a scheduler does: a rate that lives in a tensor is written there."""
        if self.kept:
            return
        for group, own in zip(self.groups, self.own, strict=True):
            if isinstance(group.get("lr"), Tensor):
                group["lr"].fill_(own * factor)
            elif "lr" in group:
                group["lr"] = own * factor


def sets_rates(program: Program, used: Callable[[float], Sequence[float]]) -> bool:
    """Whether a user's step sets its learning rates itself: by a schedule, by hand whatever they were, or in updates of
    its own, without an optimizer that has rates.

    used: rates that a step uses, and those that it leaves, where they were set to a multiple of the program's own
    """
    if program.step_state is None:
        return False
    if isinstance(program.optimizer, NotCalled):
        return True
    if any(LATER in groups[0] for _, groups in program.step_state.rules().values()):
        return True
    return any(isclose(*rates, rel_tol=0.1) for rates in zip(used(RATES[0]), used(RATES[1]), strict=True))


def losses(program: Program, batches: Sequence[Batch], rates: Rates, unit: float = 0.0, seed: int = 0) -> list[float]:
    """The first output of each of `STEPS` steps, from the program's present state, moved by one rounding of `unit`.

    Of a step that returns nothing, the size of the parameters after it.
    """
    if unit:
        move(program.model, seed, lambda name: 2 * unit)  # 1 + u itself is rounded to 1
    sign = 0.0 if not unit else 1.0 if seed % 2 else -1.0
    found = []
    for step in range(STEPS):
        rates.set((1.0 - 0.9 * step / STEPS) * (1.0 + sign * _correction_error(program)))
        outputs = program.step(program, program.feed.bring(batches[step % len(batches)]))
        shown = list(outputs.values())[:1] or [read(p).norm() for p in program.model.parameters()]
        found.append(torch.stack([read(tensor).to(torch.float64).mean() for tensor in shown]).mean())
    return torch.stack(found).tolist()


def _correction_error(program: Program) -> float:
    """By how much, relative, the next update moves where its bias correction is computed in float32."""
    optimizer = program.optimizer
    moved = bias_correction_error(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else {}
    return max(moved.values(), default=0.0)


def strays(
    candidate: Sequence[float], baseline: Sequence[float], perturbed: Sequence[Sequence[float]], unit: float
) -> tuple[int, float]:
    """The step at which the candidate's loss is farthest from the baseline's, as a share of what it may be."""
    envelope, worst = 0.0, (0, 0.0)
    for step, (ours, theirs) in enumerate(zip(candidate, baseline, strict=True)):
        if not isfinite(theirs):  # the baseline has diverged
            break
        envelope = max(envelope, *(abs(run[step] - theirs) for run in perturbed))
        allowed = FACTOR * envelope + FLOOR * unit * abs(theirs)
        distance = abs(ours - theirs) if isfinite(ours) else inf
        share = distance / allowed if allowed else inf * (distance > 0)
        if share > worst[1]:
            worst = (step, share)
    return worst
