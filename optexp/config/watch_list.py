"""The list of `python -m optexp.watch`: comparisons that are run again and again."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import yaml

from optexp.errors import ConfigError
from optexp.schema import typed

EXAMPLE = "comparisons: [workload=mlp strategy=fusion]"


@dataclass
class WatchList:
    """The comparisons to watch.

    comparisons: as they are typed after `python -m optexp`
    experiment:  name in MLflow that holds the history
    plot:        picture of the history, relative to the working folder
    on_alert:    shell command, run for each new step to a slower level, with OPTEXP_ALERT_* in its environment
    """

    comparisons: list[str] = field(default_factory=list)
    experiment: str = "watch"
    plot: str = "history.png"
    on_alert: str | None = None

    def __post_init__(self) -> None:
        if not self.comparisons:
            raise ValueError(f"there are no comparisons: write {EXAMPLE}")

    @classmethod
    def read(cls, path: Path) -> WatchList:
        """The list in a YAML file.

        Raises:
            ConfigError: the file cannot be read, or a key or value is not allowed.
        """
        try:
            values = yaml.safe_load(path.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path} has no keys: write {EXAMPLE}")
        return typed(cls, values, path.name)
