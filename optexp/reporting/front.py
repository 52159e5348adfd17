"""The top of a report: the verdict, one picture, the verified results, and the next actions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, log

from optexp.reporting import summary
from optexp.reporting.timeline import Tick
from optexp.result import Result, Verdict
from optexp.support.units import at_least, microseconds, ratio

WIDTH, HEIGHT, MARGIN = 360, 96, 34  # of the interval, in pixels
ROOM = 0.12  # beside what is shown, of its logarithm
CLOSE = 46  # pixels between labels that would run into each other
EVIDENCE = 3  # sentences on the top of a page
SEED = re.compile(r" \(seed \d+, step \d+\)")
FAILED = [verdict for verdict in Verdict if not verdict.measured and verdict is not Verdict.PROFILED]
TONES = {
    "FASTER": "good", "SAME": "calm", "PROFILED": "calm", "VERIFIED": "good",
    "INCONCLUSIVE": "warn", "UNSUPPORTED": "warn", "NOT_ENGAGED": "warn",
}  # fmt: skip
LIGHTER = 0.95  # of the baseline's peak memory: what makes a stack of the same speed worth proposing
USE = "Use it: card.md beside this page is for the pull request."
LEAVE = {
    Verdict.SLOWER: "Leave it out.",
    Verdict.SAME: "Leave it out, unless its memory is what you need: the time is the same.",
    Verdict.UNSUPPORTED: "Follow the reason above, or leave the strategy out.",
    Verdict.VERIFIED: "The results are right. Without verify=only the same command times them.",
    Verdict.ERROR: "Mend what is named below, and run the same command again.",
}


@dataclass(frozen=True)
class TimeBar:
    """One arm's step.

    share: of the longer one, in percent
    """

    arm: str
    text: str
    share: float


@dataclass(frozen=True)
class Interval:
    """The speedup on a logarithmic axis, in pixels.

    one:    a ratio of 1;  low, high, estimate: of the speedup
    labels: below the axis
    open:   whether it has no upper end
    """

    width: int
    height: int
    one: float
    low: float
    high: float
    estimate: float
    labels: list[Tick]
    said: str
    open: bool


@dataclass(frozen=True)
class Front:
    """claim, basis:  the headline, in two parts
    checks:           what was verified: whether it holds, and in words; None: it holds, but weaker
    to_do:            sentences, the first one first
    """

    claim: str
    basis: str
    bars: list[TimeBar]
    interval: Interval | None
    terms: dict[str, float]
    checks: list[tuple[bool | None, str]]
    to_do: list[str]


def front(result: Result) -> Front:
    """The top of a result's page."""
    claim, basis = parts(result.headline)
    alone = result.profile.baseline if result.verdict is Verdict.PROFILED else None
    return Front(
        claim,
        basis,
        bars(result),
        interval(result),
        dict(summary.parts(alone.metrics)) if alone else {},
        checks(result),
        to_do(result),
    )


def parts(headline: str) -> tuple[str, str]:
    """A headline's claim and what it rests on. Seeds of fifteen digits are for the section on equivalence."""
    verdict, colon, reason = headline.partition(": ")
    if colon and verdict in FAILED:
        return f"{verdict}:", f" {SEED.sub('', reason)}"
    claim, bracket, basis = headline.partition(" (")
    return claim, bracket + basis


def tone(verdict: str) -> str:
    """The name of a colour."""
    return TONES.get(verdict, "bad")


def bars(result: Result) -> list[TimeBar]:
    """Step times of both arms, or of the one that was profiled; none where no speedup may be shown."""
    if not (result.verdict.measured or result.verdict is Verdict.PROFILED):
        return []
    arms = [(str(result.config.get("baseline") or "baseline"), result.baseline)]
    if result.verdict.measured:
        arms.append((result.label if result.strategy else "candidate", result.candidate))
    times = {name: arm.step_us for name, arm in arms if arm.step_us}
    return [TimeBar(name, microseconds(us), 100 * us / max(times.values())) for name, us in times.items()]


