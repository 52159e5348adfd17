"""Reasons to believe nothing that a stack's process says about time, from what the process gave away."""

from __future__ import annotations

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

NOVELTY = 1.2, 1.5  # how many times longer fresh batches may take than those met before, at least and at most
LOOKS = 3  # before anybody is accused
ASIDE = 0.5  # of a step of the baseline: what a feed may take longer to begin again than the baseline's, for each batch
COPIED = 0.9  # of what the bare program copies to the device: whose traced steps may have met smaller batches


def tampers(case: Case, candidate: Client[Arm], state: Mapping[str, str], changed: Mapping[str, str]) -> str | None:
    """Functions that time is told or results are read by, and settings of the process.

    state:   global settings that the stack changed and has not declared;  changed: all that it changed
    """
    if replaced := candidate.call(Arm.tampered):
        return f"the {case.name} replaces {' and '.join(replaced)}: time and results are read by that"
    if MODES in state:
        return f"the {case.name} changes {MODES}: {state[MODES]}"
    if changed and not case.session.isolated:
        names = ", ".join(changed)
        return f"the {case.name} changes {names} for the baseline too, in the same process: use isolation=process"
    return None


def leaves_out_copies(case: Case, bare: Trace, stacked: Trace, batch_bytes: float) -> str | None:
    """Feeds are filled while nobody times: where the bare program's steps copy their batch, so must these.

    Numbers may travel in the dtype that was promised.
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
    """Bytes that a step copies there."""
    return sum(copy.bytes for copy in trace.copies if copy.kind == "HtoD") / len(trace.steps)


# --- of the timed arms ------------------------------------------------------------------------------------------


def gives_other_batches(case: Case, arms: Mapping[str, Client[Arm]]) -> str | None:
    """Every batch of two rounds is compared with the core's, and the last one of each block that is looked at; of a
    loader's, which batches are equal."""
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
    """A candidate that remembers results is fast on the batches of a benchmark, and nowhere else.

    It may lose half of its gain on others: what they cost is measured on a few steps.
    """
    gain, (least, most) = exp(fmean(sample.log_ratio for sample in samples)), NOVELTY
    for look in range(LOOKS):
        seed = case.session.draws.seed("novelty", look)
        ours, theirs = (arms[name].call(Arm.novelty, seed=seed) for name in ("candidate", "baseline"))
        if theirs is None:  # a loader's own
            names = "candidate", "baseline"
            ours, theirs = (arms[name].call(Arm.reordered, seed=seed) for name in names)
        if arms["candidate"].call(Arm.met) != arms["baseline"].call(Arm.met):
            return (
                f"the {case.name} draws other batches than the baseline from the same seed: generators of random"
                " numbers were replaced in its process"
            )
        if ours is None:  # which `gives_other_batches` would have said
            return None
        if ours < min(max((1 + gain) / 2, least), most) * max(theirs, 1.0):
            return None
    return f"the {case.name} takes {ours:.3g} times as long on inputs that it has not seen: it remembers results"


def works_in_reset(case: Case, arms: Mapping[str, Client[Arm]], samples: Sequence[Sample]) -> str | None:
    """Feeds begin again before every block, while nobody times.

    How long that takes at least is held against what a step takes at least: on a busy machine blocks take longer.
    """
    blocks = (pair.baseline.wall_s for sample in samples for pair in sample.kept)
    singles = (step_s for sample in samples for step_s in sample.alone.get("baseline", ()))
    ours, theirs = (arms[name].call(Arm.restart_s) for name in ("candidate", "baseline"))
    if ours - theirs < ASIDE * min(*blocks, *singles):
        return None
    return (
        f"the feed of the {case.name} takes {duration(ours)} for each batch to begin again, the baseline's"
        f" {duration(theirs)}: what it does there, while nothing is timed, makes no step faster"
    )
