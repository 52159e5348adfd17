"""Which arms take part when a stack is verified, on which inputs and sizes, and what their processes gave away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import exp
from statistics import fmean
from typing import TypeVar

from optexp.comparison.measure import SIZES
from optexp.comparison.session import Session
from optexp.equivalence.effects import title
from optexp.equivalence.input_families import FORWARD_ONLY
from optexp.equivalence.missed import End
from optexp.equivalence.process_state import MODES, undeclared
from optexp.errors import Distrusted, Failure, Unsupported
from optexp.measurement.samples import Sample
from optexp.records.verification import GateResult, Recheck, Verification
from optexp.strategy import Strategy, contract
from optexp.support.stopwatch import Stopwatch
from optexp.support.tolerances import TOLERANCES
from optexp.support.units import duration
from optexp.trace import Trace
from optexp.verification import first_step
from optexp.verification.outcome import failure
from optexp.verification.recheck import judge_replay, recheck
from optexp.verification.timed_arm import TimedArm
from optexp.verification.trial import Plan
from optexp.verification.verify import verify, verify_randomness
from optexp.workers.arm import Arm
from optexp.workers.client import Client
from optexp.workers.peer import Peer
from optexp.workers.reference import Reference
from optexp.workers.spec import Spec
from optexp.workload import Workload

A = TypeVar("A")

NOVELTY = 1.2, 1.5  # how many times longer fresh batches may take than those met before, at least and at most
COUNTED = 6  # consecutive steps where Python counts them: what stands still after a warm-up of three shows
LATER, LATER_S = 48, 8.0  # steps before one that is looked at, where steps change what later ones begin with
LOOKS = 3  # before anybody is accused
ASIDE = 0.5  # of a step of the baseline: what a feed may take longer to begin again than the baseline's, for each batch
COPIED = 0.9  # of what the bare program copies to the device: whose traced steps may have met smaller batches


@dataclass
class Referee:
    """One stack, the arms that judge it, and what its steps do.

    random:  steps of the bare program draw random numbers
    replaced: its process has other functions than it began with, by which time is told or results are read
    carries: they change buffers or parameters, which the next one may begin with
    keeps:   names of what the model keeps in Python and every step changes
    step_s:  of the bare program, roughly
    """

    session: Session
    stack: Sequence[Strategy]
    name: str
    random: bool = False
    carries: bool = False
    replaced: bool = False
    keeps: Sequence[str] = ()
    step_s: float = 0.0

    def __post_init__(self) -> None:
        self.promise = contract(self.stack)
        self.found = Verification(str(self.promise))
        self.watch = Stopwatch()
        self.changed: Mapping[str, str] = {}
        self.reference: Client[Reference] | None = None
        self.yardstick: Client[Arm] | None = None

    # --- before the clock runs ----------------------------------------------------------------------------------

    def specs(self, workload: Workload | None = None, seed_offset: int = 0, generic: bool = True) -> dict[str, Spec]:
        """Of the yardstick (the bare program or, for a PRECISION contract, plain autocast) and the stack.

        On another workload they start with dropout off, where there is any.

        Args:
            generic: Parameters hide nothing; the timed arms have those that they begin with.
        """
        session = self.session
        specs = {
            "yardstick": session.spec((), self.promise.dtype, seed_offset, generic=generic),
            self.name: session.spec(self.stack, None, seed_offset, generic=generic),
        }
        return {name: self._elsewhere(spec, workload) for name, spec in specs.items()}

    def reference_spec(self, workload: Workload | None = None, seed_offset: int = 0, generic: bool = True) -> Spec:
        """Of the process that judges both; arguments as those of `specs`."""
        spec = self.session.spec((), None, seed_offset, judges=self.promise, generic=generic)
        return self._elsewhere(spec, workload)

    def _elsewhere(self, spec: Spec, workload: Workload | None) -> Spec:
        return spec if workload is None else replace(spec, workload=workload, dropout=not self.random)

    def verify(self, arms: Mapping[str, Client[Arm]], judge: Client[Reference], bare: Client[Arm]) -> Verification:
        """All checks before the clock runs, on arms that have been set up (`bare`: the plain program's)."""
        session, tell = self.session, self.session.progress.update
        self.reference = judge
        checked = self.without_dropout() if self.random else arms
        with session.working("verification", "comparing with fp64 on fresh inputs"):
            reference = self.watched(judge)
            if self.random:
                reference.call(Reference.silence)
            yardstick, candidate = self.watched(checked["yardstick"]), self.watched(checked[self.name])
            try:
                found = verify(reference, yardstick, candidate, self.plan(), self.promise, tell)
            except Failure as reason:
                undecided = reason.type == "NoReference"
                if not (undecided and (cause := self.unkept(yardstick))):
                    raise
                raise replace(reason, message=f"{reason.message}; {cause}") from None
            found.unkept = self.unkept(yardstick) if found.undecided else ""
            if found.ok:
                self.the_first_step(found, self.watched(arms["yardstick"]), self.watched(arms[self.name]))
            if found.ok and self.moves and not self.random and session.workload.mode != "train":
                self.a_later_step(found, reference, yardstick, candidate)
            if self.random and found.ok:
                tell("comparing distributions at the real dropout")
                yardstick, candidate = self.watched(arms["yardstick"]), self.watched(arms[self.name])
                verify_randomness(found, reference, yardstick, candidate, self.plan().seeds[0], self.unit)
        for arm in checked.values() if self.random else ():
            arm.close()
        if found.ok and session.settings.thorough:
            for workload in session.workload.tails():
                self.beyond(workload, found)
        declared = frozenset().union(*(strategy.changes for strategy in self.stack))
        history = arms[self.name].call(Arm.settings), bare.call(Arm.settings)
        self.changed, found.state = undeclared(*history, ()), dict(undeclared(*history, declared))
        found.notes += [f"the {self.name} changes {name}: {change}" for name, change in found.state.items()]
        found.seconds = self.seconds
        self.found = found
        return found

    def the_first_step(self, found: Verification, yardstick: Client[Arm], candidate: Client[Arm]) -> None:
        """After building, of those that will be measured, whatever they draw."""
        findings, unlike = first_step.check_first_step(yardstick, candidate)
        found.gates[first_step.GATE] = GateResult(not findings)
        if unlike:
            names = ", ".join(map(title, unlike))
            found.notes.append(f"the baseline's first step leaves {names} otherwise than when it is repeated")
        if findings:
            found.failures = [replace(finding, seed=self.session.experiment.seed) for finding in findings]
            found.ok, found.worst = False, found.failures[0]
            found.headline = f"the first step after building: {failure(found.worst)}"

    def a_later_step(
        self, found: Verification, reference: Client[Reference], yardstick: Client[Arm], candidate: Client[Arm]
    ) -> None:
        """After many, whatever is timed: a copy that was made before the first shows once what it was made of has
        changed, as weights that somebody exchanges now and then. Training has its own gradients, and a trajectory."""
        steps = min(LATER, max(COUNTED, int(LATER_S / max(self.step_s, 1e-9))))
        try:
            findings = judge_replay(reference, yardstick, candidate, End(steps), False, self.session.in_turns)
        except Failure as reason:
            if reason.type != "NoReference":
                raise
            found.notes.append(f"not looked at after {steps} steps: {reason}")
            return
        if failed := [finding for finding in findings if not finding.ok]:
            seed = self.session.experiment.seed
            found.failures = [replace(finding, seed=seed, step=steps) for finding in failed]
            found.ok, found.worst = False, found.failures[0]
            found.headline = f"after {steps} steps: {failure(found.worst)}"

    def unkept(self, yardstick: Client[Arm]) -> str:
        """What the model keeps in Python and no arm can put back, in words, where equal steps differ; else empty."""
        if not (names := yardstick.call(Arm.unkept)):
            return ""
        which = "an attribute" if len(names) == 1 else "attributes"
        return f"the model keeps {', '.join(names)}, {which} that cannot be put back before each step"

    def watched(self, arm: Client[A]) -> Client[A]:
        """The same arm; where its time goes is known afterwards."""
        return TimedArm(arm, self.watch)

    @property
    def unit(self) -> float:
        """u of the arithmetic that was promised."""
        return TOLERANCES[self.promise.dtype or self.session.experiment.dtype].unit

    @property
    def seconds(self) -> dict[str, float]:
        return {part: round(seconds, 3) for part, seconds in self.watch.seconds.items()}

    def distrust(self, candidate: Client[Arm]) -> str | None:
        """Why nothing that its process measures can be believed."""
        self.replaced = bool(candidate.call(Arm.replaced))
        if replaced := candidate.call(Arm.tampered):
            return f"the {self.name} replaces {' and '.join(replaced)}: time and results are read by that"
        if MODES in self.found.state:
            return f"the {self.name} changes {MODES}: {self.found.state[MODES]}"
        if self.changed and not self.session.isolated:
            changed = ", ".join(self.changed)
            return f"the {self.name} changes {changed} for the baseline too, in the same process: use isolation=process"
        return None

    def uncopied(self, bare: Trace, stacked: Trace, batch_bytes: float) -> str | None:
        """Feeds are filled while nobody times: where the bare program's steps copy their batch, so must these.

        Numbers may travel in the dtype that was promised.
        """
        theirs, ours, given = to_device(bare), to_device(stacked), self.session.experiment.dtype
        narrower = min(1.0, SIZES.get(self.promise.dtype or given, 4) / SIZES[given])
        if theirs < COPIED * batch_bytes or ours >= COPIED * narrower * theirs:
            return None
        return (
            f"the {self.name} copies {ours / 2**20:.3g} MiB to the device in a step, the bare program"
            f" {theirs / 2**20:.3g}: batches that are brought there while nothing is timed make no step faster"
        )

    def plan(self) -> Plan:
        """What is checked at the workload's own sizes; families of inputs only where no smaller ones are sure."""
        workload, settings = self.session.workload, self.session.settings
        here = workload.tails_may_be_refused or not workload.tails()
        return Plan(
            seeds=[self.session.draws.seed("verification", index) for index in range(settings.verification_seeds)],
            # A frozen step count shows from the second on, and so does a buffer that nobody reads.
            steps=max(workload.variety, COUNTED if self.keeps else 3 if self.moves else 1),
            families=self.families() if settings.thorough and here else (),
            overwrites=self.overwrites,
            follow=settings.thorough and workload.mode == "train",
            in_turns=self.session.in_turns,
        )

    @property
    def moves(self) -> bool:
        """Whether a step changes what the next one starts from."""
        return self.carries or bool(self.keeps) or self.session.workload.mode == "train"

    def families(self) -> list[str]:
        """Those that mean something to the workload, without those that overflow whatever computes them."""
        half = "float16" in (self.promise.dtype, self.session.experiment.dtype)
        overflows = FORWARD_ONLY if half or self.session.workload.mode != "forward" else ()
        return [family for family in self.session.workload.families if family not in overflows]

    @property
    def overwrites(self) -> bool:
        return any(strategy.overwrites for strategy in self.stack)

    def without_dropout(self) -> dict[str, Client[Arm]]:
        """Fresh arms in which every dropout has rate 0: what is compiled or captured keeps the rate that it met."""
        with self.session.working("arms", "starting arms without dropout"):
            specs = {name: replace(spec, dropout=False) for name, spec in self.specs().items()}
            starting = self.session.pool.start({f"{name} without dropout": spec for name, spec in specs.items()})
            for each in starting.values():
                each.setup.wait()
        return {name: each.arm for name, each in zip(specs, starting.values(), strict=True)}

    def beyond(self, workload: Workload, found: Verification) -> None:
        """The same stack at sizes that it was not built for, on all families of inputs. Only what is silently wrong
        there counts; to refuse is no mistake."""
        session, own = self.session, asdict(self.session.workload)
        sizes = ", ".join(f"{key}={value}" for key, value in asdict(workload).items() if value != own[key])
        with session.working("verification", f"at {sizes}"):
            starting = session.pool.start({f"{name} at odd sizes": spec for name, spec in self.specs(workload).items()})
            judge_starting = session.pool.start_reference(self.reference_spec(workload), "reference at odd sizes")
            yardstick, candidate = (each.arm for each in starting.values())
            reference = judge_starting.arm
            arms: tuple[Client[Peer], ...] = (yardstick, candidate, reference)
            try:
                with self.watch.phase("setup"):
                    for each in starting.values():
                        each.setup.wait()
                    judge_starting.setup.wait()
                plan = replace(Plan(self.plan().seeds[:1], families=self.families()), power=False)
                plan = replace(plan, overwrites=self.overwrites, in_turns=session.in_turns)
                judge, under_test = self.watched(reference), self.watched(candidate)
                there = verify(judge, self.watched(yardstick), under_test, plan, self.promise)
            except (Unsupported, Failure) as reason:
                if isinstance(reason, Failure) and candidate.name != reason.worker and reason.type != "NoReference":
                    raise
                found.notes.append(f"not checked at {sizes}: {reason}")
                return
            finally:
                for arm in arms:
                    arm.close()
        found.families += [family for family in there.families if family not in found.families]
        found.notes += [note for note in there.notes if note not in found.notes]
        if there.ok:
            found.tails.append(sizes)
            many = "family" if len(there.families) == 1 else "families"
            found.headline += f"; {len(there.families)} {many} of inputs at {sizes}"
        else:
            found.ok, found.failures, found.worst, found.gates = False, there.failures, there.worst, there.gates
            found.headline = f"at {sizes}: {there.headline}"

    # --- after it has stopped -----------------------------------------------------------------------------------

    def stay(self, arms: Mapping[str, Client[Arm]], bare: str) -> None:
        """Keep the arms that judge, for `again`; those that were measured serve as the yardstick where they can."""
        measured = self.promise.dtype is None and not self.session.baseline
        self.yardstick = None if measured else arms.get("yardstick", arms[bare])
        assert self.reference is not None, "verify comes first"
        self.reference.call(Reference.rest)
        for arm in arms.values():
            if arm is not self.yardstick:
                arm.close()

    def leave(self) -> None:
        arms: tuple[Client[Peer] | None, ...] = (self.reference, self.yardstick)
        for arm in arms:
            if arm is not None:
                arm.close()

    def again(self, arms: Mapping[str, Client[Arm]], samples: Sequence[Sample]) -> None:
        """Verify the process that was measured last: on fresh inputs, and what it returned while the clock ran.

        A failure is one of the verification, too: the timed program is then not the verified one.
        """
        session, found, candidate, seed_offset = self.session, self.found, arms["candidate"], len(samples) - 1
        assert self.reference is not None
        with session.working("verification", "on inputs that it has not met"):
            reason = (
                self.distrust(candidate)
                or self.gives_other_batches(arms)
                or self.only_seen_before(arms, samples)
                or self.restarts(arms, samples)
            )
        if reason:
            raise Distrusted(reason)
        with session.working("verification", "once more, after timing"):
            specs = self.specs(seed_offset=seed_offset, generic=False)
            reference, yardstick = self.watched(self.reference), self.watched(self.yardstick or arms["baseline"])
            under_test = self.watched(candidate)
            reference.call(Reference.setup, packed=self.reference_spec(seed_offset=seed_offset, generic=False).pack())
            if self.yardstick is not None:
                yardstick.call(Arm.setup, packed=specs["yardstick"].pack())
            plan, fresh = self.plan(), Verification(str(self.promise))
            seed = session.draws.seed("recheck")
            if self.random:
                verify_randomness(fresh, reference, yardstick, under_test, seed, self.unit)
            else:
                once = replace(plan, seeds=[seed], families=(), power=False, follow=False)
                fresh = verify(reference, yardstick, under_test, once, self.promise)
            check = partial(recheck, reference, yardstick, under_test, self.moves, self.random, session.in_turns)
            findings, facts = check() if fresh.ok else ([], Recheck(ok=False))
        found.seconds = self.seconds
        found.recheck = replace(facts, process=seed_offset + 1, fresh_inputs=fresh.ok)
        if failed := [finding for finding in findings if not finding.ok]:
            drawn = session.draws.seed("batches", seed_offset)
            failed = [replace(finding, seed=drawn, step=facts.steps) for finding in failed]
            fresh.ok, fresh.failures, fresh.worst = False, failed, failed[0]
            fresh.headline = f"the last step of a timed block: {failure(failed[0])}"
        if not fresh.ok:
            found.ok, found.failures, found.worst = False, fresh.failures, fresh.worst
            found.headline = f"after timing: {fresh.headline}"

    def gives_other_batches(self, arms: Mapping[str, Client[Arm]]) -> str | None:
        """Every batch of two rounds is compared with the core's, and the last one of each block that is looked at; of
        a loader's, which batches are equal."""
        (ours, our_pattern), (theirs, their_pattern) = (
            arms[name].call(Arm.delivered) for name in ("candidate", "baseline")
        )
        wrong = (theirs and not ours) or (theirs is None and our_pattern != their_pattern)
        wrong_in_blocks, theirs_too = (arms[name].call(Arm.wrongly_given) for name in ("candidate", "baseline"))
        if wrong or (wrong_in_blocks and not theirs_too):
            where = "" if wrong else f" ({wrong_in_blocks} timed blocks ended on another)"
            return f"the feed of the {self.name} does not give the batches that the baseline's gives{where}"
        ahead, allowed = (arms[name].call(Arm.taken_ahead) for name in ("candidate", "baseline"))
        if ahead <= allowed:
            return None
        return (
            f"the feed of the {self.name} takes {ahead} batch{'es' if ahead > 1 else ''} before a step asks, beyond"
            f" the {arms['candidate'].call(Arm.queue)} that it declares (Feed.queue): take source[n] in Feed.next"
        )

    def only_seen_before(self, arms: Mapping[str, Client[Arm]], samples: Sequence[Sample]) -> str | None:
        """A candidate that remembers results is fast on the batches of a benchmark, and nowhere else.

        It may lose half of its gain on others: what they cost is measured on a few steps.
        """
        gain, (least, most) = exp(fmean(sample.log_ratio for sample in samples)), NOVELTY
        for look in range(LOOKS):
            seed = self.session.draws.seed("novelty", look)
            ours, theirs = (arms[name].call(Arm.novelty, seed=seed) for name in ("candidate", "baseline"))
            if theirs is None:  # a loader's own
                names = "candidate", "baseline"
                ours, theirs = (arms[name].call(Arm.reordered, seed=seed) for name in names)
            if arms["candidate"].call(Arm.met) != arms["baseline"].call(Arm.met):
                return (
                    f"the {self.name} draws other batches than the baseline from the same seed: generators of random"
                    " numbers were replaced in its process"
                )
            if ours is None:  # which `gives_other_batches` would have said
                return None
            if ours < min(max((1 + gain) / 2, least), most) * max(theirs, 1.0):
                return None
        return f"the {self.name} takes {ours:.3g} times as long on inputs that it has not seen: it remembers results"

    def restarts(self, arms: Mapping[str, Client[Arm]], samples: Sequence[Sample]) -> str | None:
        """Feeds begin again before every block, while nobody times.

        How long that takes at least is held against what a step takes at least: on a busy machine blocks take longer.
        """
        blocks = (pair.baseline.wall_s for sample in samples for pair in sample.kept)
        singles = (step_s for sample in samples for step_s in sample.alone.get("baseline", ()))
        ours, theirs = (arms[name].call(Arm.restart_s) for name in ("candidate", "baseline"))
        if ours - theirs < ASIDE * min(*blocks, *singles):
            return None
        return (
            f"the feed of the {self.name} takes {duration(ours)} for each batch to begin again, the baseline's"
            f" {duration(theirs)}: what it does there, while nothing is timed, makes no step faster"
        )


def to_device(trace: Trace) -> float:
    """Bytes that a step copies there."""
    return sum(copy.bytes for copy in trace.copies if copy.kind == "HtoD") / len(trace.steps)
