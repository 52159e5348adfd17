"""The benchmark of KernelBench's files: what it runs, resumes, and prints."""

import argparse
from pathlib import Path

import pytest

from tests.benchmarks import kernelbench
from tests.benchmarks.kernelbench import CUT, Outcome, Store, Worker, files, parse, sizes, table, work

PROBLEM = """\
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return x.sum(1)

def get_inputs():
    return [torch.rand({rows}, 1024)]

def get_init_inputs():
    return []
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, rows in (("10_small", 4), ("2_large", 2**21), ("3_other", 8)):
        path = tmp_path / "level1" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(PROBLEM.format(rows=rows))
    return tmp_path


def options(folder: Path, *more: str) -> argparse.Namespace:
    return parse([str(folder), str(folder / "store.json"), "--workers", "1", *more])


def outcome(path: Path, verdict: str = "VERIFIED") -> Outcome:
    return Outcome(f"level1/{path.name}", "fusion", verdict, f"{verdict}: as expected", 1.0)


def test_sizes_are_known_without_a_batch(folder: Path) -> None:
    assert sizes(folder / "level1" / "2_large.py") == (2**33, 2**23)


def test_files_come_by_number_and_may_be_chosen(folder: Path) -> None:
    assert [path.stem for path in files(folder, [1], [])] == ["2_large", "3_other", "10_small"]
    assert [path.stem for path in files(folder, [1], ["level1/3_"])] == ["3_other"]


def test_overrides_of_jobs_follow_a_dash(folder: Path) -> None:
    assert options(folder, "--only", "3_", "--", "seed=3", "device=cpu").overrides == ["seed=3", "device=cpu"]


def test_a_later_run_goes_on_and_large_files_come_last_and_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(worker: Worker, path: Path, *_: object) -> Outcome:
        ran.append(path.stem)
        return outcome(path, "ERROR" if path.stem == "3_other" else "VERIFIED")

    monkeypatch.setattr(kernelbench, "run", run)
    for again in ([], [], ["--again", "ERROR"]):
        work(options(folder, *again), Store(folder / "store.json"))
    assert ran == ["3_other", "10_small", "2_large", "3_other"]
    told = table(Store(folder / "store.json").found.values())
    assert "fusion: ERROR 1; fusion: VERIFIED 2" in told
    assert told.index("2_large") < told.index("3_other") < told.index("10_small")


def test_nothing_starts_that_may_not_end_in_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernelbench, "run", lambda *_: pytest.fail("there is no time for this"))
    work(options(folder, "--seconds", "30", "--reserve", "60"), Store(folder / "store.json"))


def test_a_job_without_an_answer_is_ended_and_the_next_one_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder / "worker.py"
    answers = "for line in sys.stdin:\n    time.sleep(60 * ('slow' in line))\n    print(flush=True)\n"
    script.write_text(f"import sys, time\n{answers}")
    monkeypatch.setattr(kernelbench, "__file__", str(script))
    worker = Worker()
    assert worker.ask({"folder": "quick"}, 30.0)
    assert not worker.ask({"folder": "slow"}, 0.5)
    assert worker.ask({"folder": "quick"}, 30.0)
    found = kernelbench.run(worker, folder / "level1" / "3_other.py", options(folder), 30.0, 0.0)
    assert found.verdict == "ERROR"  # there is an answer and no record
    worker.close()


@pytest.mark.slow
def test_a_file_reaches_a_verdict(folder: Path) -> None:
    store = Store(folder / "store.json")
    chosen = options(folder, "--strategy", "identical", "--only", "3_other", "--limit", "500", "--", "device=cpu")
    work(chosen, store)
    (found,) = store.found.values()
    assert found.verdict == "VERIFIED", found.headline
    assert found.verdict != CUT
