"""Optuna minimises the step time among verified results, and no job is run twice."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from optexp.errors import ConfigError
from optexp.result import Result, Verdict
from optexp.sweeps import search
from optexp.sweeps.job import Job
from optexp.sweeps.search import Optuna, distribution
from tests.sweeps.engines import Recorded, end, sweep_config

pytestmark = pytest.mark.optuna


@pytest.fixture(autouse=True)
def optuna() -> Any:
    return pytest.importorskip("optuna", reason="the extra [optuna] is not installed")


def parsed(text: str) -> Any:
    return OverridesParser.create().parse_overrides([text])[0]


def test_sweeps_become_distributions(optuna: Any) -> None:
    kinds = optuna.distributions
    assert distribution(parsed("a=x,y")) == kinds.CategoricalDistribution(["x", "y"])
    stacks = kinds.CategoricalDistribution(["[amp,fusion]", "inplace"])
    assert distribution(parsed("strategy=[amp,fusion],inplace")) == stacks
    assert distribution(parsed("a=int(interval(1,9))")) == kinds.IntDistribution(1, 9)
    assert distribution(parsed("a=interval(0.5,2)")) == kinds.FloatDistribution(0.5, 2.0)
    assert distribution(parsed("a=tag(log,int(interval(1,1024)))")) == kinds.IntDistribution(1, 1024, log=True)
    assert distribution(parsed("a=range(1,10,3)")) == kinds.IntDistribution(1, 7, step=3)


def searching(folder: Path, engine: Recorded, **options: Any) -> Optuna:
    sweeper = Optuna(**{"n_trials": 12, "seed": 3, **options})
    sweeper.context, sweeper.config, sweeper.launcher = SimpleNamespace(config_loader=None), engine.config, engine
    return sweeper


def timed(job: Job, start: int) -> None:
    """A step takes (seed - 3)² µs; the fastest of all is wrong."""
    seed = int(job.config.seed)
    end(job, "not_equivalent" if seed == 3 else "faster")
    if seed != 3:
        result = Result.read(job.folder / "result.json")
        result.candidate.step_us = float((seed - 3) ** 2)
        result.write(job.folder / "result.json")


def test_the_shortest_verified_step_is_found_and_no_job_runs_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Recorded(sweep_config(tmp_path), timed)
    searching(tmp_path, engine, n_trials=60).sweep(["seed=int(interval(0,9))", "mode=compare"])
    assert set(engine.starts.values()) == {1}
    assert sorted(engine.starts) == list(range(len(engine.starts)))
    verdicts = {Result.read(folder / "result.json").verdict for folder in tmp_path.glob("[0-9]*")}
    assert verdicts == {Verdict.FASTER, Verdict.NOT_EQUIVALENT}
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"optexp: shortest step of {len(engine.starts) - 1} verified jobs: 1 us with seed=")


def test_jobs_are_chosen_side_by_side(tmp_path: Path) -> None:
    batches = []

    class Batches(Recorded):
        def run_all(self, jobs: Any) -> None:
            batches.append(len(jobs))
            super().run_all(jobs)

    searching(tmp_path, Batches(sweep_config(tmp_path), timed), n_jobs=4).sweep(["seed=int(interval(0,1000))"])
    assert batches == [4, 4, 4]


def test_a_search_that_was_killed_goes_on(tmp_path: Path) -> None:
    searching(tmp_path, Recorded(sweep_config(tmp_path), timed), n_trials=4).sweep(["seed=int(interval(0,1000))"])
    goes_on = Recorded(sweep_config(tmp_path, resume=True), timed)
    searching(tmp_path, goes_on, n_trials=6).sweep(["seed=int(interval(0,1000))"])
    assert len(goes_on.starts) == 2


def test_a_plan_asks_for_all_and_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    monkeypatch.setattr("optexp.sweeps.plan.show", lambda jobs, *rest: shown.append(len(jobs)))
    engine = Recorded(sweep_config(tmp_path / "new", plan=True))
    storage = f"sqlite:///{tmp_path}/search.db"
    searching(tmp_path, engine, storage=storage, study_name="s").sweep(["seed=int(interval(0,1000))"])
    assert shown == [12]
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_minimised_is_refused(tmp_path: Path) -> None:
    engine = Recorded(sweep_config(tmp_path))
    with pytest.raises(ConfigError, match="nothing is swept"):
        searching(tmp_path, engine).sweep(["seed=1"])
    engine.config.verify = "only"
    with pytest.raises(ConfigError, match="minimises a time"):
        searching(tmp_path, engine).sweep(["seed=1,2"])


def test_a_lost_record_has_no_time(tmp_path: Path) -> None:
    assert search.step_us(tmp_path) is None