def interval(result: Result) -> Interval | None:
    """The speedup's interval beside a ratio of 1."""
    found = result.speedup
    if found is None or not result.verdict.measured or found.low <= 0:
        return None
    high = found.high if isfinite(found.high) else max(found.estimate, 1.0) * 1.5
    first, last = log(min(found.low, 1.0)), log(max(high, 1.0))
    room = ROOM * max(last - first, 0.05)

    def x(value: float) -> float:
        return round(MARGIN + (log(value) - first + room) / (last - first + 2 * room) * (WIDTH - 2 * MARGIN), 1)

    ends = [(x(found.low), f"{at_least(found.low)}×"), (x(high), ratio(found.high) if isfinite(found.high) else "∞")]
    return Interval(
        WIDTH, HEIGHT, x(1.0), x(found.low), x(high), x(found.estimate), _apart(ends), ratio(found.estimate),
        not isfinite(found.high),
    )  # fmt: skip


def _apart(labels: Sequence[Tick]) -> list[Tick]:
    """Labels of both ends, pushed apart where they would run into each other."""
    (low, first), (high, last) = labels
    push = max(0.0, CLOSE - (high - low)) / 2
    return [(round(low - push, 1), first), (round(high + push, 1), last)]


def checks(result: Result) -> list[tuple[bool | None, str]]:
    """The result of verification, and the evidence that each strategy engaged."""
    seen, text = result.equivalence, summary.verified(result)
    found = list[tuple[bool | None, str]]()
    if seen and text and (seen.ok or seen.headline not in result.headline):  # else the headline says it
        found.append((None if seen.ok and seen.weakness else seen.ok, SEED.sub("", text)))
    proofs = zip(result.evidence, summary.evidence(result), strict=True)
    return [*found, *[(proof.engaged, text) for proof, text in proofs][:EVIDENCE]]


def proposed(result: Result) -> bool:
    """Whether one may propose the stack: it is faster, or as fast with less memory."""
    before, after = result.baseline.peak_mib, result.candidate.peak_mib
    lighter = bool(before and after and after <= LIGHTER * before)
    return bool(result.strategy) and (result.verdict is Verdict.FASTER or (result.verdict is Verdict.SAME and lighter))


def undecided(result: Result) -> str:
    """Advice after INCONCLUSIVE, by its cause."""
    found = result.speedup
    if any(watch.name == "cores" and not watch.ok for watch in summary.watches(result)):
        return "Build nothing on this: other programs used the cores. Run again on an idle machine."
    if found is None:
        return "Build nothing on this."
    if found.low > 1 or found.high < 1:
        several = found.processes > 1
        why = "the difference may be smaller than what counts" if several else "the blocks of one process scatter"
    else:
        why = "the interval holds a loss and a gain"
    more = "measurement=default" if found.processes == 1 else "measurement=rigorous"
    if result.measurement and result.measurement.preset == "rigorous":
        return f"Build nothing on this: {why}. A larger measurement.processes_max may decide it."
    return f"Build nothing on this: {why}. {more} measures in more processes than {found.processes}."


def to_do(result: Result) -> list[str]:
    """The reader's next actions: one that follows from the verdict, then a stack to try."""
    if proposed(result):
        first = USE if result.verdict is Verdict.FASTER else f"{USE} It takes the same time and less memory."
    elif result.search is not None and result.speedup is None:
        first = ""  # nothing was kept, which the decision says
    else:
        first = summary.what_now(result) or LEAVE.get(result.verdict, "")
        first = undecided(result) if result.verdict is Verdict.INCONCLUSIVE else first
    suggestion = summary.suggestion(result) if result.verdict.measured or result.verdict is Verdict.PROFILED else ""
    return [text for text in (first, f"Try next: {suggestion}" if suggestion else "") if text]
