"""One job from its files to its line, in this process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optexp import api
from optexp.judging import definition_files, problem_files, worker
from optexp.judging.job import Job, Settings
from optexp.judging.line import Line
from optexp.judging.problem_files import Target
from optexp.records.verdict import Verdict
from tests.judging.suites import BROKEN, BY_ADDRESS, ONCE, RIGHT, SOLVED, SUM, WRONG, files, problem_folder, solution

SHORT = ["isolation=none", "profile.details=false", "measurement.verification_seeds=1", "measurement.profile_steps=1"]
SETTINGS = Settings("quick", verify_only=True, device="cpu", overrides=list(SHORT))
RETURNING = """\
import torch

def solve(x, weight, residual, rows, eps):
    wide = x.float()
    norm = torch.nn.functional.rms_norm(wide, wide.shape[-1:], weight, eps)
    return {"total": (wide + residual).sum(-1), "out": norm[rows.long()].bfloat16()}
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def of_file(folder: Path, source: str) -> Job:
    files(folder, **{"suite__it's 1": SUM, "candidates__it's 1": source})
    return problem_files.suite(Target(folder / "suite"), Target(folder / "candidates"), SETTINGS).jobs[0]


def of_definition(folder: Path, **changes: Any) -> Job:
    problem = problem_folder(folder / "problem")
    made = solution(**changes)
    if "entry_point" in changes:
        made["sources"] = [{"path": "main.cu", "content": "// CUDA C++"}]
    (folder / "solution.json").write_text(json.dumps(made))
    return definition_files.suite(problem, folder / "solution.json", SETTINGS).jobs[0]


def judged(job: Job, settings: Settings = SETTINGS) -> Line:
    found = worker.judged(job, settings)
    assert (found.key, found.problem, found.candidate) == (job.key, job.problem, job.candidate)
    return found


@pytest.mark.parametrize(
    ("source", "verdict", "reason"),
    [
        (RIGHT, Verdict.VERIFIED, "the results are the same"),
        (WRONG, Verdict.NOT_EQUIVALENT, "output fails"),
        (ONCE, Verdict.NOT_EQUIVALENT, "steps: output fails"),
        (BY_ADDRESS, Verdict.NOT_EQUIVALENT, "steps: output fails"),
        (BROKEN, Verdict.ERROR, "No module named 'no_such_package'"),
    ],
    ids=["right", "wrong", "returns its first result", "remembers by address", "broken"],
)
def test_a_file_is_judged(tmp_path: Path, source: str, verdict: Verdict, reason: str) -> None:
    found = judged(of_file(tmp_path, source))
    assert found.verdict is verdict
    assert reason in found.reason
    assert found.blame == ("candidate" if verdict is Verdict.ERROR else "")
    assert bool(found.error) == (verdict is Verdict.ERROR)
    assert not found.reason.startswith(verdict)


def test_seeds_are_secret_until_they_are_in_the_line_and_the_record(tmp_path: Path) -> None:
    job, settings = of_file(tmp_path, BROKEN), replace(SETTINGS, records=str(tmp_path / "records"))
    first, found = judged(job), judged(job, settings)
    assert first.seed != found.seed
    assert (first.record, found.record) == (None, str(tmp_path / "records" / job.key))
    kept = json.loads((tmp_path / "records" / job.key / "result.json").read_text())
    assert (kept["verdict"], kept["seed"], kept["draws"]["key"]) == (found.verdict, found.seed, found.inputs)


@pytest.mark.parametrize(
    ("settings", "found"),
    [(SETTINGS, False), (replace(SETTINGS, records="here"), True), (replace(SETTINGS, track=True), True)],
    ids=["a line", "a record", "a run"],
)
def test_figures_beyond_a_line_are_found_for_a_record_or_a_run(settings: Settings, found: bool) -> None:
    config = api.compose(["workload=module", *worker.asked(settings)], {}, {})
    assert (bool(config.measurement.load_s), config.profile.details) == (found, None if found else False)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, Verdict.VERIFIED),
        pytest.param({"main": RETURNING, "passes_outputs": False}, Verdict.VERIFIED, marks=pytest.mark.slow),
        ({"main": SOLVED.replace("eps)[", "0.1)[")}, Verdict.NOT_EQUIVALENT),
        ({"main": SOLVED.replace(".bfloat16", ".int8")}, Verdict.ERROR),  # its own assertion fails
        ({"binding": "tvm-ffi", "entry_point": "main.cu::run"}, Verdict.UNSUPPORTED),
    ],
    ids=["passes outputs", "returns", "wrong", "raises", "binding"],
)
def test_a_solution_is_judged(tmp_path: Path, changes: dict[str, Any], verdict: Verdict) -> None:
    found = judged(of_definition(tmp_path, **changes))
    assert found.verdict is verdict, found.reason
    assert (found.dtype, found.case, found.axes["half"]) == (
        ("bfloat16" if verdict is not Verdict.ERROR else found.dtype),
        "case-16",
        8,
    )


@pytest.mark.slow
def test_a_strategy_judges_the_problem_itself(tmp_path: Path) -> None:
    settings = replace(SETTINGS, strategy="inference_mode", overrides=[*SETTINGS.overrides, "patch=verified"])
    files(tmp_path, suite__first=SUM)
    (job,) = problem_files.suite(Target(tmp_path / "suite"), None, settings).jobs
    found = judged(job, settings)
    assert (found.verdict, found.strategy, found.candidate) == (Verdict.VERIFIED, "inference_mode", "")
    assert not [note for note in found.notes if "optimized.patch" in note], "its file is gone with the job's folder"


def test_a_key_that_does_not_exist_is_in_the_line(tmp_path: Path) -> None:
    found = judged(of_file(tmp_path, RIGHT), replace(SETTINGS, overrides=["no_such_key=3"]))
    assert found.verdict is Verdict.ERROR
    assert "no_such_key" in found.reason


def test_a_file_that_changes_meanwhile_has_no_verdict(tmp_path: Path) -> None:
    """A candidate that rewrites a file which another one is judged by."""
    job = of_file(tmp_path, RIGHT + "open(__file__, 'a').write('# more')\n")
    found = judged(job)
    assert found.verdict is Verdict.ERROR
    assert "changed after this run began" in found.reason
