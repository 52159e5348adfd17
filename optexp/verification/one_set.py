"""Gates on one set of inputs: yardsticks first, then every step of the candidate.

Runs with noise and in other orders take most of a verification's time, and only widen limits. What passes without them
passes with them. So they are made where the limits have to be known, or where a step did not pass without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from optexp.equivalence.bits import AGAIN, REPEATS, SURE, promised
from optexp.equivalence.input_families import FAMILIES, NORMAL, ONE_BY_ONE
from optexp.equivalence.judge import SetInfo
from optexp.errors import first_line
from optexp.records.verification import Finding, broken
from optexp.strategy import BITWISE
from optexp.support.shortage import OUT_OF_MEMORY
from optexp.verification.other_orders import beside_lotteries, beside_other_orders
from optexp.verification.trial import SPREAD_RUNS, Strays, Trial, decided
from optexp.workers.arm import Arm
from optexp.workers.client import Client
from optexp.workers.messages import Look
from optexp.workers.reference import Reference

CHANCE = ("Crash", "Timeout", OUT_OF_MEMORY)  # failures that need not be due to an input's values
SAME_BATCHES = "the loader gives the same batches whatever the seed: they count as one set of inputs"


def one_set(trial: Trial, seed: int, family: str, disturbed: bool = False) -> None:
    """Gates on one set of inputs.

    Args:
        disturbed: Runs with noise and in other orders are made in any case, as what the gates can see is asked next.
    """
    verification, restart = trial.verification, family == ONE_BY_ONE
    info = trial.load(seed, family, trial.plan.steps)
    steps, smaller = info.steps, info.smaller
    if not verification.seeds:
        trial.bits.varying = set(trial.turn(trial.yardstick, 0).call(Arm.varying, times=REPEATS))
        verification.repeats = not trial.bits.varying
    if trial.contract == BITWISE and not verification.repeats and family in (NORMAL, ONE_BY_ONE):
        equal_bits(trial, seed, family)
    if restart:
        exchange(trial, seed)
    if smaller and not taken(trial, lambda: trial.measure(Look(steps - 1))):
        steps, smaller = steps - 1, False
    found = None if disturbed or not trial.keeps else decided(lambda: judged(trial, steps, smaller, restart))
    if found is None or not all_pass(found):
        measure_disturbed(trial, info, steps, restart)
        found = judged(trial, steps, smaller, restart)
        found = beside_other_orders(
            found,
            info.reassociated_runs,
            trial.in_turns,
            partial(trial.reorder, range(steps), restart),
            partial(judged, trial, steps, smaller, restart),
        )
        if not verification.repeats and not all_pass(found) and itself(trial, steps, restart):
            found = judged(trial, steps, smaller, restart)
    if not trial.in_turns:
        found = beside_lotteries(
            found,
            info.reassociated_runs,
            partial(trial.reorder, range(steps), restart),
            partial(judged, trial, steps, smaller, restart),
        )
    parted = any(finding.parted and finding.unseen for each in found for finding in each)
    if family not in FAMILIES and not verification.parts_in and parted:
        verification.parts_in = where_they_part(trial)
    if trial.contract == BITWISE:
        found = same_bits(trial, found, restart)
    for step, findings in enumerate(found):
        trial.add(findings, seed, step, family)
    if family in (NORMAL, ONE_BY_ONE) and (info.anew or not verification.seeds):
        verification.seeds.append(seed)
    elif family in (NORMAL, ONE_BY_ONE):
        verification.notes += [SAME_BATCHES] if SAME_BATCHES not in verification.notes else []
    name = NORMAL if restart else family
    verification.families += [name] if name not in verification.families else []
    verification.reference = info.reference


def measure_disturbed(trial: Trial, info: SetInfo, steps: int, restart: bool) -> None:
    """Widen the yardsticks by runs with a little noise, with sums in another order, and of what does not repeat.

    restart: each step begins with the restored state; else only the first
    """
    if not trial.in_turns:  # large tensors may have no room for it, and seldom sums that one run is a lottery for
        trial.measure(Look(0))  # what reassociated and noisy runs are held against
        trial.reorder(range(steps), restart, info.reassociated_runs)
    noisy = list(range(info.noisy_steps))
    in_order = sorted(noisy, key=lambda noise: noise % steps) if restart else noisy
    trial.measure_all(Look(noise % steps, restart or noise % steps == 0, noise + 1) for noise in in_order)
    extra = range(0 if trial.verification.repeats else (SPREAD_RUNS - 1) * steps)  # gradients have the noisy runs
    trial.measure_all(Look(run % steps, restart or run % steps == 0, forward=True) for run in extra)


def judged(trial: Trial, steps: int, smaller: bool, restart: bool) -> list[list[Finding]]:
    """Findings of each step.

    smaller: a candidate may refuse the last step's batch, which is as small as an epoch's last
    restart: each step begins with the restored state; else only the first
    """
    found = list[list[Finding]]()
    for step in range(steps):
        look = Look(step, restart or step == 0)
        trial.measure(look)
        if not (smaller and step == steps - 1):
            found.append(trial.judge(look))
        elif not taken(trial, partial(_judge_into, found, trial, look)):
            trial.measure(Look(0))
            trial.judge(Look(0))  # the reference goes on with a step that both took
    return found


def _judge_into(found: list[list[Finding]], trial: Trial, look: Look) -> None:
    found.append(trial.judge(look))


def taken(trial: Trial, work: Callable[[], object]) -> bool:
    """Whether an arm takes a batch as small as an epoch's last: a refusal is loud, and no wrong result."""
    try:
        work()
    except Exception as reason:
        if getattr(reason, "type", "") in CHANCE:
            raise
        note = f"a batch as small as an epoch's last is not checked: {first_line(reason)}"
        trial.verification.notes += [note] if note not in trial.verification.notes else []
        return False
    return True


