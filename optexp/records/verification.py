"""A verification as data: what the gates said about each tensor, and all that was found. Needs no torch to be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import msgspec

NORMAL = "normal"  # family of inputs as the workload declares them
Number = bool | int | float


@dataclass
class Element:
    """One element of a tensor, in the three arms; `baseline` is None where it was not asked for."""

    index: list[int]
    candidate: Number
    reference: Number
    baseline: Number | None = None


@dataclass(frozen=True)
class Finding:
    """The gates' outcome for one tensor of one step.

    gate:          the gate that failed; where all passed, the one nearest to its limit
    failed:        every gate that failed
    weak:          passed, with an error above the row's warning
    bitwise:       equal to the baseline's, bit for bit
    error_rms:     RMS(c−g);  baseline_rms: RMS(b−g), not below one rounding;  yardstick_rms: the E of G1
    error_ratio:   error_rms / baseline_rms;  max_ratio: the same for the worst element, against the E∞ of G2;
                   block_ratio: for the worst block, against its E of G3
    used:          the largest error as a share of its limit: above 1 has failed
    allowed:       by gate, the error and its limit
    zero:          of a gradient that is zero in exact arithmetic: s is of its terms
    scale:         s;  resolution: what the limit of G1 has beside m·E + κ·u·s (see `Limits`)
    visible:       the smallest RMS error, and the smallest of one element, that would have failed, relative to s
    element:       the worst one
    nature:        of an error that failed, what it looks like (see `optexp.equivalence.nature`)
    far_off:       rows of a result at lower precision (see `optexp.equivalence.far_off`): in the candidate, in plain
                   autocast, in all
    parted:        the baseline lies further from fp64 than rounding explains: fp64 is another program's there
    tied:          integers of which some depend, in the baseline, on the order of equal elements
    unseen:        why a wrong value could not be told from a right one; empty where it could
    seed, step, family: of the inputs
    """

    tensor: str
    gate: str = "G0"
    ok: bool = True
    failed: tuple[str, ...] = ()
    weak: bool = False
    bitwise: bool = False
    error_rms: float | None = None
    baseline_rms: float | None = None
    yardstick_rms: float | None = None
    error_ratio: float | None = None
    max_ratio: float | None = None
    block_ratio: float | None = None
    used: float = 0.0
    allowed: dict[str, tuple[float, float]] = field(default_factory=dict)
    zero: bool = False
    scale: float | None = None
    resolution: float = 0.0
    visible: tuple[float, float] | None = None
    element: Element | None = None
    nature: str = ""
    far_off: tuple[int, int, int] | None = None
    message: str = ""
    tied: bool = False
    unseen: str = ""
    parted: bool = False
    seed: int = 0
    step: int = 0
    family: str = NORMAL


def broken(tensor: str, message: str) -> Finding:
    """G0 failed: there is nothing to measure."""
    return Finding(tensor, "G0", False, ("G0",), used=inf, message=message)


@dataclass(frozen=True)
class GateResult:
    """One gate over all tensors; `worst_ratio` is the largest error over the baseline's, where the gate has one."""

    passed: bool
    worst_ratio: float | None = None


@dataclass
class MutantCount:
    """One mutant over all tensors: how many were tried and caught, and the tensors on which it passed the gates."""

    tried: int = 0
    caught: int = 0
    passed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Distribution:
    """Shares of the errors of one output, in both arms (see `optexp.equivalence.tensor_math.histogram`)."""

    baseline: list[float]
    candidate: list[float]
    tensor: str = ""


@dataclass(frozen=True)
class Trajectory:
    """The loss over `steps` training steps: the step at which it strays farthest, as a share of its limit."""

    steps: int
    step: int
    share: float


@dataclass(frozen=True)
class Scatter:
    """How elements of random results scatter, by themselves and together, over `draws` seeds of each arm.

    smallest_p: of all `tests`; 1 where none is near an alarm
    visible:    the relative difference of a variance that is missed once in ten comparisons, where all elements of the
                result that shows it best have it; None where nothing scatters
    """

    draws: int
    tests: int
    smallest_p: float
    visible: float | None = None


@dataclass(frozen=True)
class Randomness:
    """Distributions of results over `seeds` seeds of each arm.

    smallest_p:   of all `tests`
    scatter:      of elements; None in earlier records
    slopes_off:   distance of gradients from those of the loss;  slopes_limit: its limit; None where it has none
    """

    seeds: int
    tests: int
    smallest_p: float
    slopes_off: float | None = None
    slopes_limit: float | None = None
    scatter: Scatter | None = None


@dataclass(frozen=True)
class Recheck:
    """The process that was measured last, verified after its timing.

    process:      its number
    fresh_inputs: the gates passed on inputs that it had not met
    steps, ends:  of timed blocks, in steps from the restored state: the judged one, and all that were looked at
    repetitions:  of timed steps that were held against them
    missed:       probability that a fault which shows in a quarter of the steps is missed
    """

    process: int = 0
    fresh_inputs: bool = True
    steps: int = 0
    ends: list[int] = field(default_factory=list)
    repetitions: int = 0
    missed: float | None = None
    note: str = ""
    ok: bool = True


