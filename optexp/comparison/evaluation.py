"""A stack before it is timed: verification, evidence of engagement, profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from optexp.comparison import distrust, first_look
from optexp.comparison.adjudicate import Examined
from optexp.comparison.case import Case, StepTraits
from optexp.comparison.compiler_evidence import logged
from optexp.comparison.physics import find_work
from optexp.comparison.profiles import Profile, advised, ceilings, checked, profile, show_where_time_goes
from optexp.comparison.referee import Referee
from optexp.comparison.session import Session, alongside
from optexp.equivalence.perturbation import told
from optexp.errors import ConfigError, Hopeless
from optexp.profiling.piled import piled_up, tells, work
from optexp.records.profile import Bottleneck, Check
from optexp.records.trials import not_verified
from optexp.records.verification import Verification
from optexp.result import Engagement
from optexp.schema import shown
from optexp.strategy import Evidence, Notes, Strategy
from optexp.trace import Trace
from optexp.workers.arm import Arm
from optexp.workers.client import Client
from optexp.workers.messages import SetUp
from optexp.workers.peer import Peer
from optexp.workers.reference import Reference

TRACING = "tracing a few steady steps"
TURNS = 5  # rounds over all batches, by which each batch's step is timed


@dataclass(frozen=True)
class Evaluation:
    """A stack beside the bare program.

    setups:   seconds to the first result, by arm: "bare" and "stacked"
    replaced: its process replaced functions that tell time or read results
    distrust: why no time of its process can be believed; None where it can
    """

    verification: Verification
    evidence: list[Engagement]
    bare: Profile
    stacked: Profile
    setups: dict[str, float]
    referee: Referee
    replaced: bool
    distrust: str | None
    bottlenecks: list[Bottleneck]
    bare_bottlenecks: list[Bottleneck]
    checks: list[Check]

    def facts(self, prefix: str = "") -> Examined:
        """The facts of this stack for the verdict; `prefix` begins its reasons."""
        return Examined(self.verification, self.evidence, self.distrust or "", self.replaced, prefix)


@dataclass(frozen=True)
class Started:
    """Arms that were set up for one stack.

    bare, name: the names of the bare program's arm and of the stack's
    """

    bare: str
    name: str
    arms: dict[str, Client[Arm]]
    judge: Client[Reference]
    setups: dict[str, SetUp]

    @property
    def pair(self) -> tuple[Client[Arm], Client[Arm]]:
        """The bare program's arm, and the stack's."""
        return self.arms[self.bare], self.arms[self.name]

    @property
    def judged(self) -> dict[str, Client[Arm]]:
        """With a yardstick, which may be the bare program itself."""
        return {"yardstick": self.arms[self.bare], **self.arms}


def examine(
    session: Session, stack: Sequence[Strategy], name: str, meanwhile: Callable[[], None] = lambda: None
) -> Evaluation:
    """Verify and profile a stack, in arms of its own.

    Args:
        name: Of the stack's arm: "candidate" or "baseline".
        meanwhile: Work of the parent while the arms set up.
    """
    case = Case.of(session, stack, name)
    started = start(case, meanwhile)
    setup, setups = started.setups[name], started.setups
    steps = StepTraits.of(setups[started.bare])
    case = replace(case, steps=replace(steps, own=steps.own or setup.own_step), rebuilt=setup.rebuilt)
    if name == "candidate":
        announce(case, started)
        if session.looks:
            refuse_slower(case, started)
    referee = Referee(case)
    verification = referee.verify(started.judged, started.judge, started.arms[started.bare])
    verification.varied = told(setup.varied)
    if setup.random and not case.steps.random:
        verification.notes.append(f"the {name} draws random numbers; the bare program draws none")
    bare_arm, arm = started.pair
    timed = session.experiment.verify != "only"
    with session.quietly() if timed else nullcontext(), session.working("profile", f"{TRACING} of the {name}"):
        bare, stacked = profiles(case, started)
        bottlenecks = advised(arm, stacked, stack)
        checks = checked(arm, stacked, bottlenecks, stack)
        bare_bottlenecks = advised(bare_arm, bare, ())
    replaced = bool(arm.call(Arm.replaced))
    reason = distrusted(referee, started, bare.trace, stacked.trace)
    referee.stay(started.arms, started.bare)
    return Evaluation(
        verification=verification,
        evidence=engagements(stack, bare, stacked, setup.notes),
        bare=bare,
        stacked=stacked,
        setups={"bare": setups[started.bare].setup_s, "stacked": setup.setup_s},
        referee=referee,
        replaced=replaced,
        distrust=reason,
        bottlenecks=bottlenecks,
        bare_bottlenecks=bare_bottlenecks,
        checks=checks,
    )


def start(case: Case, meanwhile: Callable[[], None]) -> Started:
    """Set up the arms; the session learns the workload's facts from them."""
    session, name, bare = case.session, case.name, "bare" if case.session.baseline else "baseline"
    specs = {bare: session.spec((), generic=True), **case.specs()}
    specs |= {part: logged(session, specs[part], part) for part in (bare, name)}
    if case.promise.dtype is None:
        del specs["yardstick"]  # which the bare program is itself
    with session.working("arms", f"starting the arms of the {name}"), alongside(meanwhile):
        # The bare program's failure comes first, as it is no strategy's fault. The stack's is next: a program that
        # cannot run under autocast fails in the yardstick, too, and the strategy's message is the better one.
        arms, judge, setups, facts = session.set_up(specs, case.reference_spec(), [bare, name])
    session.check_identities({built: arms[built] for built in (bare, name)})
    session.learn(setups[bare], setups.values(), facts)
    return Started(bare, name, arms, judge, setups)


