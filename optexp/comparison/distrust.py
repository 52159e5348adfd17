"""Reasons to believe no time of a stack's process: replaced functions, missing copies, remembered results."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import exp
from statistics import fmean

from optexp.comparison.case import Case
from optexp.comparison.measure import SIZES
from optexp.equivalence.process_state import MODES
from optexp.measurement.samples import Sample
from optexp.support.units import duration
from optexp.trace import Trace
from optexp.workers.arm import Arm
from optexp.workers.client import Client

NOVELTY = 1.2, 1.5  # least and most allowed ratio of the time on fresh batches to that on known ones
LOOKS = 3  # measurements that must agree before results count as remembered
# The same before parameters' results count as kept. Where a card is shared and most single steps wait for others,
# 10 % of such measurements of honest programs exceed the limit.
PARAMETER_LOOKS = 5
LEISURE_S = 0.05  # before a step that is to be taken as verified ones are
SAME, UNUSUAL = 0.02, 10.0  # sizes of a result: two runs are no farther from each other; times the usual distance
MAX_EXTRA_RESET = 0.5  # per batch, in baseline steps: how much longer the candidate's feed.reset() may take
COPIED = 0.9  # least share of the bare program's copies to the device, as traced batches may differ in size


def tampers(case: Case, candidate: Client[Arm], changed: Mapping[str, str]) -> str | None:
    """A reason where the process replaced functions that tell time or read results, or changed settings that do.

    changed: all global settings that the stack changed, declared ones included
    """
    if replaced := candidate.call(Arm.tampered):
        return f"the {case.name} replaces {' and '.join(replaced)}: time and results are read by that"
    if MODES in changed:  # which no strategy may declare
        return f"the {case.name} changes {MODES}: {changed[MODES]}"
    if changed and not case.session.isolated:
        names = ", ".join(changed)
        return f"the {case.name} changes {names} for the baseline too, in the same process: use isolation=process"
    return None


def leaves_out_copies(case: Case, bare: Trace, stacked: Trace, batch_bytes: float) -> str | None:
    """A reason where the bare program's steps copy their batch to the device, and these steps do not.

    A feed could have copied batches before the clock started. Values may travel in the promised dtype.
    """
    theirs, ours, given = to_device(bare), to_device(stacked), case.session.experiment.dtype
    narrower = min(1.0, SIZES.get(case.promise.dtype or given, 4) / SIZES[given])
    if theirs < COPIED * batch_bytes or ours >= COPIED * narrower * theirs:
        return None
    return (
        f"the {case.name} copies {ours / 2**20:.3g} MiB to the device in a step, the bare program"
        f" {theirs / 2**20:.3g}: batches that are brought there while nothing is timed make no step faster"
    )


def to_device(trace: Trace) -> float:
    """Bytes that a step copies to the device."""
    return sum(copy.bytes for copy in trace.copies if copy.kind == "HtoD") / len(trace.steps)


# --- of the timed arms ------------------------------------------------------------------------------------------


def gives_other_batches(case: Case, arms: Mapping[str, Client[Arm]]) -> str | None:
    """A reason where the candidate's feed gives other batches than the baseline's, or takes them too early.

    All batches of two rounds are compared with the core's, and the last batch of each verified block. Of a loader,
    which batches equal each other is compared.
    """
    (ours, our_pattern), (theirs, their_pattern) = (
        arms[name].call(Arm.delivered) for name in ("candidate", "baseline")
    )
    wrong = (theirs and not ours) or (theirs is None and our_pattern != their_pattern)
    wrong_in_blocks, theirs_too = (arms[name].call(Arm.wrongly_given) for name in ("candidate", "baseline"))
    if wrong or (wrong_in_blocks and not theirs_too):
        where = "" if wrong else f" ({wrong_in_blocks} timed blocks ended on another)"
        return f"the feed of the {case.name} does not give the batches that the baseline's gives{where}"
    ahead, allowed = (arms[name].call(Arm.taken_ahead) for name in ("candidate", "baseline"))
    if ahead <= allowed:
        return None
    return (
        f"the feed of the {case.name} takes {ahead} batch{'es' if ahead > 1 else ''} before a step asks, beyond"
        f" the {arms['candidate'].call(Arm.queue)} that it declares (Feed.queue): take source[n] in Feed.next"
    )


def remembers_results(case: Case, arms: Mapping[str, Client[Arm]], samples: Sequence[Sample]) -> str | None:
    """A reason where the candidate is fast only on batches that it has met, as it remembers their results.

    A few steps on fresh batches are timed; on them it may lose half of its gain. On a busy machine the baseline's times
    on batches that it knows scatter, and as much says nothing of the candidate's.
    """
    gain, (least, most) = exp(fmean(sample.log_ratio for sample in samples)), NOVELTY
    for look in range(LOOKS):
        seed = case.session.draws.seed("novelty", look)
        names = "candidate", "baseline"
        found, usual = (_alone(case, arms, name).call(Arm.novelty, seed=seed) for name in names)
        if usual is None:  # a loader's own
            found, usual = (arms[name].call(Arm.reordered, seed=seed) for name in names)
            again, usual_again = (arms[name].call(Arm.permuted, seed=seed) for name in names)
            if again[0] / max(usual_again[0], 1.0) > found[0] / max(usual[0], 1.0):
                found, usual = again, usual_again
        if arms["candidate"].call(Arm.met) != arms["baseline"].call(Arm.met):
            return (
                f"the {case.name} draws other batches than the baseline from the same seed: generators of random"
                " numbers were replaced in its process"
            )
        if found is None:  # which `gives_other_batches` would have said
            return None
        (ours, _), (theirs, scatter) = found, usual
        if ours < max(min(max((1 + gain) / 2, least), most) * max(theirs, 1.0), scatter):
            return None
    return f"the {case.name} takes {ours:.3g} times as long on inputs that it has not seen: it remembers results"


def _alone(case: Case, arms: Mapping[str, Client[Arm]], name: str) -> Client[Arm]:
    """The arm of this name; where memory is short, no other one holds batches meanwhile: it holds twice as many."""
    for other in arms if case.session.in_turns else ():
        if other != name:
            arms[other].call(Arm.rest)
    return arms[name]


def guesses_results(case: Case, arms: Mapping[str, Client[Arm]]) -> str | None:
    """A reason where what a step on a new batch leaves depends on how soon it follows the one before. Verified steps
    follow at leisure. Steps on new batches were taken by `remembers_results`.

    Steps that draw random numbers, or change what later ones begin with, may leave something else each time.
    """
    if case.moves or case.steps.random:
        return None
    found = []
    for name in ("candidate", "baseline"):
        time.sleep(LEISURE_S)
        off, usual = arms[name].call(Arm.hurried)
        found.append(off > max(SAME, UNUSUAL * usual))
    if found != [True, False]:
        return None
    return (
        f"the {case.name} gives other results on inputs that it has not seen where steps follow each other quickly:"
        " what was timed there is not what was verified"
    )


def keeps_what_parameters_give(case: Case, arms: Mapping[str, Client[Arm]], samples: Sequence[Sample]) -> str | None:
    """A reason where the candidate is fast only as long as parameters do not change, as gradients are made to do.

    It may lose half of its gain, or as much as the baseline's times scatter.
    """
    if case.session.workload.mode != "forward_backward":
        return None
    gain, (least, most) = exp(fmean(sample.log_ratio for sample in samples)), NOVELTY
    for _ in range(PARAMETER_LOOKS):
        (ours, _), (theirs, scatter) = (arms[name].call(Arm.moved_parameters) for name in ("candidate", "baseline"))
        if ours < max(min(max((1 + gain) / 2, least), most) * max(theirs, 1.0), scatter):
            return None
    return (
        f"the {case.name} takes {ours:.3g} times as long once parameters have changed: it keeps what it computes of"
        " them, and workload.mode=forward_backward changes none; time whole steps, as workload.mode=train does"
    )


def works_in_reset(case: Case, arms: Mapping[str, Client[Arm]], samples: Sequence[Sample]) -> str | None:
    """A reason where the candidate's feed works in `reset`, which runs before every block and is not timed.

    The shortest reset is compared with the shortest step of the baseline, as other programs lengthen both.
    """
    blocks = (pair.baseline.wall_s for sample in samples for pair in sample.kept)
    singles = (step_s for sample in samples for step_s in sample.alone.get("baseline", ()))
    ours, theirs = (arms[name].call(Arm.restart_s) for name in ("candidate", "baseline"))
    if ours - theirs < MAX_EXTRA_RESET * min(*blocks, *singles):
        return None
    return (
        f"the feed of the {case.name} takes {duration(ours)} for each batch to begin again, the baseline's"
        f" {duration(theirs)}: what it does there, while nothing is timed, makes no step faster"
    )
