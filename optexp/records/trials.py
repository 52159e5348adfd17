"""Jobs that make several comparisons: each in a few figures, and what follows from all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from optexp.records.verdict import Verdict
from optexp.support.units import ratio


@dataclass(frozen=True)
class Gain:
    """A ratio of step times, the former's over the latter's, with its interval; `high` is None without an end."""

    estimate: float
    low: float
    high: float | None


@dataclass(frozen=True)
class Figures:
    """One arm of a trial."""

    step_us: float | None = None
    peak_mib: float | None = None
    energy_j: float | None = None
    setup_s: float | None = None


@dataclass(frozen=True)
class Trial:
    """One comparison; its record is in `folder`.

    stack, against: labels of the candidate and of what it was compared with; empty: the plain program
    reason:         of a verdict without a speedup
    gain:           None where none was measured
    looked:         speedup that a first look showed, where that ended the comparison
    preset:         of the measurement
    folder:         relative to the job's; empty where no process was started
    change:         label of what a search changed
    predicted:      largest speedup that the profile predicts; None without a bound
    why:            the prediction or the diagnosis that led to the trial
    outcome:        what followed from it
    kept:           whether the search went on from this stack
    """

    number: int
    stack: list[str]
    against: list[str]
    verdict: Verdict
    reason: str = ""
    gain: Gain | None = None
    candidate: Figures = field(default_factory=Figures)
    baseline: Figures = field(default_factory=Figures)
    p_value: float | None = None
    preset: str = ""
    folder: str = ""
    seconds: float = 0.0
    change: str = ""
    predicted: float | None = None
    why: str = ""
    outcome: str = ""
    kept: bool = False
    looked: float | None = None

    @property
    def label(self) -> str:
        """The candidate's stack as it is written."""
        return "+".join(self.stack) or "baseline"


def not_verified(looked: float) -> str:
    """The reason of a stack that a first look showed to be slower.

    looked: the speedup that it showed
    """
    return f"{ratio(looked)} in a first look at its time, and therefore not verified"


# --- mode=ablate -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contribution:
    """Speedup of one member of a stack.

    beside:  labels of the members that it was added to, or taken out of
    gain:    None where it is not known
    reason:  why it is not known
    """

    member: str
    beside: list[str]
    gain: Gain | None
    reason: str = ""


@dataclass(frozen=True)
class Ablation:
    """Speedup of each member of a stack, counted in three ways.

    cumulative:    members are added one after the other, in the order of their stages
    leave_one_out: of the whole stack, beside the stack without the member
    shapley:       mean over all orders of adding the members; multiplied, they are the stack's speedup
    no_shapley:    why there are none
    interactions:  in words
    """

    members: list[str]
    cumulative: list[Contribution]
    leave_one_out: list[Contribution]
    shapley: list[Contribution]
    no_shapley: str = ""
    interactions: list[str] = field(default_factory=list)


# --- mode=auto ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Untried:
    """A change that the search left out, and why."""

    change: str
    reason: str
    predicted: float | None = None


@dataclass(frozen=True)
class Look:
    """A few timed steps of a stack that was not verified.

    change:  labels of what was added to the stack that was kept so far
    speedup: over that stack; None where there is none, for a `reason`
    """

    change: str
    speedup: float | None
    reason: str = ""


@dataclass(frozen=True)
class Search:
    """The outcome of a search.

    objective:   time, memory or energy
    constraints: in words
    stack:       labels of the winner; empty where nothing was kept
    decision:    one sentence
    ended:       why the search ended
    seconds:     of the search, without the last measurement
    not_anew:    what the winner gained in its trial, and why it was not measured anew; empty where it was
    yaml:        file with the winner's stack; empty where there is none
    looks:       first looks, by which trials were ordered
    """

    objective: str
    constraints: list[str]
    stack: list[str]
    decision: str
    ended: str
    seconds: float
    untried: list[Untried] = field(default_factory=list)
    not_anew: str = ""
    yaml: str = ""
    looks: list[Look] = field(default_factory=list)

    @property
    def compared(self) -> bool:
        """Whether the winner was compared with the baseline at last."""
        return bool(self.stack) and not self.not_anew


def kept(trials: Sequence[Trial]) -> list[Trial]:
    """Steps of a search, in their order."""
    return [trial for trial in trials if trial.kept]
