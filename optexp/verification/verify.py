"""How a candidate is verified: which process does what, in which order. The parent never holds a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from optexp.equivalence import randomness, trajectory
from optexp.equivalence.bits import REPEATS, SURE, promised
from optexp.equivalence.gradient_check import PROVES
from optexp.equivalence.input_families import FAMILIES, NORMAL, ONE_BY_ONE
from optexp.equivalence.quantities import whole
from optexp.errors import Failure
from optexp.records.verification import Finding, GateResult, MutantCount, Trajectory, Verification, broken
from optexp.strategy import BITWISE, Contract
from optexp.verification.outcome import aggregate, failure
from optexp.verification.trial import Plan, Trial, deliver
from optexp.workers.arm import Arm
from optexp.workers.client import Client
from optexp.workers.messages import Look
from optexp.workers.peer import Peer
from optexp.workers.reference import Reference

SPREAD_RUNS = 5  # yardstick runs of a baseline that does not
CHANCE = ("Crash", "Timeout", "OutOfMemoryError")  # failures that need not be due to an input's values
OTHER_SEED = 10_000
SAME_BATCHES = "the loader gives the same batches whatever the seed: they count as one set of inputs"

Progress = Callable[[str], None]


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
    sets = plan.sets
    for position, (seed, family) in enumerate(sets):
        on_progress(f"fresh input set {position + 1} of {len(sets)}" + (f": {family}" if family in FAMILIES else ""))
        try:
            one_set(trial, seed, family)
        except Exception as error:
            kind = getattr(error, "type", type(error).__name__)
            by_candidate = getattr(error, "worker", None) == trial.candidate.name
            if by_candidate and family in FAMILIES and kind not in CHANCE:
                text = f"the candidate raises {kind} where the baseline computes ({error})"
                trial.add([broken("outputs", text)], seed, 0, family)
                break
            if family in (NORMAL, ONE_BY_ONE) or kind != "NoReference":
                raise
            trial.verification.notes.append(f"inputs of family {family.replace('_', ' ')} prove nothing: {error}")
            continue
        if not trial.passed():
            break
        if position == len(plan.seeds) - 1 and plan.power:
            power(trial)
    if plan.power and trial.passed() and contract.dtype != "float16":  # whose gradients may overflow then
        with_other_parameters(trial, plan.seeds[0] + OTHER_SEED)
    if plan.follow and trial.passed():
        on_progress(f"following the loss for {trajectory.STEPS} steps")
        follow(trial, plan.seeds[0])
    trial.verification.unchecked_bits = trial.bits.unchecked(trial.findings) if contract == BITWISE else []
    return aggregate(trial.verification, trial.findings, contract)


# --- the checks ------------------------------------------------------------------------------------------------


def one_set(trial: Trial, seed: int, family: str) -> None:
    """Gates on one set of inputs: yardsticks first, then every step of the candidate."""
    verification, restart = trial.verification, family == ONE_BY_ONE
    info = trial.load(seed, family, trial.plan.steps)
    steps = info.steps
    if not verification.seeds:
        trial.bits.varying = set(trial.turn(trial.yardstick, 0).call(Arm.varying, times=REPEATS))
        verification.repeats = not trial.bits.varying
    if trial.contract == BITWISE and not verification.repeats and family in (NORMAL, ONE_BY_ONE):
        equal_bits(trial, seed, family)
    if restart:
        exchange(trial, seed)
    if not trial.in_turns:  # large tensors have no room for it, nor sums that one run is a lottery for
        trial.measure(Look(0))  # what reassociated and noisy runs are held against
        reassociate(trial, info.reassociated_runs)
    noisy = list(range(info.noisy_steps))
    for noise in sorted(noisy, key=lambda noise: noise % steps) if restart else noisy:
        trial.measure(Look(noise % steps, restart or noise % steps == 0, noise + 1))
    for extra in range(0 if verification.repeats else (SPREAD_RUNS - 1) * steps):
        # Gradients have the noisy runs.
        trial.measure(Look(extra % steps, restart or extra % steps == 0, forward=True))
    found = list[list[Finding]]()
    for step in range(steps):
        look = Look(step, restart or step == 0)
        trial.measure(look)
        found.append(findings := trial.judge(look))
        if family not in FAMILIES and not verification.parts_in and any(m.parted for m in findings):
            verification.parts_in = where_they_part(trial)
    if trial.contract == BITWISE:
        found = same_bits(trial, found, restart)
    for step, findings in enumerate(found):
        trial.add(findings, seed, step, family)
    if not verification.repeats and not trial.passed():
        itself(trial, steps, restart)
    if family in (NORMAL, ONE_BY_ONE) and (info.anew or not verification.seeds):
        verification.seeds.append(seed)
    elif family in (NORMAL, ONE_BY_ONE):
        verification.notes += [SAME_BATCHES] if SAME_BATCHES not in verification.notes else []
    name = NORMAL if restart else family
    verification.families += [name] if name not in verification.families else []
    verification.reference = info.reference


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
    return [[promised(m) if bits.binding(m, later) else m for m in each] for later, each in steps]


def where_they_part(trial: Trial) -> str:
    """The first module where the baseline and float64 differ, in words."""
    module = trial.reference.call(Reference.first_apart, passed=trial.turn(trial.yardstick, 0).call(Arm.passed))
    where = f"first in {module}" if module else "behind all modules, as in the loss"
    return (
        f"it computes something else there, {where}: a constant or a branch that depends on the dtype, or what its code"
        " keeps from call to call; make it the same in every dtype (eps=1e-7), or hold it in a buffer"
    )


def reassociate(trial: Trial, runs: int, step: int = 0) -> None:
    """Runs of the baseline in other orders, as long as there is anything to reorder."""
    for order in range(1, runs + 1):
        trial.measure(Look(step, order=order))
        if not trial.yardstick.call(Arm.reassociated_operators):
            return


def with_other_parameters(trial: Trial, seed: int) -> None:
    """Gradients are for somebody who changes parameters: until then a step that computes with a copy, folded or cast
    before, is right. What only infers may do that, and a whole training step changes them itself."""
    if not trial.others_learn:
        return
    verification, begin = trial.verification, len(trial.findings)
    seeds = list(verification.seeds)
    arms: tuple[Client[Peer], ...] = (trial.reference, trial.yardstick, trial.candidate)
    for arm in arms:
        arm.call(Peer.turn_parameters)
    try:
        one_set(trial, seed, NORMAL)
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


def itself(trial: Trial, steps: int, restart: bool) -> None:
    """A baseline that fails as its own candidate is no yardstick for any other. By chance it may pass once."""
    for step in list(range(steps)) * SPREAD_RUNS:
        trial.measure(Look(step, restart or step == 0))
        for again in range(step if restart else 0, step + 1):  # from the start: a count would be one step ahead
            trial.observe(trial.yardstick, Look(again, restart or again == 0))
        if wrong := [m for m in trial.reference.call(Reference.judge, step=step) if not m.ok]:
            raise Failure(
                "NoReference",
                f"the baseline does not pass beside itself ({wrong[0].tensor}: {wrong[0].message}): its steps"
                " depend on what no arm can restore, as a clock, a counter or random numbers that torch does not draw",
            )


def exchange(trial: Trial, seed: int) -> None:
    """Which inputs matter at all, and whether outputs outlive the next step."""
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
        text = "the next step writes over it, and the candidate does not say so (Strategy.overwrites)"
        trial.add([broken(name, text) for name in sorted(lost)], seed, 1, ONE_BY_ONE)


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


def follow(trial: Trial, seed: int) -> None:
    """The loss over many steps, beside what one rounding of the parameters makes of the baseline's."""
    info = trial.load(seed, NORMAL, 8)
    unit, every = info.unit_used, range(info.steps)
    yardstick = trial.turn(trial.yardstick, *every)
    plain = yardstick.call(Arm.losses, unit=0.0, seed=0)
    moved = [yardstick.call(Arm.losses, unit=unit, seed=run + 1) for run in range(trajectory.PERTURBED)]
    candidate = trial.turn(trial.candidate, *every)
    step, share = trajectory.strays(candidate.call(Arm.losses, unit=0.0, seed=0), plain, moved, unit)
    trial.verification.trajectory = Trajectory(trajectory.STEPS, step, share)
    if share > 1:
        text = f"after {step + 1} steps the loss is {share:.3g} times as far from the baseline's as rounding explains"
        found = replace(broken("loss", text), gate="TRAJECTORY", failed=("TRAJECTORY",))
        trial.add([found], seed, step, NORMAL)


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
    findings, verification.randomness = randomness.compare(found, expected, unit, zeros)
    failed = [replace(finding, seed=seed) for finding in findings]
    verification.gates[randomness.GATE] = GateResult(not failed)
    verification.failures += failed
    if failed:
        verification.ok, verification.worst = False, failed[0]
        verification.headline = failure(failed[0])
    else:
        facts = [text for fact, text in _REPEATABILITY.items() if getattr(expected, fact)]
        limit = verification.randomness.slopes_limit or 0.0
        facts += [_SLOPES] if 0 < limit <= PROVES else []
        if limit > PROVES:
            verification.notes.append(f"whether {_SLOPES} is not known: the baseline's scatter too much around them")
        verification.headline = (
            f"with every dropout at p = 0, {verification.headline}; at its real rate, the results of"
            f" {randomness.SEEDS} seeds of each are distributed alike" + (f", {', '.join(facts)}" if facts else "")
        )


_REPEATABILITY = {"repeat": "equal seeds repeat", "differ": "others differ"}
_SLOPES = "gradients are those of the loss"
