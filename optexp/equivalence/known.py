"""Knowledge of one set of inputs: results of the runs on it, and yardsticks. A new set begins with none."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from optexp.equivalence.attributes import Attributes
from optexp.equivalence.gates import Yardstick
from optexp.equivalence.observation import Observation

Yardsticks = dict[tuple[int | None, str], Yardstick]  # by step (None: of all steps together) and quantity


@dataclass
class Known:
    """Results of arms on one set of inputs.

    step:         index of the step whose yardsticks are known; -1 for none
    baseline:     observation of the baseline's last plain run of that step
    candidate:    observation that was judged last
    measured:     yardsticks of plain runs;  noise: of noisy runs;  reassociated: of runs in other orders
    allowed:      errors that rounded hyperparameters cause, with the size that they are relative to
    spread:       RMS by which orders and noise move the baseline, by tensor
    rounded:      steps whose rounded hyperparameters have been measured
    skipped:      steps that the baseline's GradScaler left out
    integers:     outputs of the baseline's first run of each step;  swayed: the same of noisy runs
    noisy_runs:   number of noisy runs of the baseline
    remembered:   Python state that a user's step keeps, of the first run of each step, and whether that was noisy
    blurred:      distances between runs in that state, by name
    attributes:   the same for attributes of modules
    """

    step: int = -1
    baseline: Observation = field(default_factory=dict)
    candidate: Observation = field(default_factory=dict)
    measured: Yardsticks = field(default_factory=dict)
    noise: Yardsticks = field(default_factory=dict)
    reassociated: Yardsticks = field(default_factory=dict)
    allowed: dict[tuple[int | None, str], tuple[Yardstick, float]] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    rounded: set[int] = field(default_factory=set)
    skipped: set[int] = field(default_factory=set)
    integers: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    swayed: dict[tuple[int, str], list[Tensor]] = field(default_factory=dict)
    noisy_runs: int = 0
    remembered: dict[tuple[int, str], tuple[bytes, bool]] = field(default_factory=dict)
    blurred: dict[str, list[float]] = field(default_factory=dict)
    attributes: Attributes = field(default_factory=Attributes)
