"""The figures of the kernel benchmark: device times of a call, and host times of calls from Python."""

from __future__ import annotations

from dataclasses import dataclass, field

COLUMNS = ("lower_bound", "eager", "compile", "max-autotune", "best_library", "plain", "cuda", "ours")
OTHERS = ("eager", "compile", "max-autotune", "best_library")  # alternatives that ours must not be slower than
NOISE, NOISE_US = 1.02, 0.1  # difference of two medians of one call: a factor, and µs on top
SLOWER = 1.1  # times eager: a slower call from Python is reported


def shown(column: str) -> str:
    """The name of a column as readers see it."""
    return column.replace("_", " ")


@dataclass
class Row:
    """Device times of one call in one pass: a line of the table.

    cache:  "cold": inputs have left L2; "warm": the same inputs again
    moved:  bytes that the call must read and write; None for GEMMs, which are not memory-bound
    us:     µs of a call by candidate (see `COLUMNS`); None where the candidate failed
    goal:   most time of ours, in lower bounds; None: the time of the fastest alternative
    """

    kernel: str
    shape: str
    dtype: str
    direction: str
    cache: str
    moved: int | None
    us: dict[str, float | None] = field(default_factory=dict)
    goal: float | None = None

    @property
    def ratio(self) -> float | None:
        """Ours in lower bounds; None where either time is missing."""
        ours, bound = self.us.get("ours"), self.us.get("lower_bound")
        return ours / bound if ours and bound else None

    @property
    def rate(self) -> float | None:
        """GB/s that ours reads and writes; None for GEMMs."""
        ours = self.us.get("ours")
        return self.moved / ours / 1e3 if ours and self.moved else None

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.shape} {self.dtype} {self.direction} {self.cache}"

    def missed(self) -> list[str]:
        """One sentence for each goal that ours misses."""
        ours = self.us.get("ours")
        if ours is None:
            return [f"{self.name}: ours has no figure"]
        found = []
        if self.ratio and self.goal and self.ratio > self.goal:
            found.append(f"{self.name}: {self.ratio:.3f} times the lower bound, and the goal is {self.goal}")
        timed = {name: us for name in OTHERS if (us := self.us.get(name))}
        if timed:
            best = min(timed, key=lambda name: timed[name])
            if ours > NOISE * timed[best] + NOISE_US:
                found.append(f"{self.name}: {ours / timed[best]:.2f} times {shown(best)}")
        cuda, eager = self.us.get("cuda"), self.us.get("eager")
        if cuda and eager and cuda > NOISE * eager + NOISE_US:
            found.append(f"{self.name}: the one in CUDA C++ {cuda / eager:.2f} times eager")
        return found


@dataclass(frozen=True)
class HostTimes:
    """µs of wall time of a call from Python: forward under no_grad, forward with gradients, forward and backward."""

    forward_us: float
    grad_us: float
    both_passes_us: float

    def by_kind(self) -> dict[str, float]:
        """The times by the suffix of their columns."""
        return {"": self.forward_us, " (grad)": self.grad_us, " (both passes)": self.both_passes_us}


@dataclass(frozen=True)
class HostCost:
    """Host times of one call in float32, of eager torch and of ours."""

    kernel: str
    shape: str
    eager: HostTimes
    ours: HostTimes

    def by_column(self) -> dict[str, float]:
        """µs by the name of a column."""
        both = (("eager", self.eager), ("ours", self.ours))
        return {f"{name}{kind}": us for name, times in both for kind, us in times.by_kind().items()}

    def slow(self) -> list[str]:
        """One sentence for each kind of call that takes ours longer than torch."""
        eager = self.eager.by_kind()
        return [
            f"{self.kernel} {self.shape}{kind}: {us:.1f} µs by hand, and {eager[kind]:.1f} by torch"
            for kind, us in self.ours.by_kind().items()
            if us > SLOWER * eager[kind]
        ]
