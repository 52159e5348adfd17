"""Properties of the baseline that its runs show, on whatever inputs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class BaselineTraits:
    """Observed properties of the baseline's program; they hold for every set of inputs that follows.

    unrepeated_integers: outputs of integers that differ between runs of the same step
    unrepeated_state:    Python state of a user's step that differs between runs of the same step
    nonfinite:           results with NaN or Inf on normal inputs
    writes_inputs:       a step writes to its own batch
    finer:               modules compute in a dtype that is finer than the arms'
    coarsest:            largest machine epsilon of an arithmetic that a step uses, as TF32's
    """

    unrepeated_integers: set[str] = field(default_factory=set)
    unrepeated_state: set[str] = field(default_factory=set)
    nonfinite: set[str] = field(default_factory=set)
    writes_inputs: bool = False
    finer: bool = False
    coarsest: float = 0.0
