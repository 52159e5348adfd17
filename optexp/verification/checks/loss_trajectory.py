"""The loss over many steps, beside the effect of one rounding of the parameters on the baseline's."""

from __future__ import annotations

from dataclasses import replace
from time import monotonic

from optexp.equivalence import trajectory
from optexp.equivalence.input_families import NORMAL
from optexp.records.verification import Trajectory, broken
from optexp.strategy import Contract
from optexp.verification.checks import Progress
from optexp.verification.trial import Plan, Trial
from optexp.workers.arm import Arm

ORDER = 2


def applies(plan: Plan, contract: Contract) -> bool:
    """Where training is to be followed."""
    return plan.follow


def run(trial: Trial, on_progress: Progress) -> None:
    """A finding TRAJECTORY where the loss strays further than rounding explains."""
    on_progress(f"following the loss for {trajectory.STEPS} steps")
    seed = trial.plan.seeds[0]
    info = trial.load(seed, NORMAL, 8)
    unit, every = info.unit_used, range(info.steps)
    yardstick = trial.turn(trial.yardstick, *every)
    plain = yardstick.call(Arm.losses, unit=0.0, seed=0)
    moved = [yardstick.call(Arm.losses, unit=unit, seed=run + 1) for run in range(trajectory.PERTURBED)]
    followed = trial.turn(trial.candidate, *every).call(Arm.losses, unit=0.0, seed=0)
    step, share = trajectory.strays(followed, plain, moved, unit)
    end_s = monotonic() + trajectory.MOST_S
    # Rounding may have flipped a ReLU of the candidate alone: more runs meet such flips.
    while share > 1 and len(moved) < trajectory.MOST and monotonic() < end_s:
        moved.append(trial.turn(trial.yardstick, *every).call(Arm.losses, unit=unit, seed=len(moved) + 1))
        step, share = trajectory.strays(followed, plain, moved, unit)
    trial.verification.trajectory = Trajectory(trajectory.STEPS, step, share)
    if share > 1:
        text = f"after {step + 1} steps the loss is {share:.3g} times as far from the baseline's as rounding explains"
        found = replace(broken("loss", text), gate="TRAJECTORY", failed=("TRAJECTORY",))
        trial.add([found], seed, step, NORMAL)
