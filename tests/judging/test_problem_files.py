"""Problems as files, and candidates matched to them by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.errors import ConfigError
from optexp.judging import problem_files
from optexp.judging.job import Settings, Suite
from optexp.judging.problem_files import Target
from tests.judging.suites import RIGHT, SUM, files

SETTINGS = Settings()


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    files(tmp_path / "suite", level1__1_sum=SUM, level1__10_sum_of=SUM, level2__1_other=SUM, level1__utils="x = 1\n")
    files(tmp_path / "suite", __pycache____1_sum=SUM)
    return tmp_path / "suite"


def suite(problems: Path, candidates: Path | str | None, **settings: str) -> Suite:
    target = None if candidates is None else Target.of(str(candidates))
    return problem_files.suite(Target.of(str(problems)), target, Settings(**settings))  # type: ignore[arg-type]


def pairs(found: Suite) -> set[tuple[str, str, str]]:
    return {(job.problem, job.candidate, job.entrant) for job in found.jobs}


def test_problems_come_by_level_and_number(problems: Path) -> None:
    found = suite(problems, None, strategy="fusion")
    assert [job.problem for job in found.jobs] == ["level1/1_sum", "level1/10_sum_of", "level2/1_other"]
    assert {job.candidate for job in found.jobs} == {""}


@pytest.mark.parametrize(
    ("name", "problem", "entrant"),
    [
        ("level1__1_sum", "level1/1_sum", ""),
        ("1_sum", "level1/1_sum", ""),
        ("level_2_problem_1_sample_3_kernel", "level2/1_other", "sample 3"),
        ("10_sum_of__first", "level1/10_sum_of", "first"),
        ("10_sum_of_v2", "level1/10_sum_of", "v2"),
    ],
)
def test_a_candidate_is_matched_by_its_name(
    problems: Path, tmp_path: Path, name: str, problem: str, entrant: str
) -> None:
    found = suite(problems, files(tmp_path / "candidates", **{name: RIGHT}))
    assert pairs(found) == {(problem, name.replace("__", "/"), entrant)}
    assert found.jobs[0].strategy["replace"]["target"].endswith(".py:ModelNew")
    assert found.remarks == ["2 of 3 problems have no candidate: not counted"]


def test_candidates_without_a_problem_are_told(problems: Path, tmp_path: Path) -> None:
    names = ("1_sum", "7_none", "level_1_problem_7_sample_0_kernel")
    found = suite(problems, files(tmp_path / "candidates", **dict.fromkeys(names, RIGHT)))
    assert len(found.jobs) == 1
    told = "no problem has the name of 7_none.py, level_1_problem_7_sample_0_kernel.py: not judged"
    assert found.remarks[0] == told


def test_nothing_that_matches_is_a_mistake(problems: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no candidate with a problem's name.*level1/1_sum.py"):
        suite(problems, files(tmp_path / "candidates", other=RIGHT))
    with pytest.raises(ConfigError, match="holds no problem"):
        suite(tmp_path / "candidates", None, strategy="fusion")


def test_any_pair_of_files(tmp_path: Path) -> None:
    files(tmp_path, ours=SUM.replace("Model(", "Plain("), theirs=RIGHT.replace("ModelNew", "Fast"))
    found = suite(tmp_path / "ours.py:Plain", f"{tmp_path / 'theirs.py'}:Fast")  # type: ignore[arg-type]
    (job,) = found.jobs
    assert job.workload == {"path": str(tmp_path / "ours.py"), "names": {"model": "Plain"}}
    assert job.strategy == {"replace": {"target": f"{tmp_path / 'theirs.py'}:Fast"}}


def test_the_key_follows_sources_and_settings(problems: Path, tmp_path: Path) -> None:
    candidates = files(tmp_path / "candidates", **{"1_sum": RIGHT})
    before = suite(problems, candidates).jobs[0].key
    assert suite(problems, candidates).jobs[0].key == before
    assert suite(problems, candidates, preset="quick").jobs[0].key != before
    files(tmp_path / "candidates", **{"1_sum": f"{RIGHT}\n"})
    changed = suite(problems, candidates).jobs[0].key
    assert changed != before
    files(problems, level1__1_sum=f"{SUM}\n")
    assert suite(problems, candidates).jobs[0].key not in (before, changed)


def test_jobs_of_equal_problems_have_their_own_keys(problems: Path) -> None:
    found = suite(problems, None, strategy="fusion")
    assert len({job.key for job in found.jobs}) == len(found.jobs)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("# save this as ModelNew\nclass Model: pass\n", "Model"),
        ("from fast import Fast as ModelNew\nclass Model: pass\n", "ModelNew"),
        ("class Model: pass\nModelNew = Model\n", "ModelNew"),
        ("if True:\n    class ModelNew: pass\n", "ModelNew"),
        ("class ModelNew(", "ModelNew"),
    ],
)
def test_the_model_is_one_that_the_file_defines(tmp_path: Path, source: str, name: str) -> None:
    (tmp_path / "a.py").write_text(source)
    assert Target(tmp_path / "a.py").model("ModelNew", "Model") == name


def test_a_job_knows_which_of_its_files_were_edited(problems: Path) -> None:
    files(problems.parent / "mine", level1__1_sum=RIGHT)
    job = suite(problems, problems.parent / "mine").jobs[0]
    assert job.edited == []
    candidate = problems.parent / "mine" / "level1" / "1_sum.py"
    candidate.write_text(RIGHT + "# edited\n")
    assert job.edited == [str(candidate)]
    candidate.unlink()
    assert job.edited == [str(candidate)]
