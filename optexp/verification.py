"""Which arms take part when a stack is verified, on which inputs and sizes, and what their processes gave away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from optexp.arm import Spec
from optexp.equivalence.families import FORWARD_ONLY, NORMAL
from optexp.equivalence.gates import TOLERANCES
from optexp.equivalence.protocol import Plan, Verification, failure, verify, verify_randomness
from optexp.equivalence.recheck import recheck
from optexp.equivalence.state import undeclared
from optexp.processes import Failure
from optexp.result import Verdict
from optexp.session import Arm, Session, Stop
from optexp.strategy import Strategy, Unsupported, contract
from optexp.workload import Workload

NOVELTY = 1.5  # how many times longer fresh batches may take than those met before


@dataclass
class Referee:
    """One stack, the arms that judge it, and what its steps do.

    random: steps of the bare program draw random numbers
    """

    session: Session
    stack: Sequence[Strategy]
    name: str
    random: bool = False

    def __post_init__(self) -> None:
        self.promise = contract(self.stack)
        self.found = Verification(str(self.promise))
        self.changed: Mapping[str, str] = {}
        self.reference: Arm | None = None
        self.yardstick: Arm | None = None

    # --- before the clock runs ----------------------------------------------------------------------------------

    def specs(self, workload: Workload | None = None, seed_offset: int = 0) -> dict[str, Spec]:
        """Of the three that take part: the yardstick is the bare program or, for a PRECISION contract, plain autocast.

        On another workload they start with dropout off, where there is any.
        """
        session, promise = self.session, self.promise
        specs = {
            "yardstick": session.spec((), autocast=promise.dtype, seed_offset=seed_offset),
            self.name: session.spec(self.stack, seed_offset=seed_offset),
            "reference": session.spec((), judges=promise, seed_offset=seed_offset),
        }
        if workload is None:
            return specs
        return {name: replace(spec, workload=workload, dropout=not self.random) for name, spec in specs.items()}

    def verify(self, arms: Mapping[str, Arm], bare: Arm) -> Verification:
        """All checks before the clock runs, on arms that have been set up (`bare`: the plain program's)."""
        session, tell = self.session, self.session.progress.update
        checked = self.without_dropout() if self.random else arms
        with session.working("verification", "comparing with fp64 on fresh inputs"):
            found = verify(arms["reference"], checked["yardstick"], checked[self.name], self.plan(), self.promise, tell)
            if self.random and found.ok:
                tell("comparing distributions at the real dropout")
                unit = TOLERANCES[self.promise.dtype or session.experiment.dtype].unit
                seed = self.plan().seeds[0]
                verify_randomness(found, arms["reference"], arms["yardstick"], arms[self.name], seed, unit)
        for arm in checked.values() if self.random else ():
            arm.close()
        if found.ok and session.protocol.thorough:
            for workload in session.workload.tails():
                self.beyond(workload, found)
        declared = frozenset().union(*(strategy.changes for strategy in self.stack))
        history = arms[self.name].call("settings"), bare.call("settings")
        self.changed, found.state = undeclared(*history, ()), dict(undeclared(*history, declared))
        found.notes += [f"the {self.name} changes {name}: {change}" for name, change in found.state.items()]
        self.found = found
        return found

    def distrust(self, candidate: Arm) -> str | None:
        """Why nothing that its process measures can be believed."""
        if replaced := candidate.call("tampered"):
            return f"the {self.name} replaces {' and '.join(replaced)}, by which time is measured"
        if self.changed and not self.session.isolated:
            changed = ", ".join(self.changed)
            return f"the {self.name} changes {changed} for the baseline too, in the same process: use isolation=process"
        return None

    def plan(self) -> Plan:
        """What is checked at the workload's own sizes; families of inputs only where there are no smaller ones."""
        workload, protocol = self.session.workload, self.session.protocol
        first = self.session.experiment.seed + 1
        return Plan(
            seeds=range(first, first + protocol.verification_seeds),
            # A frozen step count shows from the second on.
            steps=max(workload.variety, 3 if workload.mode == "train" else 1),
            families=self.families() if protocol.thorough and not workload.tails() else (),
            overwrites=self.overwrites,
            follow=protocol.thorough and workload.mode == "train",
        )

    def families(self) -> list[str]:
        """Those that mean something to the workload, without those that overflow whatever computes them."""
        half = "float16" in (self.promise.dtype, self.session.experiment.dtype)
        overflows = FORWARD_ONLY if half or self.session.workload.mode != "forward" else ()
        return [family for family in self.session.workload.families if family not in overflows]

    @property
    def overwrites(self) -> bool:
        return any(strategy.overwrites for strategy in self.stack)

    def without_dropout(self) -> dict[str, Arm]:
        """Fresh arms in which every dropout has rate 0: what is compiled or captured keeps the rate that it met."""
        with self.session.working("arms", "starting arms without dropout"):
            specs = {name: replace(spec, dropout=False) for name, spec in self.specs().items() if name != "reference"}
            arms = self.session.start({f"{name} without dropout": spec for name, spec in specs.items()})
            for arm in arms.values():
                arm.wait()
        return dict(zip(specs, arms.values(), strict=True))

    def beyond(self, workload: Workload, found: Verification) -> None:
        """The same stack at sizes that it was not built for, on all families of inputs. Only what is silently wrong
        there counts; to refuse is no mistake."""
        session, own = self.session, asdict(self.session.workload)
        sizes = ", ".join(f"{key}={value}" for key, value in asdict(workload).items() if value != own[key])
        with session.working("verification", f"at {sizes}"):
            arms = session.start({f"{name} at odd sizes": spec for name, spec in self.specs(workload).items()})
            yardstick, candidate, reference = arms.values()
            try:
                for arm in arms.values():
                    arm.wait()
                plan = Plan(self.plan().seeds[:1], families=self.families(), overwrites=self.overwrites, power=False)
                there = verify(reference, yardstick, candidate, plan, self.promise)
            except (Unsupported, Failure) as reason:
                if isinstance(reason, Failure) and candidate.name != reason.worker and reason.type != "NoReference":
                    raise
                found.notes.append(f"not checked at {sizes}: {reason}")
                return
            finally:
                for arm in arms.values():
                    arm.close()
        found.families += [family for family in there.families if family not in found.families]
        found.notes += [note for note in there.notes if note not in found.notes]
        if there.ok:
            found.tails.append(sizes)
            found.headline += f"; {len(there.families)} families of inputs at {sizes}"
        else:
            found.ok, found.failures, found.worst, found.gates = False, there.failures, there.worst, there.gates
            found.headline = f"at {sizes}: {there.headline}"

    # --- after it has stopped -----------------------------------------------------------------------------------

    def stay(self, arms: Mapping[str, Arm], bare: str) -> None:
        """Keep the arms that judge, for `again`; those that were measured serve as the yardstick where they can."""
        measured = self.promise.dtype is None and not self.session.baseline
        self.reference, self.yardstick = arms["reference"], None if measured else arms.get("yardstick", arms[bare])
        self.reference.call("rest")
        for arm in arms.values():
            if arm not in (self.reference, self.yardstick):
                arm.close()

    def leave(self) -> None:
        for arm in (self.reference, self.yardstick):
            if arm is not None:
                arm.close()

    def again(self, arms: Mapping[str, Arm], seed_offset: int) -> None:
        """Verify the process that was measured last: on fresh inputs, and what it returned while the clock ran.

        `Stop` where it fails: what was timed is then not what was verified.
        """
        session, found, candidate = self.session, self.found, arms["candidate"]
        assert self.reference is not None
        if reason := self.distrust(candidate) or self.only_seen_before(arms):
            raise Stop(Verdict.INVALID, reason)
        if self.random:
            found.recheck = {"note": "steps draw random numbers: no timed step can be repeated by another arm"}
            session.result.equivalence = found.to_dict()
            return
        with session.working("verification", "once more, after timing"):
            specs = self.specs(seed_offset=seed_offset)
            self.reference.call("setup", packed=specs["reference"].pack())
            yardstick = self.yardstick or arms["baseline"]
            if self.yardstick is not None:
                self.yardstick.call("setup", packed=specs["yardstick"].pack())
            plan = self.plan()
            once = replace(plan, seeds=[plan.seeds[-1] + 1], families=(), power=False, follow=False)
            fresh = verify(self.reference, yardstick, candidate, once, self.promise)
            trains = session.workload.mode == "train"
            messages, facts = recheck(self.reference, yardstick, candidate, trains) if fresh.ok else ([], {})
        found.recheck = {"process": seed_offset + 1, "fresh inputs": fresh.ok, **facts}
        if failed := [message for message in messages if not message["ok"]]:
            where = {"seed": session.experiment.seed + seed_offset, "step": facts["steps"], "family": NORMAL}
            fresh.ok, fresh.failures, fresh.worst = False, failed, failed[0]
            fresh.headline = f"the last step of a timed block: {failure({**failed[0], **where})}"
        if not fresh.ok:
            found.ok, found.failures, found.worst = False, fresh.failures, fresh.worst
            found.headline = f"after timing: {fresh.headline}"
        session.result.equivalence = found.to_dict()
        if not found.ok:
            raise Stop(Verdict.NOT_EQUIVALENT, found.headline)

    def only_seen_before(self, arms: Mapping[str, Arm]) -> str | None:
        """A candidate that remembers results is fast on the batches of a benchmark, and nowhere else."""
        for seed in (1000, 2000):  # a second look, before anybody is accused
            ours, theirs = (arms[name].call("novelty", seed=seed) for name in ("candidate", "baseline"))
            if ours is None or theirs is None or ours < NOVELTY * max(theirs, 1.0):
                return None
        return f"the {self.name} takes {ours:.3g} times as long on inputs that it has not seen: it remembers results"
