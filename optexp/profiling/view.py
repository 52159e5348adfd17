"""One profiled program: its trace, its breakdown, its accounts, and where their work happens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from optexp.profiling.accounts import Account, accounts
from optexp.profiling.breakdown import Breakdown
from optexp.profiling.places import Places
from optexp.profiling.predicting import Parts
from optexp.profiling.work_list import Piece, pieces
from optexp.records.profile import Calibration
from optexp.trace import Trace


@dataclass(frozen=True)
class View:
    """A profiled program.

    marked: a trace of one step with places, where there is one
    beside: the trace of the same work launched kernel by kernel
    """

    trace: Trace
    breakdown: Breakdown
    marked: Trace | None = None
    beside: Trace | None = None

    @cached_property
    def accounts(self) -> dict[str, Account]:
        return accounts(self.trace, self.breakdown, self.beside)

    @cached_property
    def pieces(self) -> list[Piece]:
        """Kernels of all steps, grouped by the operator that launched them."""
        return pieces(self.trace, self.beside)

    def parts(self, ceilings: Calibration | None) -> Parts:
        """What strategies can shorten."""
        return Parts(self.trace, self.breakdown, self.pieces, ceilings)

    def account(self, name: str) -> Account:
        """An account; an empty one where the step has none of that name."""
        return self.accounts.get(name, Account())

    def places(self, name: str) -> list[str]:
        """Modules and lines of an account's work, as far as they are known."""
        return self._places.of(name) if self._places else []

    @cached_property
    def _places(self) -> Places | None:
        return Places(self.marked) if self.marked is not None else None
