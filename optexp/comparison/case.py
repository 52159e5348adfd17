"""One stack as it is verified: its promise, what steps of the bare program do, the plan, and who takes part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from optexp.comparison.session import Session
from optexp.equivalence.input_families import FORWARD_ONLY
from optexp.strategy import Contract, Strategy, contract
from optexp.support.tolerances import tolerance_of
from optexp.verification.trial import Plan
from optexp.workers.messages import SetUp
from optexp.workers.spec import Spec
from optexp.workload import Workload

COUNTED = 6  # consecutive steps where Python counts them: what stands still after a warm-up of three shows


@dataclass(frozen=True)
class StepTraits:
    """What steps of the bare program do.

    random:  they draw random numbers
    carries: they change buffers or parameters, which the next one may begin with
    keeps:   names of what the model keeps in Python and every step changes
    step_s:  seconds of one, roughly
    """

    random: bool = False
    carries: bool = False
    keeps: Sequence[str] = ()
    step_s: float = 0.0

    @classmethod
    def of(cls, setup: SetUp) -> StepTraits:
        """As its arm found them."""
        return cls(setup.random, setup.carries, setup.keeps, setup.step_s)


@dataclass(frozen=True)
class Case:
    """One stack, called `name`, and everything that its verification follows from.

    steps:   known once the bare program is set up
    rebuilt: the stack put another workload in the place of the first one; known once it is set up
    """

    session: Session
    stack: Sequence[Strategy]
    name: str
    promise: Contract
    steps: StepTraits = StepTraits()
    rebuilt: bool = False

    @classmethod
    def of(cls, session: Session, stack: Sequence[Strategy], name: str) -> Case:
        """Ask the stack once what it promises."""
        return cls(session, stack, name, contract(stack))

    @property
    def unit(self) -> float:
        """u of the arithmetic that was promised."""
        return tolerance_of(self.promise.dtype or self.session.experiment.dtype).unit

    @property
    def moves(self) -> bool:
        """Whether a step changes what the next one starts from."""
        return self.steps.carries or bool(self.steps.keeps) or self.session.workload.mode == "train"

    @property
    def overwrites(self) -> bool:
        return any(strategy.overwrites for strategy in self.stack)

    # --- what is checked ----------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """What is checked at the workload's own sizes; families of inputs only where no smaller ones are sure."""
        workload, settings = self.session.workload, self.session.settings
        here = workload.tails_may_be_refused or not workload.tails()
        return Plan(
            seeds=[self.session.draws.seed("verification", index) for index in range(settings.verification_seeds)],
            # A frozen step count shows from the second on, and so does a buffer that nobody reads.
            steps=max(workload.variety, COUNTED if self.steps.keeps else 3 if self.moves else 1),
            families=self.families() if settings.thorough and here else (),
            overwrites=self.overwrites,
            follow=settings.thorough and workload.mode == "train",
            in_turns=self.session.in_turns,
        )

    def plan_at_odd_sizes(self) -> Plan:
        """What is checked at sizes that the stack was not built for."""
        return Plan(
            seeds=self.plan().seeds[:1],
            families=self.families(),
            overwrites=self.overwrites,
            power=False,
            in_turns=self.session.in_turns,
        )

    def families(self) -> list[str]:
        """Those that mean something to the workload, without those that overflow whatever computes them."""
        half = "float16" in (self.promise.dtype, self.session.experiment.dtype)
        overflows = FORWARD_ONLY if half or self.session.workload.mode != "forward" else ()
        return [family for family in self.session.workload.families if family not in overflows]

    # --- who takes part -----------------------------------------------------------------------------------------

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
        return spec if workload is None else replace(spec, workload=workload, dropout=not self.steps.random)
