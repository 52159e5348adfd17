"""Headlines: what a verdict says to a person, in one line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from optexp.records.profile import SAME_STEP, ProfileRecord
from optexp.records.verification import Recheck, Verification
from optexp.result import Result, Verdict
from optexp.support.units import at_least, low_to_high, percent, ratio

# What a gate asks of every tensor; errors are distances from fp64.
GATES = {
    "G0": "the same names, shapes, dtypes and devices, with NaN and infinities in the same places",
    "G1": "the RMS error of a tensor is at most a few times the baseline's",
    "G2": "so is the error of its worst element",
    "G3": "and the RMS error of each block of 4096 elements",
    "BITWISE": "the same bits as the baseline, which the strategy promises",
    "CAP": "whatever the yardstick of a lower precision does, the error has a limit of its own",
    "EXACT": "integers and truth values are equal, but for ties",
    "RANDOMNESS": "random numbers: the same seed repeats them, others differ, and their distribution is the baseline's",
    "TRAJECTORY": "the losses of a short training stay as near as small disturbances of the baseline leave them",
    "REPEATED": "what was computed while the clock ran is right, too",
    "FIRST": "the first step after building leaves what its repetitions leave",
}
PLAIN = {"int8": "plain rounding to int8"}  # yardsticks other than plain autocast
PROMISED = "PRECISION("  # a contract's beginning, before its dtype
NAMED = 5  # tensors in a headline, at most
FAR_OFF = 32  # units of rounding, beyond which a row was moved by more than lower precision


def yardstick(contract: str) -> str:
    """The yardstick of a candidate's results: the baseline's own, or those of plain lower precision."""
    dtype = contract.removeprefix(PROMISED).rstrip(")") if contract.startswith(PROMISED) else ""
    return PLAIN.get(dtype, f"plain {dtype} autocast") if dtype else "baseline"


def rechecked(found: Recheck | None) -> str:
    """The check of the process that was measured last; empty where there was none."""
    if found is None:
        return ""
    parts = [f"process {found.process}: fresh inputs {'pass' if found.fresh_inputs else 'fail'}"]
    if found.ends:
        blocks = f"{len(found.ends)} timed block{'s' if len(found.ends) > 1 else ''}"
        parts.append(f"the results of {blocks} are held against {found.repetitions} repeated steps")
    if found.steps and not found.note:
        parts.append(f"those after {found.steps} timed steps are judged by the gates")
    if found.missed is not None:
        parts.append(f"a fault in a quarter of the steps is missed with probability {found.missed:.2g}")
    return "; ".join(filter(None, [*parts, found.note]))


def constant_inputs(names: str) -> str:
    """Of inputs without a second value."""
    return (
        f"input {names} was the same in every draw: results for other values of it are not checked"
        " (draw it at random where it may vary)"
    )


def unchecked_bits(tensors: Sequence[str]) -> str:
    """Of a promise of equal bits that could not be checked for some tensors; empty where it was."""
    if not tensors:
        return ""
    more = f" and {len(tensors) - NAMED} more" if len(tensors) > NAMED else ""
    return (
        f"equal bits, as promised, could not be checked for {', '.join(tensors[:NAMED])}{more}: runs of one"
        " step give others (atomic additions, as of index_add on a GPU, or a random order), so that rounding alone"
        " was checked there"
    )


def at_precision(dtype: str, found: Verification | None = None) -> str:
    """Of the limits that results were held to, where they are not those of torch's own default.

    found: the verification, with the rows that lower precision moved by far more than rounding
    """
    if dtype == "float32":
        return ""
    rows = far_off(found.far_off if found else {}, PLAIN.get(dtype, "plain autocast"))
    return "; ".join([f", at {dtype} precision", *rows])


def far_off(found: Mapping[str, Sequence[int]], yardstick: str) -> list[str]:
    """Rows of results that are off by more than lower precision explains, in words.

    yardstick: plain autocast, or what stands in its place
    """
    return [
        f"{candidate} of {rows} rows of {name} are off by more than {FAR_OFF} u (other choices: top-k, argmax),"
        f" of {yardstick} {plain}"
        for name, (candidate, plain, rows) in found.items()
    ]


CROWDED = "other programs used the cores; run again on an idle machine"
ENDS = re.compile(r"( interval \S+ to )(\d[\d.]*|∞)")
SPREAD = re.compile(
    r"the interval allows for (\S+ %) between processes, as (is usual|earlier runs on this device differ)"
)


def forms(headline: str) -> tuple[str, str, str]:
    """A headline as this version says it, and as older records do: without zeros at the end; in other words, too."""
    digits = ENDS.sub(lambda found: f"{found[1]}{float(found[2].replace('∞', 'inf')):.3g}", headline)
    words = SPREAD.sub(r"processes differ by \1", digits)
    return headline, digits, words.replace(CROWDED, "a machine that does nothing else decides more")


def headline(result: Result, precision: str, against: str, weakness: str | None) -> str:
    """The measured speedup, the guaranteed end of the interval first.

    precision:  the dtype by whose limits the results were judged
    """
    verdict, speedup, baseline, candidate = result.verdict, result.speedup, result.baseline, result.candidate
    assert speedup is not None
    than = "" if against == "baseline" else f" than {against}"
    said = speedup.inverse if verdict is Verdict.SLOWER else speedup
    estimate, low, high = said.estimate, said.low, said.high
    processes = "one process" if speedup.processes == 1 else f"{speedup.processes} processes"
    if result.measurement and (spread := result.measurement.spread):
        known = "as earlier runs on this device differ" if "earlier" in spread.source else "as is usual"
        processes += f"; the interval allows for {100 * spread.deviation:.2g} % between processes, {known}"
    ends = f"{percent(speedup.confidence)} interval {low_to_high(low, high)}"
    basis = f"best estimate {ratio(estimate)}, {ends}, {processes}"
    if result.measurement and result.measurement.l2.headline == "cold":
        basis += ", device time with emptied caches"
    match verdict:
        case Verdict.FASTER:
            text = f"FASTER{than}, at least {at_least(low)}× ({basis})"
        case Verdict.SLOWER:
            text = f"SLOWER{than}, at least {at_least(low)}× slower ({basis})"
        case Verdict.SAME:
            text = f"SAME speed{than.replace('than', 'as')} ({basis})"
            if baseline.peak_mib and candidate.peak_mib and candidate.peak_mib <= 0.95 * baseline.peak_mib:
                text += f", with {1 - candidate.peak_mib / baseline.peak_mib:.0%} less peak memory"
        case _:
            watchdogs = result.measurement.watchdogs if result.measurement else []
            barking = [watch for watch in watchdogs if not watch.ok]
            crowded = any(watch.name == "cores" for watch in barking)
            closer = "measurement=default looks closer" if speedup.processes == 1 else "more processes may decide it"
            if result.config.get("isolation") == "none":
                closer = "isolation=process looks closer, in several processes"
            if speedup.processes == 1 and not low <= 1 <= speedup.high:
                closer = f"blocks of one process that scatter so decide nothing, {closer}"
            why = "".join(f"{watch.name}, {watch.text}; " for watch in barking if watch.undecides)
            closer = CROWDED if crowded else closer
            text = f"INCONCLUSIVE ({basis}): {why}{closer}"
    if verdict is not Verdict.INCONCLUSIVE:
        text += at_precision(precision, result.equivalence)
    if result.equivalence and (unchecked := unchecked_bits(result.equivalence.unchecked_bits)):
        text += f"; {unchecked}"
    if weakness:
        text += f"; equivalent, but weaker: {weakness}"
    return text + replayed(result)


def corrected_headline(verdict: Verdict, reason: str, alone: str) -> str:
    """Of a job whose own headline, `alone`, did not survive a sweep's correction for many comparisons."""
    return f"{verdict}: {reason}, by itself {alone}"


def replayed(result: Result) -> str:
    """Of a run on inputs that an earlier one had met: a candidate may have kept its results."""
    return "; a replay, on inputs of an earlier run" if result.draws and result.draws.replayed else ""


def agreeing(verdict: Verdict, explanation: list[str], profile: ProfileRecord) -> list[str]:
    """The explanation, whose first sentence is about the step, without what the measurement did not confirm: a profile
    is a few steps of one process."""
    if not explanation:
        return []
    _, *changes = explanation
    arms = profile.arms()
    before, after = (
        arms[name].metrics.get("step_us", 0.0) if name in arms else 0.0 for name in ("baseline", "candidate")
    )
    shown = 0 if abs(after - before) < SAME_STEP * before else 1 if after > before else -1
    if shown == {Verdict.FASTER: 1, Verdict.SLOWER: -1}.get(verdict):
        unseen = "The traced steps do not show this difference"
        return [f"{unseen}; what else they show:", *changes] if changes else [unseen]
    return explanation if verdict in (Verdict.FASTER, Verdict.SLOWER) else changes
