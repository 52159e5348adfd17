"""Predictions as data: the most that a strategy can gain on a profiled program, and what a measurement said."""

from __future__ import annotations

from dataclasses import dataclass

ABOVE = 1.05  # times a bound: a measurement beyond it shows an error


@dataclass(frozen=True)
class Prediction:
    """The most that a strategy can gain.

    strategy: as typed: "strategy=fusion strategy.fusion.mode=max-autotune"
    bound_us: the shortest step that it can give
    step_us:  of the profiled program
    text:     the assumption in words
    """

    strategy: str
    bound_us: float
    step_us: float
    text: str

    @property
    def speedup(self) -> float:
        """At most."""
        return self.step_us / self.bound_us
