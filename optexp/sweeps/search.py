"""A search instead of a grid: Optuna chooses the next jobs by the times of the verified ones before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from optexp.config.sweep_settings import SweepSettings
from optexp.errors import ConfigError
from optexp.records import filenames
from optexp.result import Result
from optexp.sweeps import sweep
from optexp.sweeps.launchers.engine import Engine

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution

PLUGIN = "hydra_plugins.optexp.Optuna"

Job = tuple[str, ...]  # its overrides


def register() -> None:
    """Let Hydra find `Optuna`."""
    Plugins.instance().class_name_to_class[PLUGIN] = Optuna


class Optuna(Sweeper):
    """`hydra/sweeper=optuna`: minimises the candidate's step time among results that are verified and measured.

    Args:
        n_trials: Jobs that are chosen; one that was chosen before is not run again.
        n_jobs: Chosen at once, and run side by side where the launcher can.
        seed: Of Optuna's choices.
        storage, study_name: Of a study in a data base that several searches share.
        params: What is swept besides the command line's overrides.
    """

    config: DictConfig

    def __init__(
        self,
        n_trials: int = 20,
        n_jobs: int = 1,
        seed: int | None = None,
        storage: str | None = None,
        study_name: str | None = None,
        params: dict[str, str] | None = None,
    ) -> None:
        self.n_trials, self.n_jobs, self.seed = n_trials, n_jobs, seed
        self.storage, self.study_name, self.params = storage, study_name, dict(params or {})

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.config = hydra_context, config
        self.launcher: Any = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        """Ask Optuna, run, tell Optuna; the ranking at the end is that of any sweep.

        Raises:
            ConfigError: Optuna is not installed, the launcher is a foreign one, or no job would be timed.
        """
        study = self._study()
        fixed, space = self._space(arguments)
        if self._settings.plan:
            asked = [self._job(study.ask(space), fixed) for _ in range(self.n_trials)]
            self.launcher.launch(list(dict.fromkeys(asked)), initial_job_idx=0)
            return []
        sweep.begin(self.config)
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        self._search(study, fixed, space)
        return []

    def _search(self, study: Study, fixed: Sequence[str], space: dict[str, BaseDistribution]) -> None:
        known = dict[Job, float | None]()
        for begin in range(0, self.n_trials, self.n_jobs):
            trials = [study.ask(space) for _ in range(min(self.n_jobs, self.n_trials - begin))]
            jobs = {trial.number: self._job(trial, fixed) for trial in trials}
            due = list(dict.fromkeys(job for job in jobs.values() if job not in known))
            if due:
                self.launcher.launch(due, initial_job_idx=len(known))
                known |= dict(zip(due, map(step_us, self.launcher.folders), strict=True))
            for trial in trials:
                _tell(study, trial, known[jobs[trial.number]])
        timed = {job: us for job, us in known.items() if us is not None}
        if timed:
            best = min(timed, key=timed.__getitem__)
            chosen = " ".join(override.lstrip("+") for override in best[len(fixed) :])
            print(f"optexp: shortest step of {len(timed)} verified jobs: {timed[best]:.4g} us with {chosen}")
        else:
            print(f"optexp: none of {len(known)} jobs was both verified and measured")

    @property
    def _settings(self) -> SweepSettings:
        return SweepSettings.of(self.config)

    def _study(self) -> Study:
        try:
            import optuna
        except ImportError:
            raise ConfigError("hydra/sweeper=optuna needs Optuna: pip install 'optexp[optuna]'") from None
        if not isinstance(self.launcher, Engine):
            raise ConfigError("hydra/sweeper=optuna: hydra/launcher must be basic, joblib, ray or slurm")
        if self.config.get("verify") == "only" or self.config.get("mode") != "compare":
            raise ConfigError("hydra/sweeper=optuna minimises a time: use mode=compare verify=first")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage, name = (None, None) if self._settings.plan else (self.storage, self.study_name)
        sampler = optuna.samplers.TPESampler(seed=self.seed)
        return optuna.create_study(
            storage=storage, sampler=sampler, study_name=name, direction="minimize", load_if_exists=True
        )

    def _space(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, BaseDistribution]]:
        """Overrides of every job, and by key what Optuna chooses; the command line's replace those of `params`."""
        parser = OverridesParser.create(config_loader=self.context.config_loader)
        given = parser.parse_overrides([*(f"{key}={value}" for key, value in self.params.items()), *arguments])
        latest = {override.get_key_element().lstrip("+"): override for override in given}
        fixed = [str(override.input_line) for override in latest.values() if not override.is_sweep_override()]
        swept = [override for override in latest.values() if override.is_sweep_override()]
        if not swept:
            raise ConfigError("hydra/sweeper=optuna: nothing is swept; write strategy=a,b or key=interval(0.1,1)")
        return fixed, {override.get_key_element(): distribution(override) for override in swept}

    @staticmethod
    def _job(trial: Trial, fixed: Sequence[str]) -> Job:
        return (*fixed, *(f"{key}={value}" for key, value in trial.params.items()))


def distribution(override: Override) -> BaseDistribution:
    """A sweep of Hydra's grammar as Optuna names it; `tag(log,interval(...))` is searched by its logarithm."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    if isinstance(value, IntervalSweep):
        begin, end = value.start, value.end
        assert begin is not None
        assert end is not None
        log = "log" in value.tags
        if isinstance(begin, int) and isinstance(end, int):
            return IntDistribution(begin, end, log=log)
        return FloatDistribution(float(begin), float(end), log=log)
    if isinstance(value, RangeSweep) and all(isinstance(v, int) for v in (value.start, value.stop, value.step)):
        numbers = range(int(value.start or 0), int(value.stop or 0), int(value.step))
        return IntDistribution(numbers[0], numbers[-1], step=numbers.step)
    return CategoricalDistribution(list(override.sweep_string_iterator()))


def step_us(folder: Path) -> float | None:
    """The candidate's step time in µs; None where it was not verified, not measured, or not recorded."""
    try:
        result = Result.read(folder / filenames.RESULT)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return result.candidate.step_us if result.verdict.measured else None


def _tell(study: Study, trial: Trial, us: float | None) -> None:
    from optuna.trial import TrialState

    if us is None:
        study.tell(trial, state=TrialState.FAIL)
    else:
        study.tell(trial, us)
