"""The fixture `optexp_compare`: off without its flag; fails a test with the verdict, the interval and the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from optexp import pytest_plugin
from optexp.records.measurement import About, Watch
from optexp.records.verdict import Verdict
from optexp.result import Result
from tests.test_regression import beside, timed

ROOT = Path(__file__).parents[1]
BUSY = Watch("cores", False, "the candidate had to wait for a core", about=About.MACHINE)
TESTS = """
from tests.test_regression import beside, timed
from dataclasses import replace
from optexp import pytest_plugin

new = timed(700)
REGRESSED = replace(new, regression=beside(new, timed(500)))
asked = []

def typed(text, overrides, folder):
    asked.append((text, overrides))
    return REGRESSED

pytest_plugin._typed = typed

def test_step(optexp_compare):
    optexp_compare("workload=mlp strategy=fusion", threshold=0.2)

def test_asked():
    assert asked == [("workload=mlp strategy=fusion", [
        "tracking.experiment=pytest", "regression.against=main", "regression.threshold=0.2"])]
"""


def run(folder: Path, tests: str, *flags: str) -> str:
    """What pytest prints of a file of tests with these flags."""
    (folder / "test_steps.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "optexp.pytest_plugin", "-p", "no:cacheprovider", "-rs", *flags]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_it_is_off_without_its_flag(tmp_path: Path) -> None:
    said = run(tmp_path, "def test_step(optexp_compare):\n    optexp_compare('workload=mlp')\n")
    assert "1 skipped" in said
    assert "it times programs: pass --optexp" in said


def test_a_slower_step_fails_its_test(tmp_path: Path) -> None:
    xml = tmp_path / "junit.xml"
    said = run(tmp_path, TESTS, "--optexp", "--optexp-against=main", f"--junitxml={xml}", "-o", "junit_family=xunit1")
    assert "1 failed, 1 passed" in said
    assert "mlp · fusion: ALARM: time/step 1.4" in said
    assert "99% interval" in said
    written = xml.read_text()
    assert '<property name="optexp_verdict" value="FASTER"' in written
    assert '<property name="optexp_step_us" value="700"' in written
    assert 'name="optexp_regression" value="ALARM: time/step' in written


def judged(result: Result, faster: float | None = None) -> str:
    """The message that the test ends with; empty where it passes."""
    try:
        pytest_plugin.judge(result, faster)
    except (pytest.fail.Exception, pytest.skip.Exception) as ended:
        return f"{type(ended).__name__}: {ended.msg}"
    return ""


def test_what_ends_a_test() -> None:
    fine = timed(500)  # 2×, interval 1.96 to 2.04
    assert judged(fine, faster=1.9) == ""
    assert "mlp · fusion may be less than 2× faster: FASTER" in judged(fine, faster=2)
    assert judged(fine, faster=3).startswith("Failed: mlp · fusion is less than 3× faster")
    assert judged(replace(fine, regression=beside(fine, timed(500)))) == ""
    assert judged(replace(fine, verdict=Verdict.UNSUPPORTED, headline="UNSUPPORTED: no GPU")).startswith("Skipped")
    wrong = judged(replace(fine, verdict=Verdict.NOT_EQUIVALENT, headline="NOT_EQUIVALENT: loss"))
    assert wrong == "Failed: mlp · fusion: NOT_EQUIVALENT: loss"


def test_an_unfit_machine_is_named() -> None:
    busy = timed(500)
    assert busy.measurement
    busy.measurement.watchdogs = [BUSY, replace(BUSY, name="drift", about=About.ARMS)]
    said = judged(busy, faster=3)
    assert said.endswith("cores: the candidate had to wait for a core. Remedies: python -m optexp.doctor")
    assert "not fit" not in judged(timed(500), faster=3)
    busy.verdict = Verdict.INVALID
    busy.withhold()
    assert "not fit to measure on: cores" in judged(busy)


def test_a_reference_is_missing_once() -> None:
    from optexp.records.regression import Outcome, Regression

    missing = Regression(Outcome.NOT_COMPARED, "pytest has no timed record of mlp", "pytest", 0.1)
    with pytest.warns(UserWarning, match="not compared: pytest has no timed record"):
        assert judged(replace(timed(500), regression=missing)) == ""
