"""Which jobs a sweep has: every combination of what is swept, for a study's steps one after the other."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from omegaconf import OmegaConf

from optexp.config import overrides
from optexp.config.sweep_settings import SweepSettings
from optexp.errors import ConfigError
from optexp.schema import suggest
from optexp.sweeps import launchers, search, sweep
from optexp.sweeps.launchers.engine import Engine
from optexp.sweeps.study import STEP, Study

PLUGIN = "hydra_plugins.optexp.Steps"  # Hydra knows it by this name, because it takes sweepers from no other package


def register() -> None:
    """Let Hydra find `Steps`, by which the configuration sweeps, the sweeper of Optuna, and the launchers."""
    Plugins.instance().class_name_to_class[PLUGIN] = Steps
    search.register()
    launchers.register()


class Steps(BasicSweeper):
    """Hydra's own sweeper, and two things more.

    What is given on the command line replaces what a study sweeps, whether it is written as key, +key or ++key. Each
    step of a study is a sweep of its own (all of them, or those that study.step= names); a job that two steps have in
    common runs once.
    """

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        """Run all jobs, batch after batch; with `sweep.plan` only say which there are.

        Raises:
            ConfigError: a job's configuration has a mistake; none has begun then.
        """
        assert self.config is not None
        assert self.hydra_context is not None
        assert self.launcher is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        given = parser.parse_overrides([*self._parse_config(), *arguments])
        batches = self.split_arguments(given, self.max_batch_size)
        if isinstance(self.launcher, Engine):
            self.launcher.check([job for batch in batches for job in batch])
            self.launcher.announces = True
        if not SweepSettings.of(self.config).plan:
            sweep.begin(self.config)
            folder = Path(self.config.hydra.sweep.dir)
            folder.mkdir(parents=True, exist_ok=True)
            OmegaConf.save(self.config, folder / "multirun.yaml")
        returned, first = [], 0
        for batch in batches:
            if not isinstance(self.launcher, Engine):  # which composes all jobs before it starts one
                self.validate_batch_is_legal(batch)
            returned.append(self.launcher.launch(batch, initial_job_idx=first))
            for job in returned[-1]:
                _ = job.return_value  # raises what the job raised
            first += len(batch)
        return returned

    def split_arguments(  # type: ignore[override]  # a static method there, which cannot know the study
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        own, rest = overrides[: len(self.params)], overrides[len(self.params) :]
        given = [o for o in rest if o.key_or_group != STEP]
        picked = [name for o in rest if o.key_or_group == STEP for name in _names(o)]
        jobs: dict[tuple[str, ...], list[str]] = {}
        for name, step in self._steps(picked).items():
            latest = {o.get_key_element().lstrip("+"): o for o in (*own, *step, *given)}
            for job in super().split_arguments(list(latest.values()), None)[0]:
                jobs.setdefault(tuple(sorted(job)), [*job, *([f"++{STEP}={_quoted(name)}"] if name else [])])
        return [list(chunk) for chunk in self.split_overrides_to_chunks(list(jobs.values()), max_batch_size)]

    def _steps(self, picked: list[str]) -> dict[str, list[Override]]:
        """The overrides of each step by its name; a sweep without steps is one without a name."""
        assert self.config is not None
        assert self.hydra_context is not None
        study = Study.of(self.config)
        steps = study.steps if study else {}
        for name in picked:
            if name not in steps:
                raise ConfigError(f"{STEP}={name} is not a step of this study{suggest(name, steps)}")
        if not steps:
            return {"": []}
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        return {
            name: parser.parse_overrides(overrides.rewrite(shlex.split(text)))
            for name, text in steps.items()
            if name in picked or not picked
        }


def _names(override: Override) -> list[str]:
    """`study.step=plain` or `study.step=plain,amp`."""
    values = override.sweep_iterator() if override.is_sweep_override() else [override.value()]
    return [str(getattr(value, "text", value)) for value in values]  # the text of what was quoted


def _quoted(name: Any) -> str:
    """Any text as Hydra's grammar reads it back."""
    return "'" + str(name).replace("\\", "\\\\").replace("'", "\\'") + "'"
