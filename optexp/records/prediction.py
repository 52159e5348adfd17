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

    @property
    def name(self) -> str:
        """The strategy without what is the same in all of them: "fusion mode=max-autotune"."""
        name, *options = self.strategy.removeprefix("strategy=").split()
        return " ".join([name, *(option.removeprefix(f"strategy.{name}.") for option in options)])


@dataclass(frozen=True)
class MeasuredPrediction:
    """A prediction beside a measurement of the same strategies.

    measured_us: a step with them
    ratio:       the measured speedup over the predicted one
    surely:      the same of the lower end of the measured speedup's interval
    """

    prediction: Prediction
    measured_us: float
    ratio: float
    surely: float

    @property
    def refuted(self) -> bool:
        """Whether more was measured than the bound allows: the bound's model is wrong, or the equivalence check."""
        return self.ratio > ABOVE
