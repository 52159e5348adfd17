"""One set of inputs under verification: its reference, its yardsticks, and the candidate's last run on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from optexp.equivalence.arithmetic import Arithmetic
from optexp.equivalence.baseline_traits import BaselineTraits
from optexp.equivalence.fp64_reference import Fp64Reference
from optexp.equivalence.gates import Yardstick
from optexp.equivalence.input_families import FAMILIES
from optexp.equivalence.observation import Observation
from optexp.equivalence.optimizer_counterparts import OptimizerCounterparts
from optexp.equivalence.quantities import Quantity, is_noise
from optexp.equivalence.step_counterparts import StepCounterparts
from optexp.equivalence.yardsticks import SetYardsticks


@dataclass(frozen=True)
class InputSet:
    """Everything that the gates need on one set of inputs.

    fp64:       the reference, which holds the set's batches
    arithmetic: of the contract
    traits:     of the baseline, from this set and those before
    yardsticks: of this set
    candidate:  the candidate's observation that the gates saw last; empty before the first
    optimizer_names, step_names: what the candidate calls the baseline's state
    """

    fp64: Fp64Reference
    arithmetic: Arithmetic
    traits: BaselineTraits
    yardsticks: SetYardsticks = field(default_factory=SetYardsticks)
    candidate: Observation = field(default_factory=dict)
    optimizer_names: OptimizerCounterparts = field(default_factory=OptimizerCounterparts)
    step_names: StepCounterparts = field(default_factory=StepCounterparts)

    @property
    def step(self) -> int:
        """Index of the step whose yardsticks are complete; −1 for none."""
        return self.yardsticks.last.step

    @property
    def baseline(self) -> Observation:
        """The baseline's last plain run."""
        return self.yardsticks.last.observation

    @property
    def is_family(self) -> bool:
        """Whether the inputs are of a special family, and not as the workload declares them."""
        return self.fp64.family in FAMILIES

    def golden(self, step: int, seen: Observation) -> Observation:
        """Results of an fp64 step from the state that an arm started from."""
        return self.fp64.step(step, self.fp64.start_of(step, seen))

    def plain(self, quantity: Quantity) -> Yardstick:
        """Error of the baseline's plain runs."""
        return self.yardsticks.plain(quantity)

    def is_noise(self, quantity: Quantity) -> bool:
        """Whether the baseline's error is too large to judge this part of a tensor.

        The baseline may be exact by luck in an element whose sum cancels. So the error of tiny elements includes runs
        with other orders of sums.
        """
        error = self.yardstick(quantity) if quantity.limits.gross else self.plain(quantity)
        return is_noise(quantity, error.rms)

    def yardstick(self, quantity: Quantity) -> Yardstick:
        """E of the gates."""
        return self.yardsticks.of(quantity, always_spread=self.arithmetic.as_exact_as_fp64)
