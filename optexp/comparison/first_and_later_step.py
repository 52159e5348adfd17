"""The first step after building, and some after many: all can be wrong where the first ones are right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from optexp.comparison.case import COUNTED, Case
from optexp.equivalence.effects import title
from optexp.equivalence.footprint import changing, one_sided, to_judge
from optexp.equivalence.late_counts import JUDGED, LATE
from optexp.equivalence.missed import LOOKS, SHARE, End, miss_rate
from optexp.equivalence.schedules import APART
from optexp.errors import Failure
from optexp.records.verification import Finding, GateResult, Verification, broken
from optexp.verification import first_step
from optexp.verification.outcome import failure
from optexp.verification.recheck import Repetitions, findings_of
from optexp.verification.replay import Replay
from optexp.verification.trial import NoYardstick
from optexp.workers.arm import Arm
from optexp.workers.client import Client
from optexp.workers.reference import Reference

LONGEST_S = 2.0  # seconds of a step: of longer steps, later ones are not judged
NOISES = (7, 8, 9)  # seeds of noise in the baseline's first parameters, none of `Replay`'s
MOVED_BY_ROUNDING = (
    "after {} steps a little noise in the baseline's first parameters gives another {}, too: the step keeps there what"
    " rounding alone moves, as a bias before a norm, whose gradient is zero but for rounding, and which Adam moves all"
    " the same; such a layer needs no bias (bias=False)"
)
BY_HAND = (
    "{} changes the learning rate after {} steps, too, and the other program sets its rates by hand: those of its later"
    " steps were not seen; use a scheduler of torch in both"
)
COUNTED_ON = (
    "with counts as they are after {} steps, which were not run, the candidate's step is another one: {}; training that"
    " long is not verified"
)
OTHER_PARAMETERS = ", halfway with other values of the parameters,"
OTHER_COPIES = ", with other values of the copies that a step keeps of parameters,"
COPIED = 2  # steps: the first one makes copies, the second one works with them
SHORT_S = 0.1  # seconds of a step: of longer steps, one late count is looked at
LATER, LATER_S = 48, 8.0  # steps before one that is looked at, where steps change what later ones begin with, or may


def check_first_step(case: Case, found: Verification, yardstick: Client[Arm], candidate: Client[Arm]) -> None:
    """After building, of those that will be measured, whatever they draw."""
    findings, unlike = first_step.check_first_step(yardstick, candidate, case.session.in_turns, found.zeros)
    found.gates[first_step.GATE] = GateResult(not findings)
    if unlike:
        names = ", ".join(map(title, unlike))
        found.notes.append(f"the baseline's first step leaves {names} otherwise than when it is repeated")
    if findings:
        _fail(case, found, findings, "the first step after building")


def check_later_step(
    case: Case, found: Verification, reference: Client[Reference], yardstick: Client[Arm], candidate: Client[Arm]
) -> None:
    """After many, whatever is timed: a copy that was made before the first shows once what it was made of has changed,
    as weights that other code exchanges now and then; so does a first result that is returned ever after, where Python
    state is put back before every other check. Where nothing is timed, batches get other values halfway: a result that
    is remembered by its input's address shows. Of batches of several sizes each is the first one once, as what is
    remembered of a short one may be wrong for a longer one alone. Training has its own gradients, and a trajectory."""
    steps = min(LATER, max(COUNTED, int(LATER_S / max(case.steps.step_s, 1e-9) / case.steps.sized)))
    replay = replace(_replay(case, reference, yardstick, steps), renewed=case.session.experiment.verify == "only")
    for first in range(case.steps.sized):
        if found.ok:
            _judge(case, found, replace(replay, end=End(steps, first)), candidate)


def check_moved_parameters(
    case: Case, found: Verification, reference: Client[Reference], yardstick: Client[Arm], candidate: Client[Arm]
) -> None:
    """Gradients serve to change parameters between two steps. A copy of them from an earlier step is
    wrong then, and shows nowhere else: what Python keeps is put back before other steps with other parameters."""
    if case.promise.dtype != "float16":  # whose gradients may overflow
        _judge(case, found, replace(_replay(case, reference, yardstick, COUNTED), moved=True), candidate)


def check_repetitions(case: Case, found: Verification, yardstick: Client[Arm], candidate: Client[Arm]) -> None:
    """Where nothing is timed, of one step: else the ends of timed blocks show a fault that not every step has."""
    repetitions = Repetitions(yardstick, candidate, case.session.in_turns, case.unit, found.zeros)
    looks = max(1, min(LOOKS, int(LATER_S / max(case.steps.step_s, 1e-9))))
    for _ in range(looks):
        if astray := repetitions.one_more(End(1)):
            _fail(case, found, findings_of("REPEATED", astray), f"one of {looks} repetitions of a step")
            break
    repetitions.rest()
    if found.ok and looks < LOOKS:
        missed = f"{100 * miss_rate(SHARE, looks):.2g} %"
        found.notes.append(f"steps are long: a fault in a quarter of them passes with a probability of {missed}")


def check_rare_steps(
    case: Case, found: Verification, reference: Client[Reference], yardstick: Client[Arm], candidate: Client[Arm]
) -> None:
    """Where the user's code trains: those of many steps that are of another kind than the first ones, as where a
    schedule falls or a teacher follows, those by which the arms differ, and a late one."""
    if case.steps.step_s > LONGEST_S:
        found.notes.append(f"steps take {case.steps.step_s:.1f} s: those after the first ones were not looked at")
        return
    theirs = yardstick.call(Arm.footprints)
    ours = candidate.call(Arm.footprints, steps=len(theirs))
    for arm in (yardstick, candidate) if case.session.in_turns else ():
        arm.call(Arm.rest)
    for steps in to_judge(theirs, ours):
        if found.ok:
            _judge(case, found, _replay(case, reference, yardstick, steps), candidate)
    if found.ok:
        check_kept_copies(case, found, reference, yardstick, candidate)
    check_late_counts(case, found, reference, yardstick, candidate)
    if found.ok and case.rebuilt and (schedules := one_sided(theirs[-1], ours[-1])):
        _check_rates(case, found, schedules, yardstick, candidate)


def check_kept_copies(
    case: Case, found: Verification, reference: Client[Reference], yardstick: Client[Arm], candidate: Client[Arm]
) -> None:
    """A step that follows the first one, where copies of parameters that both arms keep have other values than their
    sources, as after many steps: a target network is no other network at first."""
    theirs, ours = (_kept_copies(case, arm) for arm in (yardstick, candidate))
    if theirs and theirs == ours:
        _judge(case, found, replace(_replay(case, reference, yardstick, COPIED), apart=True), candidate)


def _kept_copies(case: Case, arm: Client[Arm]) -> list[str]:
    found = arm.call(Arm.kept_copies)
    if case.session.in_turns:
        arm.call(Arm.rest)
    return found


def check_late_counts(
    case: Case, found: Verification, reference: Client[Reference], yardstick: Client[Arm], candidate: Client[Arm]
) -> None:
    """Steps whose counts were moved on, where code that is not torch's reads counts.

    Raises:
        Failure: The candidate's do not pass. Training may never come to such a state, so nothing is known to be wrong.
    """
    for late in LATE if case.steps.step_s < SHORT_S else LATE[-1:]:
        if not found.ok:
            return
        theirs = yardstick.call(Arm.paces, late=late, watched=case.session.device.startswith("cuda"))
        if theirs is None:
            return
        ours = candidate.call(Arm.paces, late=late, watched=False)
        if ours is None or not (theirs.matter or ours.matter) or not ours.fit(theirs):
            return
        for steps in JUDGED:
            _judge(case, found, replace(_replay(case, reference, yardstick, steps), late=late), candidate)
            if not found.ok:
                raise Failure("NoReference", COUNTED_ON.format(late, failure(found.failures[0])))


def _check_rates(
    case: Case,
    found: Verification,
    schedules: Mapping[str, Sequence[float]],
    yardstick: Client[Arm],
    candidate: Client[Arm],
) -> None:
    """Where one program has schedules and the other sets rates by hand: rates of as many steps as there is time for.

    Raises:
        Failure: A schedule changes a rate later than that.
    """
    expected = yardstick.call(Arm.rates_of_steps)
    rates = candidate.call(Arm.rates_of_steps, steps=len(expected))
    most = max((abs(rate) for _, left in expected for rate in left), default=0.0)
    for step, (mine, others) in enumerate(zip(rates, expected, strict=True), start=1):
        ours, theirs = (mine[0], others[0]) if mine[0] and others[0] else (mine[1], others[1])
        if any(abs(one - other) > APART * most for one, other in zip(ours, theirs, strict=False)):
            text = f"learning rates are {ours}, the baseline's {theirs}"
            _fail(case, found, [replace(broken("rates", text), step=step)], f"after {step} steps")
            return
    if name := changing(schedules, len(expected)):
        raise Failure("NoReference", BY_HAND.format(name, len(expected)))


def _replay(case: Case, reference: Client[Reference], yardstick: Client[Arm], steps: int) -> Replay:
    """The replay that judges step number `steps`."""
    return Replay(reference, yardstick, End(steps), in_turns=case.session.in_turns)


def _judge(case: Case, found: Verification, replay: Replay, candidate: Client[Arm]) -> None:
    """Judge the last step of a replay; nothing is known of one that the baseline does not pass either."""
    steps, yardstick = replay.end.steps, replay.yardstick
    when = f"after {steps} steps" + OTHER_PARAMETERS * replay.moved + OTHER_COPIES * replay.apart

    def failures(arm: Client[Arm], **how: Any) -> list[Finding]:
        judged = replace(replay, **how).judged(arm, steady=found.repeats)
        return [replace(finding, step=steps) for finding in judged if not finding.ok]

    try:
        failed = failures(candidate)
        theirs = failures(yardstick) if failed else []
        stale = bool(failed) and replay.moved and not case.steps.keeps and not theirs
        derived = failures(yardstick, forgets=True) if stale else []
        drifts = bool(failed) and not theirs and all(finding.gate == "G0" for finding in failed)
        failed = failures(candidate, drifts=True) if drifts else failed
        again = [failures(yardstick, noise=seed, drifts=True) for seed in NOISES if drifts and failed]
        noisy = {(finding.tensor, finding.message) for findings in again for finding in findings}
    except NoYardstick:
        raise
    except Failure as reason:
        if reason.type != "NoReference":
            raise
        found.notes.append(f"not looked at {when}: {reason}")
        return
    if theirs:
        found.notes.append(f"{when} the baseline does not pass beside itself: {theirs[0].message}")
    elif derived:
        found.notes.append(f"{when} the baseline goes on with what it has computed of earlier ones")
    elif failed and {(finding.tensor, finding.message) for finding in failed} <= noisy:
        names = ", ".join(title(finding.tensor) for finding in failed)
        raise Failure("NoReference", MOVED_BY_ROUNDING.format(steps, names))
    elif failed:
        _fail(case, found, failed, when.removesuffix(","))


def _fail(case: Case, found: Verification, findings: Sequence[Finding], when: str) -> None:
    found.failures = [replace(finding, seed=case.session.experiment.seed) for finding in findings]
    found.ok, found.worst = False, found.failures[0]
    found.headline = f"{when}: {failure(found.worst)}"
