"""Yardsticks of one set of inputs: the errors that honest computation makes there, by step and by quantity.

A set's yardsticks are created when its batches are drawn, and thrown away with them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from optexp.equivalence import mutants
from optexp.equivalence.attributes import Attributes
from optexp.equivalence.doubtful_elements import Doubtful, most_elements
from optexp.equivalence.gates import Yardstick
from optexp.equivalence.observation import Observation
from optexp.equivalence.quantities import Quantity
from optexp.support.tolerances import SMALL


@dataclass(frozen=True)
class BaselineRun:
    """A plain run of the baseline: no noise, the program's own order of sums."""

    step: int = -1
    observation: Observation = field(default_factory=dict)

    def to(self, device: torch.device) -> BaselineRun:
        """The same run, its tensors on `device`."""
        return BaselineRun(self.step, moved(self.observation, device))


@dataclass(frozen=True)
class Allowance:
    """An error that any candidate may have, whatever the yardstick.

    scale: s of the quantity that it was found for
    """

    yardstick: Yardstick = field(default_factory=Yardstick)
    scale: float = 0.0

    def at(self, scale: float) -> Yardstick:
        """The allowed error of a quantity with the size `scale`; it grows with the size, and does not shrink."""
        larger = scale / self.scale if self.scale and scale > self.scale else 1.0
        found = self.yardstick
        blocks = None if found.blocks is None else larger * found.blocks
        return Yardstick(larger * found.rms, larger * found.peak, blocks)


@dataclass
class StepYardsticks:
    """Yardsticks of one step.

    plain:        by quantity, errors of the baseline's plain runs
    allowed:      by quantity, errors that rounded hyperparameters or near ties cause
    has_rounded:  the errors of rounded hyperparameters are known
    integers:     by output, integers of the first plain run
    moved_integers: by output, integers of runs with noise or in another order
    reordered_integers: of runs that selected equal elements in another order
    python_state: by name, Python state that a user's step left in its first run, and whether that run was perturbed
    """

    plain: dict[str, Yardstick] = field(default_factory=dict)
    allowed: dict[str, Allowance] = field(default_factory=dict)
    has_rounded: bool = False
    integers: dict[str, Tensor] = field(default_factory=dict)
    moved_integers: dict[str, list[Tensor]] = field(default_factory=dict)
    reordered_integers: dict[str, list[Tensor]] = field(default_factory=dict)
    python_state: dict[str, tuple[bytes, bool]] = field(default_factory=dict)

    def move(self, name: str, integers: Tensor, ties: bool) -> None:
        """Add an output's integers of a run with noise or in another order.

        ties: equal elements were selected in another order
        """
        known = self.reordered_integers if ties else self.moved_integers
        known.setdefault(name, []).append(integers.clone())

    def left_open(self, name: str, baseline: Tensor) -> Tensor:
        """Elements of an output that the order of equal elements decides, which torch leaves open."""
        found = torch.zeros_like(baseline, dtype=torch.bool)
        for run in self.reordered_integers.get(name, ()):
            if run.shape == found.shape:
                found |= run.to(baseline.device) != baseline
        return found

    def allow(self, quantity: Quantity) -> None:
        """Allow any candidate the error of `quantity`, in each block too."""
        known = self.allowed.get(quantity.name, Allowance())
        self.allowed[quantity.name] = Allowance(known.yardstick | Yardstick.of(quantity.found), quantity.scale)

    def allow_share(self, quantity: Quantity, rms: float, peak: float) -> None:
        """Allow any candidate an error of some share of the size of `quantity`, and of its largest element."""
        known, scale = self.allowed.get(quantity.name, Allowance()), quantity.scale
        self.allowed[quantity.name] = Allowance(known.yardstick | Yardstick(rms * scale, peak * scale), scale)


@dataclass
class SetYardsticks:
    """Yardsticks of one set of inputs.

    last:         the baseline's last plain run
    earlier:      outputs and gradients of the plain run of the step before, the leading rows of large ones
    steps:        yardsticks of each step
    noise:        by quantity, errors of noisy runs of all steps;  reassociated: the same in other orders
    doubtful:     by change that no known optimizer makes, elements that are rounding in runs of any step
    usual_change: the largest such change of any element in fp64
    noisy_runs:   number of noisy runs
    spread:       by tensor, the largest RMS by which order or noise moves the baseline
    skipped:      steps that the baseline's GradScaler left out
    state_spread: by name, distances between runs in the Python state of a user's step
    attributes:   the same for attributes of modules
    """

    last: BaselineRun = field(default_factory=BaselineRun)
    earlier: Observation = field(default_factory=dict)
    steps: dict[int, StepYardsticks] = field(default_factory=lambda: defaultdict(StepYardsticks))
    noise: dict[str, Yardstick] = field(default_factory=dict)
    reassociated: dict[str, Yardstick] = field(default_factory=dict)
    doubtful: dict[str, Doubtful] = field(default_factory=dict)
    usual_change: float = 0.0
    noisy_runs: int = 0
    spread: dict[str, float] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    state_spread: dict[str, list[float]] = field(default_factory=dict)
    attributes: Attributes = field(default_factory=Attributes)

    @property
    def current(self) -> StepYardsticks:
        """Yardsticks of the last plain run's step."""
        return self.steps[self.last.step]

    def follow(self, step: int, observation: Observation) -> None:
        """Take a plain run of `step` as the last one."""
        if step != self.last.step:  # cloned, so that they do not keep all that arrived with them
            results = ((n, t) for n, t in self.last.observation.items() if n.startswith(("out/", "grad/")))
            self.earlier = {name: mutants.leading(tensor).clone() for name, tensor in results} or self.earlier
        self.last = BaselineRun(step, observation)

    def to(self, device: torch.device) -> None:
        """Move the observations of runs to `device`."""
        self.last, self.earlier = self.last.to(device), moved(self.earlier, device)

    def plain(self, quantity: Quantity) -> Yardstick:
        """Error of the baseline's plain runs of the current step."""
        return self.current.plain.get(quantity.name, Yardstick())

    def doubt(self, quantity: Quantity) -> None:
        """Note what a run of the baseline shows of a change that no known optimizer makes."""
        if quantity.reference.numel():
            self.usual_change = max(self.usual_change, float(quantity.reference.abs().max()))
        found, known = Doubtful.of(quantity), self.doubtful.get(quantity.name)
        self.doubtful[quantity.name] = found if known is None else known | found

    def spared(self, quantity: Quantity) -> Iterator[Quantity]:
        """The quantity without errors in doubtful elements that rounding explains; most of such a change by itself."""
        if (found := self.doubtful.get(quantity.name)) is None:
            yield quantity
            return
        yield (spared := found.spared(quantity, self.usual_change))
        yield from most_elements(spared)

    def of(self, quantity: Quantity, always_spread: bool = False) -> Yardstick:
        """E: the largest error of plain and reassociated runs; where these say little, of noisy runs, too.

        always_spread: noisy runs count for every quantity
        """
        name, found = quantity.name, self.plain(quantity)
        found |= self.current.allowed.get(name, Allowance()).at(quantity.scale)
        found |= self.reassociated.get(name, found)
        few = quantity.reference.numel() < SMALL or always_spread
        return found | self.noise.get(name, found) if few or quantity.limits.gradient else found


def moved(observation: Mapping[str, Tensor], device: torch.device) -> Observation:
    """The observation's tensors on `device`."""
    return {name: tensor.detach().to(device) for name, tensor in observation.items()}