def equal_bits(trial: Trial, seed: int, family: str) -> None:
    """Compare bits under torch's deterministic algorithms, where a baseline that does not repeat itself then does."""
    bits = trial.bits
    if bits.hopeless is None:
        bits.hopeless = set(trial.turn(trial.yardstick, 0).call(Arm.varying, times=REPEATS, repeating=True))
    if bits.varying <= bits.hopeless:
        return
    trial.measure(Look(0, repeating=True))
    found = trial.judge(Look(0, repeating=True))
    if not all(finding.ok for finding in bits.settled(found)):
        bits.hopeless |= set(trial.turn(trial.yardstick, 0).call(Arm.varying, times=SURE, repeating=True))
    bits.note(settled := bits.settled(found))
    trial.add(settled, seed, 0, family)


def same_bits(trial: Trial, found: Sequence[Sequence[Finding]], restart: bool) -> list[list[Finding]]:
    """Findings of each step, with BITWISE on every tensor whose bits the baseline repeats."""
    bits, verification = trial.bits, trial.verification
    steps = [(step > 0 and not restart, findings) for step, findings in enumerate(found)]
    suspected = [step for step, (later, each) in enumerate(steps) if any(bits.deviating(m, later) for m in each)]
    for step in suspected:  # atomics seldom meet: what was the same three times may not be
        varying = set(trial.turn(trial.yardstick, step).call(Arm.varying, times=SURE, step=step))
        if not varying <= bits.varying:
            bits.varying, bits.hopeless, verification.repeats = bits.varying | varying, None, False
    for step in suspected:
        later, each = steps[step]
        odd = {bits.source(m) for m in each if bits.deviating(m, later)}
        bits.varying |= odd - deviating_again(trial, step, restart, odd)
    return [[promised(m) if bits.binding(m, later) else m for m in each] for later, each in steps]


def deviating_again(trial: Trial, step: int, restart: bool, odd: set[str]) -> set[str]:
    """Those of some tensors whose bits differ from the baseline's in half of further runs, and the baseline's in none.

    Atomic additions that seldom meet give one run other bits, and many runs on a busy card, where repetitions of the
    baseline met none before. So both run again in turns. What a strategy does to the order of sums shows in each run.
    """
    looks = [Look(s, restart or s == 0) for s in range(step if restart else 0, step + 1)]
    seen = Counter[str]()
    for _ in range(AGAIN):
        if all(seen[name] >= AGAIN / 2 for name in odd):
            break
        for look in looks:
            trial.measure(look)
        seen.update(with_other_bits(trial, trial.candidate, looks))
        odd = odd - with_other_bits(trial, trial.yardstick, looks)
    return {name for name in odd if seen[name] >= AGAIN / 2}


def with_other_bits(trial: Trial, arm: Client[Arm], looks: Sequence[Look]) -> set[str]:
    """Tensors of the last look in which one more run of an arm differs from the baseline's latest."""
    for look in looks:
        trial.observe(arm, look)
    findings = trial.reference.call(Reference.judge, step=looks[-1].step)
    return {trial.bits.source(finding) for finding in findings if not finding.bitwise}


def where_they_part(trial: Trial) -> str:
    """The first module where the baseline and float64 differ, in words."""
    module = trial.reference.call(Reference.first_apart, passed=trial.turn(trial.yardstick, 0).call(Arm.passed))
    where = f"first in {module}" if module else "behind all modules, as in the loss"
    return (
        f"it computes something else there, {where}: a constant or a branch that depends on the dtype, or what its code"
        " keeps from call to call; make it the same in every dtype (eps=1e-7), or hold it in a buffer"
    )


def all_pass(found: Sequence[Sequence[Finding]]) -> bool:
    return all(finding.ok for findings in found for finding in findings)


def itself(trial: Trial, steps: int, restart: bool) -> bool:
    """Whether further runs of a baseline that does not repeat itself have widened its yardsticks.

    By chance it passes as its own candidate once, and by chance it lies just outside of limits that some runs gave.

    Raises:
        NoYardstick: It lies far outside, or again.
    """
    strays = Strays(trial.reference)
    for step in list(range(steps)) * SPREAD_RUNS:
        trial.measure(Look(step, restart or step == 0))
        for again in range(step if restart else 0, step + 1):  # from the start: a count would be one step ahead
            trial.observe(trial.yardstick, Look(again, restart or again == 0))
        strays.judge(step)
    return bool(strays.seen)


def exchange(trial: Trial, seed: int) -> None:
    """Which inputs matter at all, and whether outputs outlive later steps."""
    verification = trial.verification
    verification.dead = trial.reference.call(Reference.dead)
    verification.constant = trial.reference.call(Reference.constant)
    if dead := ", ".join(verification.dead):
        verification.notes.append(f"the result does not depend on input {dead}: what is done with it is not checked")
    if constant := ", ".join(verification.constant):
        verification.notes.append(f"input {constant} was the same in every draw: other values of it are not checked")
    if not trial.plan.overwrites:
        candidate, yardstick = (
            trial.turn(arm, 0, 1).call(Arm.overwritten) for arm in (trial.candidate, trial.yardstick)
        )
        lost = set(candidate) - set(yardstick)
        text = "a later step writes over it, and the candidate does not say so (Strategy.overwrites)"
        trial.add([broken(name, text) for name in sorted(lost)], seed, 1, ONE_BY_ONE)
