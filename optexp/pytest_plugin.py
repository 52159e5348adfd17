"""pytest plugin: the fixture `optexp_compare`, which fails a test whose step became slower than its record.

`pytest --optexp` turns it on; without it such tests are skipped. Torch and MLflow are imported by the first comparison.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from optexp.records import filenames

if TYPE_CHECKING:
    from optexp.result import Result

EXPERIMENT = "pytest"
FLAG = "--optexp"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("optexp", "comparisons of PyTorch programs")
    group.addoption(FLAG, action="store_true", help="run the tests that compare and time programs")
    group.addoption(
        "--optexp-against",
        default=EXPERIMENT,
        metavar="WHERE",
        help="reference: an MLflow run, experiment or tag (default: the experiment of these tests)",
    )
    group.addoption("--optexp-record", action="store_true", help="compare with no reference: these results become it")


@pytest.fixture
def optexp_compare(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None], tmp_path: Path
) -> Comparer:
    """Compare programs, and fail where a step became slower: see `Comparer.__call__`."""
    options = request.config.option
    if not options.optexp:
        pytest.skip(f"it times programs: pass {FLAG}")
    return Comparer(tmp_path / "optexp", record_property, None if options.optexp_record else options.optexp_against)


@dataclass
class Comparer:
    """The value of the fixture. `against`: the reference's place; None: nothing is compared with."""

    folder: Path
    record_property: Callable[[str, object], None]
    against: str | None
    calls: int = 0

    def __call__(self, *program: Any, faster: float | None = None, threshold: float = 0.1, **options: Any) -> Result:
        """Compare once; the test fails on an alarm, on wrong results, and where the gain is not shown.

        Args:
            program: One string as typed after `python -m optexp`, or the positional arguments of `optexp.compare`.
            faster: Speedup that the interval must not fall below; None: any.
            threshold: Smallest slowdown against the reference that fails: 0.1 is 10 %.
            options: Keywords of `optexp.compare`.
        """
        self.calls += 1
        folder = self.folder / str(self.calls)
        overrides = [f"tracking.experiment={EXPERIMENT}"]
        if self.against:
            overrides += [f"regression.against={self.against}", f"regression.threshold={threshold}"]
        if program and isinstance(program[0], str):
            result = _typed(program[0], overrides, folder)
        else:
            from optexp.api import compare

            overrides = [*options.pop("overrides", []), *overrides]
            result = compare(*program, **options, overrides=overrides, output=folder)
        self._note(result, folder)
        judge(result, faster)
        return result

    def _note(self, result: Result, folder: Path) -> None:
        """Properties of JUnit's XML."""
        from optexp.reporting import summary

        facts = {"verdict": str(result.verdict), "headline": result.headline, "regression": summary.regression(result)}
        if result.speedup:
            facts |= {"speedup_low": f"{result.speedup.low:.4g}", "speedup_high": f"{result.speedup.high:.4g}"}
            facts |= {"step_us": f"{result.candidate.step_us:.4g}"}
        for name, value in {**facts, "record": str(folder / filenames.RESULT)}.items():
            if value:
                self.record_property(f"optexp_{name}", value)


def judge(result: Result, faster: float | None = None) -> None:
    """End the test by what was found: passed, skipped where the stack cannot apply here, or failed.

    Args:
        faster: As `Comparer.__call__` has it.
    """
    from optexp.records.regression import Outcome
    from optexp.reporting import summary
    from optexp.result import Verdict

    said = f"{result.workload} · {result.label}: {result.headline}"
    if result.verdict is Verdict.UNSUPPORTED:
        pytest.skip(said)
    if not result.verdict.measured:
        pytest.fail(_with_machine(said, result), pytrace=False)
    seen = result.regression
    if seen and seen.alarm:
        pytest.fail(_with_machine(f"{result.workload} · {result.label}: {summary.regression(result)}", result), False)
    if faster is not None and result.speedup and result.speedup.low < faster:
        shown = "is" if result.speedup.high < faster else "may be"
        wanted = f"{result.workload} · {result.label} {shown} less than {faster:g}× faster: {result.headline}"
        pytest.fail(_with_machine(wanted, result), pytrace=False)
    if seen and seen.outcome is Outcome.NOT_COMPARED:
        warnings.warn(f"optexp: {summary.regression(result)}", stacklevel=3)


def _with_machine(text: str, result: Result) -> str:
    """The text, and what makes this machine unfit where something does."""
    faults = list(_faults(result))
    if not faults:
        return text
    return f"{text}\nThis machine is not fit to measure on: {'; '.join(faults)}. Remedies: python -m optexp.doctor"


def _faults(result: Result) -> Iterator[str]:
    """Findings of watchdogs about the machine."""
    from optexp.records.measurement import About

    for watch in result.measurement.watchdogs if result.measurement else result.objections:
        if not watch.ok and watch.about is About.MACHINE:
            yield f"{watch.name}: {watch.text}"


def _typed(text: str, overrides: list[str], folder: Path) -> Result:
    """The comparison of a command line, in a process of its own."""
    from optexp.result import Result

    words = [*shlex.split(text), *overrides, f"hydra.run.dir={folder}"]
    done = subprocess.run([sys.executable, "-m", "optexp", *words], check=False, stderr=subprocess.PIPE, text=True)
    sys.stderr.write(done.stderr)
    if not (folder / filenames.RESULT).is_file():
        pytest.fail(done.stderr.strip() or f"optexp ended with status {done.returncode}", pytrace=False)
    return Result.read(folder / filenames.RESULT)
