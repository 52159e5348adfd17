"""Minutes are announced before they are spent."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from optexp import api
from optexp.comparison.defaults import taken
from optexp.comparison.forecast import (
    BESIDE_S,
    Steps,
    announcement,
    late,
    process_s,
    total_s,
    verification_s,
    welcome,
)
from optexp.comparison.session import Session
from optexp.config import Experiment, resolve, search_path
from optexp.errors import SPENT, Failure
from optexp.measurement.machine_load import MachineLoad
from optexp.measurement.settings import MeasurementSettings
from optexp.reporting.terminal import Progress
from optexp.support.stopwatch import Stopwatch
from optexp.support.units import rough

DEFAULT = MeasurementSettings()
QUICK = MeasurementSettings(
    preset="quick", processes_min=1, processes_max=1, pairs=30, budget_s=10.0, controls=False, verification_seeds=2,
    thorough=False,
)  # fmt: skip
SLOW = Steps(wall_s=2.1, compute_s=2.1, setup_s=5.0, families=4)


def test_a_step_of_seconds_is_announced_with_what_takes_less() -> None:
    text = announcement(SLOW, DEFAULT, True, {"quick": QUICK})
    assert f"about {rough(total_s(SLOW, DEFAULT))}" in text
    assert "a step of the baseline takes 2.1 s" in text
    assert f"measurement=quick takes about {rough(total_s(SLOW, QUICK))}" in text
    assert "verify=only" in text


def test_what_takes_a_minute_or_so_is_no_news() -> None:
    assert not announcement(Steps(1e-3, 1e-3, 2.0, families=4), DEFAULT, True, {"quick": QUICK})
    assert not announcement(replace(SLOW, wall_s=0.3, compute_s=0.3), QUICK, True, {"quick": QUICK})


def test_a_preset_that_is_long_by_design_says_that() -> None:
    long = replace(DEFAULT, preset="rigorous", processes_min=10, processes_max=30, budget_s=600.0)
    text = announcement(Steps(1e-3, 1e-3, 2.0), long, True, {"quick": QUICK})
    assert "measurement=rigorous" in text
    assert "a step" not in text


def test_quick_is_not_advised_to_who_has_it() -> None:
    text = announcement(replace(SLOW, wall_s=20.0, compute_s=20.0), QUICK, True, {"quick": QUICK})
    assert text
    assert "measurement=quick" not in text


def test_more_of_everything_takes_longer() -> None:
    for more in (
        replace(SLOW, verified=3),
        replace(SLOW, noisy=True),
        replace(SLOW, followed=True),
        replace(SLOW, families=9),
    ):
        assert verification_s(more, DEFAULT) > verification_s(SLOW, DEFAULT)
    assert process_s(SLOW, DEFAULT) > process_s(SLOW, replace(DEFAULT, controls=False))
    assert total_s(SLOW, DEFAULT) > total_s(SLOW, QUICK) > total_s(SLOW, QUICK, measured=False)


@pytest.mark.parametrize(("seconds", "said"), [(3.0, "10 s"), (42.0, "40 s"), (61.0, "1 min"), (378.0, "6 min")])
def test_an_estimate_has_few_digits(seconds: float, said: str) -> None:
    assert rough(seconds) == said


@pytest.mark.parametrize(("ms", "announced"), [(1.0, False), (2000.0, True)])
def test_a_comparison_says_so_when_its_arms_are_set_up(
    ms: float, announced: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = resolve(api.compose(["workload=sleep", f"workload.ms={ms}", "isolation=none", "device=cpu"], {}, {}))
    with Progress() as progress:
        session = Session(experiment, "cpu", tmp_path, Stopwatch(), progress)
        session.settings = experiment.measurement  # as with isolation=process
        session.told_s = 1.0
        starting = session.pool.start({"baseline": session.spec(())})["baseline"]
        told = starting.setup.wait()
        session.forecast(starting.arm, told, told.setup_s, 1)
        session.close()
    assert told.step_s >= ms / 1e3
    assert told.compute_s < 2.0
    notes = [note for note in session.result.notes if note.startswith("this will take about")]
    assert bool(notes) == announced
    assert ("longer than about 10 s: to start took " in capsys.readouterr().err) == (not announced)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "about 40 s; it ends earlier when it is precise"),
        (["measurement=quick"], "about 30 s"),
        (["verify=only"], "about 20 s"),
        (["mode=profile"], "about 20 s"),
        (["mode=auto", "auto.budget=5m"], "at most 5 min (auto.budget)"),
        (["mode=auto", "auto.budget=30m", "auto.trials=2"], "about 2 min"),
    ],
)
def test_a_run_says_at_its_start_how_long_it_takes(
    experiment: Callable[..., Experiment], arguments: list[str], said: str
) -> None:
    asked = experiment("workload=gelu", "device=cpu", *arguments)
    seconds, quiet = welcome(asked, MachineLoad(0.9, 2))
    assert quiet == said
    longer, busy = welcome(asked, MachineLoad(5.0, 2))
    jobs = 0 if "auto.budget" in quiet else 4 if asked.mode == "auto" else 1  # each with work that is slowed down
    assert longer == pytest.approx(seconds + jobs * 2 * BESIDE_S)
    assert "; the machine is busy: 5.0 processes share 2 cores" in busy


def test_a_job_that_takes_longer_than_it_said_says_so() -> None:
    assert not late(60.0, 20.0, 60.0)
    assert late(60.0, 40.0, 100.0) == "longer than about 1 min: to start took 40 s, and about 2 min are left"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            [],
            "no workload named (workload=…): mlp; no strategy named (strategy=…): baseline alone, compared with itself;"
            " measurement=default",
        ),
        (
            ["workload=gelu", "measurement=quick", "baseline=[inplace]"],
            "no strategy named (strategy=…): the plain program is compared with inplace",
        ),
        (["mode=profile"], "no workload named (workload=…): mlp"),
        (["workload=gelu", "strategy=baseline"], ""),
    ],
)
def test_what_a_command_left_open_is_said(
    experiment: Callable[..., Experiment], arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = experiment(*arguments)
    monkeypatch.setattr(search_path, "typed", lambda: {text.partition("=")[0] for text in arguments})
    assert taken(asked) == said


def test_a_trial_that_needs_far_more_than_the_rest_of_the_budget_ends_at_once(tmp_path: Path) -> None:
    overrides = ["workload=sleep", "workload.ms=1", "isolation=none", "device=cpu", "measurement=quick"]
    experiment = resolve(api.compose(overrides, {}, {}))
    with Progress() as progress:
        session = Session(experiment, "cpu", tmp_path, Stopwatch(), progress)
        starting = session.pool.start({"baseline": session.spec(())})["baseline"]
        told = starting.setup.wait()
        session.pool.until_s = time.monotonic() + 60
        session.forecast(starting.arm, told, 1.0, 1)
        with pytest.raises(Failure, match=r"this takes about .* min, and (1 min|6|5)") as spent:
            session.forecast(starting.arm, told, 150.0, 1)
        assert spent.value.type == SPENT
        session.close()
