"""Settings of a comparison with a recorded one: the `regression` node in conf/config.yaml."""

from __future__ import annotations

from dataclasses import dataclass

from optexp.schema import choice


@dataclass
class RegressionSettings:
    """The record that a new result is compared with, and the reaction to a regression.

    against:   id of an MLflow run, name of an experiment, or a tag as name or name:value; null: nothing
    threshold: smallest change that raises an alarm: 0.1 is 10 %
    figure:    time: the candidate's time per step; speedup: its ratio to the baseline of the same run
    on_alert:  shell command, run after an alarm with OPTEXP_ALERT_* in its environment
    """

    against: str | None = None
    threshold: float = 0.1
    figure: str = choice("time", "speedup")
    on_alert: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 10:
            raise ValueError(f"threshold={self.threshold} must lie between 0 and 10, as in 0.1 for 10 %")
        if self.on_alert and not self.against:
            raise ValueError("on_alert needs against: name a run, an experiment or a tag")
