"""The difference between two steps as data, as a record holds it. Needs no torch to be read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Cause:
    """One cause of a difference.

    account: the kind of work whose time changed ("attention", "synchronisation")
    us:      by which the step changed; positive is slower
    words:   the cause in a sentence
    """

    account: str
    words: str
    us: float | None = None


@dataclass(frozen=True)
class Change:
    """Kernels of one operator, or on a CPU the operator, in both arms; matched by module and shapes. Per step.

    kernels_before, kernels_after: names of its kernels, empty on a CPU
    """

    name: str
    shapes: str = ""
    module: str = ""
    calls_before: float = 0.0
    calls_after: float = 0.0
    kernels_before: str = ""
    kernels_after: str = ""
    us_before: float | None = None
    us_after: float | None = None

    @property
    def us(self) -> float:
        """Change of its time, in µs."""
        return (self.us_after or 0.0) - (self.us_before or 0.0)


@dataclass(frozen=True)
class Difference:
    """Why the candidate's step takes another time than the baseline's.

    us:             by which the step changed, as it was timed; positive is slower
    traced_us:      the same of the traced steps, which the causes add up to
    unexplained_us: the timed change without that of named causes
    causes:         those that explain most first
    changes:        work that is gone, new or takes another time, the largest change first
    """

    us: float | None = None
    traced_us: float | None = None
    unexplained_us: float | None = None
    causes: list[Cause] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    @property
    def explained(self) -> float | None:
        """Share of the timed difference that named causes add up to; None without a difference."""
        if not self.us or self.unexplained_us is None:
            return None
        return 1 - abs(self.unexplained_us) / abs(self.us)

    def timed(self, us: float) -> Difference:
        """The same beside a timed change of the step, in µs."""
        traced = self.traced_us or 0.0
        return replace(self, us=us, unexplained_us=(self.unexplained_us or 0.0) + us - traced)

    def untimed(self) -> Difference:
        """The same without times, which causes have in their words, too."""
        return Difference(
            causes=[replace(cause, words=cause.account, us=None) for cause in self.causes],
            changes=[replace(change, us_before=None, us_after=None) for change in self.changes],
        )
