"""One stack under verification: its contract, the traits of the bare program's steps, the plan, the arms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from optexp.comparison.session import Session
from optexp.equivalence.input_families import FEW, FEW_WITH_GRADIENTS, FORWARD_ONLY
from optexp.strategy import Contract, Strategy, contract
from optexp.support.tolerances import tolerance_of
from optexp.verification.trial import Plan
from optexp.workers.messages import SetUp
from optexp.workers.spec import Spec
from optexp.workload import Workload

COUNTED = 6  # consecutive steps where Python counts them, so that a count frozen after a warm-up of three shows


@dataclass(frozen=True)
class StepTraits:
    """Traits of the bare program's steps.

    random:  a step draws random numbers
    carries: a step changes buffers or parameters, which the next step may read
    keeps:   names of the model's Python attributes that every step changes
    step_s:  rough seconds of a step
    own:     the user's code trains, by a step or an optimizer that may do other things at times
    sized:   batches of several sizes take turns: how many batches; else 1
    """

    random: bool = False
    carries: bool = False
    keeps: Sequence[str] = ()
    step_s: float = 0.0
    own: bool = False
    sized: int = 1

    @classmethod
    def of(cls, setup: SetUp) -> StepTraits:
        """The traits that the bare program's arm found."""
        sized = setup.turn if setup.sized > 1 else 1
        return cls(setup.random, setup.carries, setup.keeps, setup.step_s, setup.own_step, sized)


@dataclass(frozen=True)
class Case:
    """One stack, and everything on which its verification depends.

    name:    of its arm: "candidate" or "baseline"
    promise: the stack's contract
    steps:   known once the bare program is set up
    rebuilt: the stack replaced the workload by another one; known once it is set up
    """

    session: Session
    stack: Sequence[Strategy]
    name: str
    promise: Contract
    steps: StepTraits = StepTraits()
    rebuilt: bool = False

    @classmethod
    def of(cls, session: Session, stack: Sequence[Strategy], name: str) -> Case:
        """The case of a stack, before its arms are set up."""
        return cls(session, stack, name, contract(stack))

    @property
    def unit(self) -> float:
        """The unit roundoff of the promised dtype."""
        return tolerance_of(self.promise.dtype or self.session.experiment.dtype).unit

    @property
    def moves(self) -> bool:
        """True if a step changes the start state of the next step."""
        return self.steps.carries or bool(self.steps.keeps) or self.session.workload.mode == "train"

    @property
    def overwrites(self) -> bool:
        return any(strategy.overwrites for strategy in self.stack)

    # --- what is checked ----------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """The checks at the workload's own sizes, with input families unless odd sizes are sure to have them."""
        workload, settings = self.session.workload, self.session.settings
        here = workload.tails_may_be_refused or not workload.tails()
        return Plan(
            seeds=[self.session.draws.seed("verification", index) for index in range(settings.verification_seeds)],
            # A frozen step count shows from the second step on, and so does a buffer that no step reads.
            steps=max(workload.variety, COUNTED if self.steps.keeps else 3 if self.moves else 1),
            families=self._few() if not settings.thorough else self.families() if here else (),
            overwrites=self.overwrites,
            follow=settings.thorough and workload.mode == "train",
            apart=self.rebuilt and self.steps.own,
            in_turns=self.session.in_turns,
        )

    def plan_at_odd_sizes(self) -> Plan:
        """The checks at sizes for which the stack was not built."""
        return Plan(
            seeds=self.plan().seeds[:1],
            families=self.families(),
            overwrites=self.overwrites,
            power=False,
            in_turns=self.session.in_turns,
        )

    def families(self) -> list[str]:
        """The workload's input families, without those that overflow in every program."""
        half = "float16" in (self.promise.dtype, self.session.experiment.dtype)
        overflows = FORWARD_ONLY if half or self.session.workload.mode != "forward" else ()
        return [family for family in self.session.workload.families if family not in overflows]

    def _few(self) -> list[str]:
        """Families of a short verification: `corners` has ties and zeros, `large` passes bounds and overflows."""
        few = FEW if self.session.workload.mode == "forward" else FEW_WITH_GRADIENTS
        return [family for family in self.families() if family in few]

    # --- who takes part -----------------------------------------------------------------------------------------

    def specs(self, workload: Workload | None = None, seed_offset: int = 0, generic: bool = True) -> dict[str, Spec]:
        """Specifications of the yardstick and the stack.

        The yardstick is the bare program or, for a PRECISION contract, plain autocast. On another workload the arms
        start with dropout off.

        Args:
            generic: Parameters have generic values, which hide no error; timed arms have their initial ones.
        """
        session = self.session
        specs = {
            "yardstick": session.spec((), self.promise.dtype, seed_offset, generic=generic),
            self.name: session.spec(self.stack, None, seed_offset, generic=generic),
        }
        return {name: self._elsewhere(spec, workload) for name, spec in specs.items()}

    def reference_spec(self, workload: Workload | None = None, seed_offset: int = 0, generic: bool = True) -> Spec:
        """Specification of the reference arm; arguments as those of `specs`."""
        spec = self.session.spec((), None, seed_offset, judges=self.promise, generic=generic)
        return self._elsewhere(spec, workload)

    def _elsewhere(self, spec: Spec, workload: Workload | None) -> Spec:
        return spec if workload is None else replace(spec, workload=workload, dropout=not self.steps.random)
