"""The process that was measured last is verified once more: on fresh inputs, and by what its timed blocks left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from optexp.comparison import distrust
from optexp.comparison.referee import Referee
from optexp.errors import Distrusted, Failure
from optexp.measurement.samples import Sample
from optexp.records.verification import Finding, Recheck, Verification
from optexp.verification.outcome import failure
from optexp.verification.recheck import recheck
from optexp.verification.verify import verify, verify_randomness
from optexp.workers.arm import Arm
from optexp.workers.client import Client
from optexp.workers.peer import Peer
from optexp.workers.reference import Reference


def verify_timed(referee: Referee, arms: Mapping[str, Client[Arm]], samples: Sequence[Sample]) -> None:
    """Add what is found to the referee's verification: a failure shows that the timed program is not the verified one.

    Raises:
        Distrusted: Something in the process makes its times worthless.
    """
    session, found, seed_offset = referee.case.session, referee.found, len(samples) - 1
    with session.working("verification", "on inputs that it has not met"):
        if reason := _distrust(referee, arms, samples):
            raise Distrusted(reason)
        # Of what is wrong in timed blocks too, a check below says more.
        doubt = distrust.guesses_results(referee.case, arms)
        doubt = doubt or distrust.keeps_what_parameters_give(referee.case, arms, samples)
    session.quiet.end()  # nothing is timed from here on
    with session.working("verification", "once more, after timing"):
        fresh, findings, facts = _verify_once_more(referee, arms, seed_offset)
    found.seconds = referee.seconds
    found.recheck = replace(facts, process=seed_offset + 1, fresh_inputs=fresh.ok)
    if failed := [finding for finding in findings if not finding.ok]:
        drawn = session.draws.seed("batches", seed_offset)
        failed = [replace(finding, seed=drawn, step=facts.steps) for finding in failed]
        fresh.ok, fresh.failures, fresh.worst = False, failed, failed[0]
        fresh.headline = f"the last step of a timed block: {failure(failed[0])}"
    if not fresh.ok:
        found.ok, found.failures, found.worst = False, fresh.failures, fresh.worst
        found.headline = f"after timing: {fresh.headline}"
    elif doubt:
        raise Distrusted(doubt)


def _distrust(referee: Referee, arms: Mapping[str, Client[Arm]], samples: Sequence[Sample]) -> str | None:
    case = referee.case
    return (
        distrust.tampers(case, arms["candidate"], referee.changed)
        or distrust.gives_other_batches(case, arms)
        or distrust.remembers_results(case, arms, samples)
        or distrust.works_in_reset(case, arms, samples)
    )


def _verify_once_more(
    referee: Referee, arms: Mapping[str, Client[Arm]], seed_offset: int
) -> tuple[Verification, Sequence[Finding], Recheck]:
    """On fresh inputs; where they show no failure, findings about the timed blocks, and how many there were."""
    case, session = referee.case, referee.case.session
    specs = case.specs(seed_offset=seed_offset, generic=False)
    assert referee.reference is not None, "verify comes first"
    reference, under_test = referee.watched(referee.reference), referee.watched(arms["candidate"])
    yardstick = referee.watched(referee.yardstick or arms["baseline"])
    reference.call(Reference.setup, packed=case.reference_spec(seed_offset=seed_offset, generic=False).pack())
    if referee.yardstick is not None:
        yardstick.call(Arm.setup, packed=specs["yardstick"].pack())
    seed = session.draws.seed("recheck")
    if case.steps.random:
        fresh = Verification(str(case.promise))
        verify_randomness(fresh, reference, yardstick, under_test, seed, case.unit)
    else:
        once = replace(case.plan(), seeds=[seed], families=(), power=False, follow=False)
        fresh = verify(reference, yardstick, under_test, once, case.promise)
    random, in_turns, steady = case.steps.random, session.in_turns, fresh.repeats
    zeros = referee.found.zeros | fresh.zeros
    check = partial(recheck, reference, yardstick, under_test, case.moves, random, in_turns, steady, case.unit, zeros)
    findings, facts = check() if fresh.ok else ([], Recheck(ok=False))
    others_learn = session.workload.mode == "forward_backward" and bool(referee.found.varied) and not random
    if fresh.ok and facts.ok and others_learn:
        fresh = _with_other_parameters(referee, fresh, (reference, yardstick, under_test))
    return fresh, findings, facts


def _with_other_parameters(
    referee: Referee, fresh: Verification, arms: tuple[Client[Reference], Client[Arm], Client[Arm]]
) -> Verification:
    """The verification, or one that fails with other values of the parameters.

    Gradients serve to change parameters. Timed steps began with zeros and ones among them, and a program may have left
    out work on these from its first call on.
    """
    case = referee.case
    every: tuple[Client[Peer], ...] = arms
    for arm in every:
        arm.call(Peer.turn_parameters)
    once = replace(case.plan(), seeds=[case.session.draws.seed("recheck")], families=(), power=False, follow=False)
    try:
        turned = verify(*arms, once, case.promise)
    except Failure as reason:
        if reason.type != "NoReference":
            raise
        return fresh
    turned.headline = f"with other values of the parameters: {turned.headline}"
    return fresh if turned.ok else turned
