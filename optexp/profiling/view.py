"""One profiled program: its trace, its breakdown, its accounts, and the places of their work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from optexp.profiling.accounts import Account, accounts
from optexp.profiling.breakdown import Breakdown, fitted
from optexp.profiling.places import Places
from optexp.profiling.predicting import Parts
from optexp.profiling.work_list import Piece, pieces
from optexp.records.profile import Calibration
from optexp.trace import Trace


@dataclass(frozen=True)
class View:
    """A profiled program.

    marked: a trace of one step with the places of its work; None where there is none
    beside: a trace of the same work launched kernel by kernel; None where there is none
    """

    trace: Trace
    breakdown: Breakdown
    marked: Trace | None = None
    beside: Trace | None = None

    def timed(self, step_us: float) -> View:
        """The view scaled to the timed step, in µs."""
        return replace(self, breakdown=fitted(self.breakdown, step_us))

    @cached_property
    def accounts(self) -> dict[str, Account]:
        return accounts(self.trace, self.breakdown, self.beside)

    @cached_property
    def pieces(self) -> list[Piece]:
        """Kernels of all steps, grouped by the operator that launched them."""
        return pieces(self.trace, self.beside)

    def parts(self, ceilings: Calibration | None) -> Parts:
        """The parts of a step that strategies can shorten."""
        return Parts(self.trace, self.breakdown, self.pieces, ceilings)

    def account(self, name: str) -> Account:
        """An account; an empty one where the step has none of that name."""
        return self.accounts.get(name, Account())

    def places(self, name: str) -> list[str]:
        """Modules and lines of an account's work; empty where unknown."""
        return self._places.of(name) if self._places else []

    @cached_property
    def _places(self) -> Places | None:
        return Places(self.marked) if self.marked is not None else None
