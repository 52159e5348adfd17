"""One set of inputs in fp64: its batches, and what was computed on them; each object lives as long as the set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from optexp.equivalence.checksums import LARGE
from optexp.equivalence.input_families import NORMAL
from optexp.equivalence.observation import Observation
from optexp.program import Batch, Packed, tensors_of
from optexp.support import sparse


@dataclass(frozen=True)
class DrawnSet:
    """One set of inputs.

    batches: in the arms' dtype where real
    smaller: the last one is as small as the last one of an epoch
    """

    batches: list[Batch] = field(default_factory=list)
    family: str = NORMAL
    smaller: bool = False

    def larger_than(self, nbytes: int) -> bool:
        """Whether a batch has a tensor of more than `nbytes` bytes."""
        return any(sparse.nbytes(tensor) > nbytes for batch in self.batches for tensor in tensors_of(batch).values())


@dataclass(frozen=True)
class PythonState:
    """Python state that the baseline's step began with, packed: only entries that differ from the first ones.

    step:  of a user's own step
    model: of the model
    """

    step: Packed = field(default_factory=dict)
    model: Packed = field(default_factory=dict)


@dataclass(frozen=True)
class UpdateInputs:
    """Inputs of optimizer steps that an observation does not hold, by step.

    called: hyperparameters of every group when the optimizer of a user's step was called
    left:   learning rates after the step
    sparse: sparse gradients by name: an optimizer may change only the rows that they have
    earlier, others: changes of parameters before an update, and beside it (see `optexp.equivalence.other_changes`)
    """

    called: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    left: dict[int, list[float]] = field(default_factory=dict)
    sparse: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    earlier: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    others: dict[int, dict[str, Tensor]] = field(default_factory=dict)


@dataclass
class Fp64Results:
    """Results of one set of inputs, on one device, from one initial state.

    golden:        of each step from the initial state, which all arms share
    begins_with:   Python state that the last of these steps began with
    update_inputs: of the last run of each step
    zeros, terms:  see `optexp.equivalence.gradient_terms`; terms are None before the first use
    looked_at:     gradients of which it is known whether they are zero
    smooth:        see `optexp.equivalence.fp64_variants.is_smooth`; None before the first use
    """

    golden: dict[int, Observation] = field(default_factory=dict)
    begins_with: PythonState = field(default_factory=PythonState)
    update_inputs: UpdateInputs = field(default_factory=UpdateInputs)
    zeros: dict[str, float] = field(default_factory=dict)
    looked_at: set[str] = field(default_factory=set)
    terms: Mapping[str, float] | None = None
    smooth: bool | None = None

    def forget_large(self) -> None:
        """Give back large results: one step's at a time is all that fits."""
        if any(sparse.nbytes(tensor) > LARGE for golden in self.golden.values() for tensor in golden.values()):
            self.golden.clear()
