"""Jobs and engines for tests: composed by a stand-in for Hydra, run without a comparison."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from optexp.sweeps.job import Job
from optexp.sweeps.launchers.engine import Engine

EXAMPLES = Path(__file__).parents[1] / "results"


def sweep_config(folder: Path, **sweep: Any) -> DictConfig:
    """The configuration of a sweep in `folder`."""
    hydra = {
        "sweep": {"dir": str(folder), "subdir": "${hydra.job.num}"},
        "job": {"id": "???", "num": "???"},
        "overrides": {"task": [], "hydra": []},
        "hydra_logging": None,
        "verbose": False,
        "runtime": {"choices": {"workload": "gelu"}},
    }
    tracking = {"enabled": False, "uri": None, "experiment": "optexp"}
    return OmegaConf.create(
        {
            "hydra": hydra,
            "tracking": tracking,
            "sweep": sweep,
            "strategy": {},
            "device": "cpu",
            "seed": 0,
            "mode": "compare",
        }
    )


def load_sweep_config(config: DictConfig, overrides: list[str]) -> DictConfig:
    """What Hydra's config loader does, for plain keys."""
    made = config.copy()
    made.hydra.overrides.task = overrides
    for override in overrides:
        key, _, value = override.partition("=")
        OmegaConf.update(made, key, value, force_add=True)
    return made


def end(job: Job, example: str = "faster") -> None:
    """Leave a record, as a worker does."""
    job.folder.mkdir(parents=True, exist_ok=True)
    job.write_config()
    shutil.copy(EXAMPLES / f"{example}.json", job.folder / "result.json")
    job.mark()


class Recorded(Engine):
    """An engine that does with each job what `behave` says, and counts how often it started it."""

    def __init__(self, config: DictConfig, behave: Callable[[Job, int], None] = lambda job, start: end(job)) -> None:
        loader: Any = SimpleNamespace(load_sweep_config=load_sweep_config)
        self.setup(hydra_context=SimpleNamespace(config_loader=loader), task_function=print, config=config)
        self.behave, self.starts = behave, Counter[int]()

    def run_all(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.starts[job.number] += 1
            self.behave(job, self.starts[job.number])
            self.ended(job)
