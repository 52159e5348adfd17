"""Gates with other values of the parameters, where other code changes them.

Gradients are for whoever changes parameters: until then a step that computes with a copy, folded or cast before, is
right. A program that only infers may do so, and a whole training step changes them itself.
"""

from __future__ import annotations

from dataclasses import replace

from optexp.equivalence.input_families import NORMAL
from optexp.strategy import Contract
from optexp.verification.checks import Progress
from optexp.verification.one_set import one_set
from optexp.verification.trial import Plan, Trial
from optexp.workers.client import Client
from optexp.workers.peer import Peer

ORDER = 1
OTHER_SEED = 10_000


def applies(plan: Plan, contract: Contract) -> bool:
    """Not in float16, whose gradients may overflow then."""
    return plan.power and contract.dtype != "float16"


def run(trial: Trial, on_progress: Progress) -> None:
    """Findings of one more set of inputs, marked by its parameters."""
    if not trial.others_learn:
        return
    verification, begin = trial.verification, len(trial.findings)
    seeds = list(verification.seeds)
    arms: tuple[Client[Peer], ...] = (trial.reference, trial.yardstick, trial.candidate)
    for arm in arms:
        arm.call(Peer.turn_parameters)
    try:
        one_set(trial, trial.plan.seeds[0] + OTHER_SEED, NORMAL)
    except Exception as error:
        if getattr(error, "type", type(error).__name__) != "NoReference":
            raise
        verification.notes.append(f"other values of parameters prove nothing: {error}")
    finally:
        for arm in arms:
            arm.call(Peer.turn_parameters)
        verification.seeds = seeds
    for at, finding in enumerate(trial.findings):
        if at >= begin and not finding.ok:
            text = "; ".join(filter(None, (finding.message, "with other values of the parameters")))
            trial.findings[at] = replace(finding, message=text)
