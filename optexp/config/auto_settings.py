"""Settings of a search: the `auto` node in conf/config.yaml."""

from dataclasses import dataclass, field

from optexp.schema import choice
from optexp.support.units import byte_count, seconds


@dataclass
class AutoSettings:
    """The objective of mode=auto, and its time limit.

    objective:    what is to become less: time of a step, peak memory, or energy of a step
    budget:       for all of it, the winner's last measurement included: 90s, 10m, 1.5h, or a number of seconds
    trials:       no more trials than this; null: as the budget allows
    min_gain:     a smaller predicted gain is not tried: 0.02 is 2 %
    memory_limit: peak memory that the stack may take: 8GiB, 512MiB; null: any
    max_slowdown: of a step, against the baseline, that less memory or less energy may cost
    among:        names of the strategies to try; null: all
    without:      names of strategies not to try
    """

    objective: str = choice("time", "memory", "energy")
    budget: str = "10m"
    trials: int | None = None
    min_gain: float = 0.02
    memory_limit: str | None = None
    max_slowdown: float = 1.1
    among: list[str] | None = None
    without: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.budget_s <= 0:
            raise ValueError(f"budget={self.budget} must be more than nothing, as in 10m")
        if self.trials is not None and self.trials < 1:
            raise ValueError(f"trials={self.trials} must be at least 1")
        if not 0 < self.min_gain < 1:
            raise ValueError(f"min_gain={self.min_gain} must lie between 0 and 1, as in 0.02")
        if self.max_slowdown < 1:
            raise ValueError(f"max_slowdown={self.max_slowdown} must be at least 1, as in 1.1")
        if self.memory_limit is not None and self.memory_limit_bytes == 0:
            raise ValueError(f"memory_limit={self.memory_limit} must be more than nothing, as in 8GiB")

    @property
    def budget_s(self) -> float:
        return seconds(self.budget, "budget")

    @property
    def memory_limit_bytes(self) -> float | None:
        return None if self.memory_limit is None else byte_count(self.memory_limit, "memory_limit")

    def allows(self, strategy: str) -> bool:
        """Whether the search may try a strategy of this name."""
        return (self.among is None or strategy in self.among) and strategy not in self.without