@dataclass
class Verification:
    """Everything that verification found. Ratios are the candidate's error over the baseline's, both against fp64.

    tails:        odd sizes at which it was verified too
    tensors:      by name, what stood nearest to its limit: gate, error, worst element, family, seed, step
    gates:        by name
    mutants:      by name
    sizes:        by tensor, the largest s of gates on inputs as declared
    zeros:        by gradient that is zero in exact arithmetic, and rounding alone in both arms, the size of its terms
    visible:      by tensor, the smallest RMS error and the smallest of one element that would have failed, over s
    dead:         inputs that the result does not depend on
    constant:     inputs that held the same values in every draw
    far_off:      at lower precision, by result: rows off by far more than rounding in the candidate, in plain autocast,
                  and all rows (see `optexp.equivalence.far_off`)
    unchecked_bits: tensors that were promised to have equal bits, and have others in every run of the baseline
    unseen:       by tensor, why a wrong value could not be told from a right one
    unkept:       what the model keeps in Python and no arm can put back, where that may be why
    parts_in:     where the baseline and fp64 part, if rounding does not explain it
    unread:       results, or parts of one, that hold nothing that can be compared
    varied:       which parameters had other values than they begin with (see `equivalence.perturbation`)
    distribution: errors of the worst output, in both arms
    trajectory:   of the loss over many training steps; None where none were followed
    randomness:   None where steps draw no random numbers
    recheck:      of the last step of a timed block, and of fresh inputs after timing
    state:        global settings that the candidate changed without saying so
    seconds:      where its time went (see `optexp.verification.timed_arm`)
    """

    contract: str
    ok: bool = True
    weakest: Finding | None = None  # the largest error above "warn", where there is one
    bitwise: bool = True
    repeats: bool = True
    seeds: list[int] = field(default_factory=list)
    reference: str = ""
    families: list[str] = field(default_factory=list)
    tails: list[str] = field(default_factory=list)
    gates: dict[str, GateResult] = field(default_factory=dict)
    worst: Finding | None = None
    failures: list[Finding] = field(default_factory=list)
    tensors: dict[str, Finding] = field(default_factory=dict)
    mutants: dict[str, MutantCount] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)
    zeros: dict[str, float] = field(default_factory=dict)
    visible: dict[str, tuple[float, float]] = field(default_factory=dict)
    dead: list[str] = field(default_factory=list)
    constant: list[str] = field(default_factory=list)
    far_off: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    unchecked_bits: list[str] = field(default_factory=list)
    unseen: dict[str, str] = field(default_factory=dict)
    unkept: str = ""
    parts_in: str = ""
    unread: list[str] = field(default_factory=list)
    varied: str = ""
    distribution: Distribution | None = None
    trajectory: Trajectory | None = None
    randomness: Randomness | None = None
    recheck: Recheck | None = None
    state: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    error_ratio: float | None = None
    max_ratio: float | None = None
    headline: str = ""

    @property
    def weakness(self) -> str | None:
        """The tensor that passes with clearly more error than the yardstick's; shown beside any speedup."""
        if self.weakest is None or self.weakest.error_ratio is None:
            return None
        return f"{self.weakest.tensor} has {self.weakest.error_ratio:.2f}× its error"

    @property
    def undecided(self) -> str:
        """Why the results are neither right nor wrong; empty where they are."""
        if not (self.ok and self.unseen):
            return ""
        tensor, why = next(iter(self.unseen.items()))
        others = f" (and of {len(self.unseen) - 1} more)" if len(self.unseen) > 1 else ""
        because = "".join(f"; {text}" for text in (self.parts_in, self.unkept) if text)
        return f"a wrong {tensor} could not be told from a right one{others}: {why}{because}"

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Verification:
        """From a record, also from one of schema 1, which has {} for None and null for numbers that are not finite."""
        values = {name: None if value == {} and name in _OPTIONAL else value for name, value in record.items()}
        for name in ("weakest", "worst"):
            row = values.get(name)
            values[name] = _measured(row) if row else None
        values["gates"] = {_gate(name): outcome for name, outcome in (values.get("gates") or {}).items()}
        values["failures"] = [_measured(row) for row in values.get("failures") or ()]
        values["tensors"] = {name: _measured(row) for name, row in (values.get("tensors") or {}).items()}
        if recheck := values.get("recheck"):
            values["recheck"] = {name.replace(" ", "_"): value for name, value in recheck.items()}
        values["visible"] = {name: pair for name, pair in (values.get("visible") or {}).items() if None not in pair}
        if (path := values.get("trajectory")) and path["share"] is None:
            values["trajectory"] = path | {"share": inf}
        return msgspec.convert(values, cls)


RENAMED_GATES = {"DICE": "RANDOMNESS"}  # names of earlier records
_OPTIONAL = ("weakest", "worst", "distribution", "trajectory", "randomness", "recheck")


def _gate(name: str) -> str:
    """Today's name of a gate."""
    return RENAMED_GATES.get(name, name)


def _measured(row: Mapping[str, Any]) -> dict[str, Any]:
    """A finding's record with its infinite numbers."""
    allowed = {gate: [inf if n is None else n for n in pair] for gate, pair in (row.get("allowed") or {}).items()}
    used = inf if row.get("used") is None else row["used"]
    visible, element = row.get("visible"), row.get("element")
    gates = {"gate": _gate(row.get("gate", "G0")), "failed": [*map(_gate, row.get("failed") or ())]}
    known = {
        **row,
        **gates,
        "allowed": allowed,
        "used": used,
        "visible": None if visible and None in visible else visible,
    }
    if element is not None:
        known["element"] = {
            name: inf if value is None and name != "baseline" else value for name, value in element.items()
        }
    return known
