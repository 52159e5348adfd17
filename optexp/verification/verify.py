"""How a candidate is verified: which process does what, in which order. The parent never holds a tensor."""

from __future__ import annotations

from dataclasses import replace

from optexp.equivalence import randomness
from optexp.equivalence.gradient_check import PROVES
from optexp.equivalence.input_families import FAMILIES, NORMAL, ONE_BY_ONE
from optexp.equivalence.quantities import whole
from optexp.errors import FORGED, LEFT_OUT, SPENT, UNTIMED
from optexp.records.verification import GateResult, MutantCount, Verification, broken
from optexp.strategy import BITWISE, Contract
from optexp.verification.checks import Progress, checks
from optexp.verification.one_set import CHANCE, one_set
from optexp.verification.outcome import aggregate, failure
from optexp.verification.trial import Plan, Trial, convey, deliver
from optexp.workers.arm import Arm
from optexp.workers.client import Client
from optexp.workers.messages import Look
from optexp.workers.reference import Reference

NO_CODE = (FORGED, SPENT, UNTIMED, "ConfigError", "Unsupported")  # failures that no line of a step raises


def verify(
    reference: Client[Reference],
    yardstick: Client[Arm],
    candidate: Client[Arm],
    plan: Plan,
    contract: Contract,
    on_progress: Progress = lambda text: None,
) -> Verification:
    """Compare the candidate with fp64, by the measure of what the baseline does, on fresh inputs for every set.

    yardstick: the bare eager program; for a PRECISION contract plain autocast
    Inputs are drawn here, so after the arms compiled, warmed up and captured. Ends at the first set that fails.
    Where equivalence cannot be decided, the reference raises NoReference.
    """
    verification = Verification(str(contract))
    trial = Trial(reference, yardstick, candidate, plan, contract, verification, in_turns=plan.in_turns)
    if plan.apart and any(arm.call(Arm.sets_rates) for arm in (yardstick, candidate)):
        for arm in (yardstick, candidate):
            arm.call(Arm.keep_rates)  # others than a schedule's own would show how it is written
    sets = plan.sets
    for position, (seed, family) in enumerate(sets):
        shows_power = plan.power and position == len(plan.seeds) - 1  # the last normal set
        on_progress(f"fresh input set {position + 1} of {len(sets)}" + (f": {family}" if family in FAMILIES else ""))
        try:
            one_set(trial, seed, family, disturbed=shows_power)
        except Exception as error:
            kind = getattr(error, "type", type(error).__name__)
            by_candidate = getattr(error, "worker", None) == trial.candidate.name
            if by_candidate and family in FAMILIES and kind not in CHANCE:
                text = f"the candidate raises {kind} where the baseline computes ({error})"
                trial.add([broken("outputs", text)], seed, 0, family)
                break
            by_baseline = getattr(error, "worker", None) == trial.yardstick.name and kind not in (*CHANCE, *NO_CODE)
            if family in (NORMAL, ONE_BY_ONE) or not (kind == "NoReference" or by_baseline):
                raise
            if LEFT_OUT in str(error) and updates(trial):
                trial.add(
                    [broken("update", "the candidate makes one, and the baseline leaves it out")], seed, 0, family
                )
                break
            trial.verification.notes.append(f"inputs of family {family.replace('_', ' ')} prove nothing: {error}")
            continue
        if not trial.passed():
            break
        if shows_power:
            power(trial)
    for check in checks():
        if trial.passed() and check.applies(plan, contract):
            check.run(trial, on_progress)
    trial.verification.unchecked_bits = trial.bits.unchecked(trial.findings) if contract == BITWISE else []
    return aggregate(trial.verification, trial.findings, contract)


def updates(trial: Trial) -> bool:
    """Whether the candidate makes an update in each step of the set, of whose steps the baseline leaves one out."""
    if trial.in_turns:
        return False
    deliver(trial.reference, (trial.candidate,), range(trial.plan.steps), trial.family)
    try:
        for step in range(trial.plan.steps):
            trial.observe(trial.candidate, Look(step, step == 0))
    except Exception as error:
        if getattr(error, "type", type(error).__name__) in CHANCE:
            raise
        return False
    return True


def power(trial: Trial) -> None:
    """Would the gates that just passed have seen a wrong result?"""
    verification = trial.verification
    for found in trial.reference.call(Reference.power):
        row = verification.mutants.setdefault(found.mutant, MutantCount())
        row.tried += 1
        row.caught += found.caught
        row.passed += [] if found.caught else [found.tensor]
        if found.visible is not None:
            verification.visible[found.tensor] = found.visible
    outputs = [m for m in trial.findings if "/" not in m.tensor and m.error_rms is not None]
    if outputs:
        tensor = whole(max(outputs, key=lambda m: m.used).tensor)  # small columns come and go
        verification.distribution = trial.reference.call(Reference.distribution, tensor=tensor)


def verify_randomness(
    verification: Verification,
    reference: Client[Reference],
    yardstick: Client[Arm],
    candidate: Client[Arm],
    seed: int,
    unit: float,
) -> None:
    """For steps that draw random numbers, whose gates passed with every dropout at p = 0: the same at the real rates.

    unit: u of the arithmetic that was promised
    """
    reference.call(Reference.draw, seed=seed, count=1, family=NORMAL)
    deliver(reference, (yardstick, candidate), range(1), NORMAL)
    expected, found = yardstick.call(Arm.throw, unit=unit), candidate.call(Arm.throw, unit=unit)
    zeros = reference.call(Reference.zeros) if expected.moments else {}
    findings, figures = randomness.compare(found, expected, unit, zeros)
    convey(yardstick.call(Arm.thrown), yardstick, reference)
    reference.call(Reference.keep_thrown)
    convey(candidate.call(Arm.thrown), candidate, reference)
    together, scatter = reference.call(Reference.scatter, shapes=expected.shapes, unit=unit, zeros=list(zeros))
    findings += together
    verification.randomness = replace(figures, scatter=scatter)
    failed = [replace(finding, seed=seed) for finding in findings]
    verification.gates[randomness.GATE] = GateResult(not failed)
    verification.failures += failed
    if failed:
        verification.ok, verification.worst = False, failed[0]
        verification.headline = failure(failed[0])
    else:
        facts = [text for fact, text in _REPEATABILITY.items() if getattr(expected, fact)]
        limit, visible = verification.randomness.slopes_limit or 0.0, scatter.visible or 0.0
        facts += [_SLOPES] if 0 < limit <= PROVES else []
        facts += [f"a variance {visible:.1%} off would show"] if 0 < visible <= PROVES else []
        if visible > PROVES:
            verification.notes.append(f"dropout's rate is hardly known: a variance {visible:.0%} off may not show")
        if limit > PROVES:
            verification.notes.append(f"whether {_SLOPES} is not known: the baseline's scatter too much around them")
        verification.headline = (
            f"with every dropout at p = 0, {verification.headline}; at its real rate, the results of"
            f" {randomness.SEEDS} seeds of each are distributed alike" + (f", {', '.join(facts)}" if facts else "")
        )


_REPEATABILITY = {"repeat": "equal seeds repeat", "differ": "others differ"}
_SLOPES = "gradients are those of the loss"
