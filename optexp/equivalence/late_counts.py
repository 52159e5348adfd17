"""Training with its counts as they are late: a rate set by hand that falls, a correction that ends, an average that
every thousandth step takes. So many steps take too long, so counts are moved on to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optexp.program import Program, Remembered
from optexp.program.counters import move_on, numbers

LATE = (3600, 5_760_000)  # most periods that people write divide one of them, and rates have begun to fall, or are low
SEEN = 3  # steps before counts move on: three values tell a count
JUDGED = (SEEN + 1, SEEN + 2)  # steps from the first one on, as a step may count before its work or after it


@dataclass(frozen=True)
class Paces:
    """How far a step moves counts.

    step:      those that a user's step keeps
    optimizer: those of its optimizer
    own:       the optimizer's class is not torch's
    others:    schedules or the like beside counts, which stay where they are
    """

    step: list[int]
    optimizer: list[int]
    own: bool
    others: bool

    @property
    def matter(self) -> bool:
        """Whether code that is not torch's reads counts."""
        return bool(self.step) or (self.own and bool(self.optimizer))

    def fit(self, other: Paces) -> bool:
        """Whether counts of the other arm are also this one's, so that both can be moved on alike."""
        alike = self.optimizer == other.optimizer and self.others == other.others
        return alike and set(other.step) <= set(self.step)


class Counts:
    """State of a program after each of its first steps."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.kept: list[Remembered] = []
        self.numbers: list[Mapping[str, float]] = []

    def look(self) -> None:
        """After a step."""
        state, optimizer = self.program.step_state, self.program.optimizer
        self.kept.append({} if state is None else state.read())
        self.numbers.append({} if optimizer is None else numbers(optimizer))

    def move_on(self, late: int) -> Paces:
        """So that the next step makes `late` of a count that began at 0."""
        state, optimizer, steps = self.program.step_state, self.program.optimizer, late - SEEN - 1
        step, others = (set[int](), False) if state is None else state.move_on(self.kept, steps)
        beside = set[int]() if optimizer is None else move_on(optimizer, self.numbers, steps)
        own = not type(optimizer).__module__.startswith("torch.")
        return Paces(sorted(step), sorted(beside), own, others)
