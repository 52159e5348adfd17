"""Near ties of a candidate: inputs of a ReLU or a max-pool that rounding alone sends either way.

Gradients jump where an input is zero for a ReLU, or equal to another for a max-pool, but for rounding. After a first
step the candidate meets other ties than the baseline's noisy runs do. So fp64 steps from the candidate's own state with
a little noise show the gradients that honest arithmetic may give there.
"""

from __future__ import annotations

from collections.abc import Iterable

from optexp.equivalence.doubtful_elements import most_elements
from optexp.equivalence.fp64_variants import nearby, other_changes
from optexp.equivalence.gates import Limits, Yardstick
from optexp.equivalence.input_set import InputSet
from optexp.equivalence.noise import amplitude
from optexp.equivalence.observation import Observation
from optexp.equivalence.quantities import Quantity, measured, whole
from optexp.records.verification import Finding

NEAR, AT_ONCE = 16, 4  # fp64 runs with noise: at most, and in one round
LITTLE = 0.25  # of the usual noise, in those: some five times what honest arithmetic has
PART = 0.2  # of a gradient's size: a larger part of it hangs on no tie
TIED = (
    "a gradient, or its update, is off by no more than inputs of a ReLU or a max-pool that are alike but for rounding"
    " move it"
)


def allow_near_ties(inputs: InputSet, step: int, seen: Observation, seeds: Iterable[int]) -> None:
    """Allow the candidate the gradients that near ties move, and what no known optimizer makes of these, in the
    yardsticks of `step`.

    seen:  the candidate's observation
    seeds: of the noise, one fp64 run each
    """
    start = inputs.fp64.start_of(step, seen)
    exact = inputs.golden(step, seen) | other_changes(inputs.fp64, step)
    row, allowed = inputs.arithmetic.row, inputs.yardsticks.steps[step]
    for seed in seeds:
        moved = nearby(inputs.fp64, step, start, seed, LITTLE)
        if not _same_results(inputs, moved, exact):
            continue
        names = [name for name in exact if name.startswith(("grad/", "change/")) and name in moved]
        for quantity in measured(Quantity(n, moved[n], exact[n], Limits(row)) for n in names):
            if quantity.found.rms < PART * quantity.scale:
                allowed.allow(quantity)
                for part in most_elements(quantity) if quantity.name.startswith("change/") else ():
                    allowed.allow(part)


def hangs_on_gradients(inputs: InputSet, step: int, finding: Finding) -> bool:
    """Whether near ties may move it: a gradient, or a change that no known optimizer makes of one."""
    name = whole(finding.tensor)
    return name.startswith("grad/") or name in other_changes(inputs.fp64, step)


def _same_results(inputs: InputSet, moved: Observation, exact: Observation) -> bool:
    """Whether outputs moved by no more than noise: a tie leaves them in place, another program does not."""
    names = [name for name in exact if name.startswith("out/") and exact[name].is_floating_point()]
    if any(name not in moved or moved[name].shape != exact[name].shape for name in names):
        return False
    every = measured(Quantity(name, moved[name], exact[name], Limits(inputs.arithmetic.row)) for name in names)
    noise, usual = inputs.yardsticks.noise, amplitude(inputs.arithmetic.name)
    limits = [(q, max(noise.get(q.name, Yardstick()).rms, usual * q.scale)) for q in every]
    return bool(limits) and all(q.found.rms <= limit and not q.found.lost for q, limit in limits)