def announce(case: Case, started: Started) -> None:
    """Write `repro.py` and what lies beside it, and forecast how long the comparison takes."""
    session, setups, bare = case.session, started.setups, started.arms[started.bare]
    files = bare.call(Arm.repro, packed=case.specs()[case.name].pack(), notes=setups[case.name].notes)
    for file, content in files.items():
        (session.output / file).write_bytes(content)
    if session.stack:
        session.patch = bare.call(Arm.patch, packed=case.specs()[case.name].pack(), notes=setups[case.name].notes)
    slower_s = max(told.setup_s - told.inherited_s for told in (setups[started.bare], setups[case.name]))
    session.forecast(bare, setups[started.bare], slower_s, case.plan().steps)


def refuse_slower(case: Case, started: Started) -> None:
    """End the trial of a stack that is clearly slower; its profile tells a search what limits it.

    Raises:
        Hopeless: The stack is slower.
    """
    session, (bare, arm) = case.session, started.pair
    with session.working("measurement", "a first look at the candidate's time"):
        looked = first_look.speedup(bare, arm, case.steps.step_s, session.known_baseline)
    rest(session, bare, arm)
    if looked >= first_look.LEAST:
        return
    session.result.first_look = looked = round(looked, 3)
    with session.working("profile", f"{TRACING} of the candidate"):
        before, stacked = profiles(case, started)
        bottlenecks = advised(arm, stacked, case.stack)
        checks = checked(arm, stacked, bottlenecks, case.stack)
    show_where_time_goes(session, {"baseline": before, "candidate": stacked}, bottlenecks, checks)
    raise Hopeless(not_verified(looked))


def profiles(case: Case, started: Started) -> tuple[Profile, Profile]:
    """Profiles of the bare program and of the stack."""
    session, (bare, arm) = case.session, started.pair
    rest(session, started.judge, *started.arms.values())
    calibration = ceilings(session, started.judge)
    before = profile(session, bare, started.bare, calibration)
    find_work(session, bare)
    rest(session, bare)
    return before, profile(session, arm, case.name, calibration, beside=before.trace)


def distrusted(referee: Referee, started: Started, before: Trace, after: Trace) -> str | None:
    """Why no time of the stack's process can be believed; None where it can."""
    case, (bare, arm), setup = referee.case, started.pair, started.setups[started.bare]
    reason = distrust.tampers(case, arm, referee.changed)
    reason = reason or distrust.leaves_out_copies(case, before, after, setup.batch_bytes)
    if reason is None and (piled := piled_up(*shares(bare, arm, before, after, setup.turn))):
        reason = f"the {case.name} does not compute each step: {piled}"
    return reason


def engagements(
    stack: Sequence[Strategy], bare: Profile, stacked: Profile, notes: Mapping[str, Notes]
) -> list[Engagement]:
    """Evidence of each strategy in the profiles.

    Raises:
        ConfigError: a strategy gives no `Evidence`.
    """
    found = []
    for strategy in stack:
        proof: Any = strategy.evidence(bare.trace, stacked.trace, notes.get(strategy.name, {}), stacked.counters)
        if not isinstance(proof, Evidence):
            raise ConfigError(f"{strategy.name}: evidence returned {shown(proof)}: return Evidence(engaged, text)")
        found.append(Engagement(strategy.name, proof.engaged, proof.text))
    return found


def shares(
    bare: Client[Arm], arm: Client[Arm], before: Trace, after: Trace, turn: int
) -> tuple[list[float], list[float]]:
    """Work of each step of both, by their traces; the steps' times where traces show none (a step in numpy)."""
    found = work(before), work(after)
    if all(tells(steps, turn) for steps in found):
        return found
    return bare.call(Arm.turn_s, rounds=TURNS), arm.call(Arm.turn_s, rounds=TURNS)


def rest(session: Session, *arms: Client[Peer]) -> None:
    """Let these arms give back their memory, where arms take turns on the GPU."""
    for arm in arms if session.in_turns else ():
        arm.call(Peer.rest)


def members(stack: Sequence[Strategy]) -> list[str]:
    """Names of a stack's strategies."""
    return [strategy.name for strategy in stack]
