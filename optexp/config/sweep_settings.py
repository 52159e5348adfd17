"""Settings of a sweep: the `sweep` node, which is no part of a job's experiment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from optexp.schema import plain, typed


@dataclass
class SweepSettings:
    """The `sweep` node of the configuration.

    resume:   jobs that an earlier sweep has finished are taken over and not run again
    plan:     print the jobs with the time that they will take, and run nothing
    attempts: times that a job is started whose worker is killed before the job leaves a record
    left_out: what the sweep has taken out of this job's configuration, in words; it writes this itself
    """

    resume: bool = False
    plan: bool = False
    attempts: int = 2
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts={self.attempts}: a job is started at least once")

    @classmethod
    def of(cls, config: DictConfig) -> SweepSettings:
        """The settings in a composed configuration.

        Raises:
            ConfigError: a key does not exist, or a value is not allowed.
        """
        node: Any = OmegaConf.select(config, "sweep")
        return typed(cls, plain(node) if node is not None else {}, "sweep")
