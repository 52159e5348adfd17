"""One set of inputs in fp64: its batches, fp64's results on them, and what optimizer steps need besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from optexp.equivalence.checksums import LARGE
from optexp.equivalence.input_families import NORMAL
from optexp.equivalence.observation import Observation
from optexp.program import Batch, Packed


@dataclass
class DrawnSet:
    """One set of inputs, and fp64's results on it.

    batches: in the arms' dtype where real
    results: of each step from the initial state, which all arms share
    memory:  Python state of the baseline's user step before the step to come;  kept: the same of its model
    zeros, terms: see `Fp64Reference.zeros` and `Fp64Reference.all_terms`; None before they are asked for
    """

    batches: list[Batch] = field(default_factory=list)
    family: str = NORMAL
    results: dict[int, Observation] = field(default_factory=dict)
    memory: Packed = field(default_factory=dict)
    kept: Packed = field(default_factory=dict)
    zeros: dict[str, float] | None = None
    terms: dict[str, float] | None = None

    def forget_large(self) -> None:
        """Give back large results: one step's at a time is all that fits."""
        if any(tensor.nbytes > LARGE for golden in self.results.values() for tensor in golden.values()):
            self.results.clear()


@dataclass(frozen=True)
class UpdateInputs:
    """Inputs of optimizer steps that an observation does not hold, by step.

    called: hyperparameters of every group when the optimizer of a user's step was called
    left:   learning rates after the step
    sparse: sparse gradients by name: an optimizer may change only the rows that they have
    """

    called: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    left: dict[int, list[float]] = field(default_factory=dict)
    sparse: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def copy(self) -> UpdateInputs:
        """A copy whose steps can be replaced."""
        return UpdateInputs(dict(self.called), dict(self.left), dict(self.sparse))
