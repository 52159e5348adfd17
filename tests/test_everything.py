"""What measures all that experiments/results/ records: its jobs exist, end at their limit, and are not run twice."""

import shlex
import shutil

import pytest

from optexp.config import search_path
from optexp.config.overrides import rewrite
from optexp.pages.record import Record
from tests.benchmarks.everything import GROUPS, ROOT, Job, chosen, claimed, collect, left, run, show
from tests.test_results import study

JOBS = [job for group in GROUPS.values() for job in group]


def overrides(job):
    return [word for word in shlex.split(job.command) if "=" in word and not word.startswith("hydra.")]


def compositions(words):
    """Each job of a sweep has one of the choices."""
    several = [word.partition("=")[::2] for word in words if "," in word]
    one = [word for word in words if "," not in word]
    return [[*one, f"{key}={value}"] for key, values in several for value in values.split(",")] or [one]


@pytest.mark.parametrize("job", [job for job in JOBS if "-m optexp " in job.command], ids=lambda job: job.name)
def test_every_command_is_one_that_optexp_takes(job):
    for words in compositions(overrides(job)):
        assert search_path.compose(rewrite(words)).workload._target_


def test_every_path_is_there():
    paths = {word for job in JOBS for word in shlex.split(job.command) if word.startswith("tests/")}
    paths |= {path for job in JOBS for path in shlex.split(job.command.replace("--ignore=", "")) if "tests/" in path}
    assert len(paths) > 8
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_names_and_groups_are_chosen_in_order():
    assert len({job.name for job in JOBS}) == len(JOBS)
    assert list(chosen([])) == JOBS
    assert [job.name for job in chosen(["clocks", "causes"])] == ["clocks", "blind", "blind_fresh"]
    with pytest.raises(SystemExit, match="no group or job called matmul"):
        list(chosen(["matmul"]))


def test_a_job_has_an_estimate_below_its_limit(tmp_path, capsys):
    assert [job.name for job in JOBS if not 0 < job.seconds <= job.limit_s] == []
    assert sum(job.seconds for job in GROUPS["studies"]) < 15 * 60
    show(list(chosen(["clocks", "causes"])), tmp_path)
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("clocks: about 60 s, at most 60 s: python tests/benchmarks/false_alarms.py")
    assert told[0].endswith(f"--record {tmp_path / 'records'}")
    assert told[-1] == "causes: about 8 min"


def test_a_job_without_its_files_is_left_out(tmp_path, monkeypatch):
    job = next(job for job in JOBS if job.name == "judged_level2")
    monkeypatch.delenv("KERNELBENCH", raising=False)
    assert job.lacks == "KERNELBENCH"
    monkeypatch.setenv("KERNELBENCH", "/problems")
    assert job.lacks == ""
    assert job.arguments(tmp_path)[2] == "/problems/level2"


def test_two_runs_share_a_folder(tmp_path):
    with claimed(JOBS[0], tmp_path) as mine, claimed(JOBS[0], tmp_path) as theirs, claimed(JOBS[1], tmp_path) as other:
        assert (mine, theirs, other) == (True, False, True)
    with claimed(JOBS[0], tmp_path) as again:
        assert again


def test_records_of_what_is_done_are_collected(tmp_path):
    """A study that was cut off has none; a comparison's exit status is its verdict's."""
    for name, ending in (("elementwise", "done"), ("mlp_scaling", "cut off"), ("main_graph", "exit status 4")):
        study(tmp_path / name)
        (tmp_path / name / "0" / ".hydra" / "overrides.yaml").write_text("- workload=mlp\n")
        (tmp_path / f"{name}.log").write_text(f"$ python\n\n{ending}\n")
    (tmp_path / "main_graph" / "0").rename(tmp_path / "single")
    shutil.rmtree(tmp_path / "main_graph")
    (tmp_path / "single").rename(tmp_path / "main_graph")
    assert [path.name for path in collect(tmp_path)] == ["mine.json", "main_job.json", "README.json"]
    assert Record.read(tmp_path / "records" / "main_job.json").rows[0]["typed"] == "workload=mlp"


@pytest.mark.slow
def test_a_job_ends_at_its_limit_and_what_is_done_is_not_done_again(tmp_path):
    quick, stuck = Job("quick", 20, "-c 'print(1)'"), Job("stuck", 1, "-c 'while True: pass'")
    assert left(quick, tmp_path)
    assert run(quick, tmp_path, 20).startswith("done")
    assert run(stuck, tmp_path, 20).startswith("cut off")
    assert not left(quick, tmp_path)
    assert left(stuck, tmp_path)
    (tmp_path / "stuck.log").write_text("$ python\nhalf a line, for all of it was ended")
    assert left(stuck, tmp_path)
    assert (tmp_path / "quick.log").read_text().splitlines()[1] == "1"
