"""A worker of loky stays warm, and is known again where loky exchanges it."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from joblib.externals.loky import process_executor

from optexp.comparison.quiet import Shared
from optexp.comparison.shared_card import SharedCard
from optexp.sweeps.job import Job, Surroundings
from optexp.sweeps.launchers import local_workers
from optexp.sweeps.launchers.local_workers import _Place, _Worker

USED = [0]


def growing(pid: int, force_gc: bool = False) -> int:
    """As a process that imports torch."""
    USED[0] += 10**9
    return USED[0]


def watched() -> None:
    """Let loky measure this process at once, as it does where psutil is installed."""
    process_executor._USE_PSUTIL, process_executor._MEMORY_LEAK_CHECK_DELAY = True, -1.0
    process_executor._get_memory_usage = growing


def exchanged() -> None:
    watched()
    process_executor._MAX_MEMORY_LEAK_SIZE = 0


def timed(path: Path, here: Surroundings) -> None:
    """A job that times something."""
    card = Shared(str(here.shared), here.sharing)
    card.begin()
    path.write_text(str(os.getpid()))
    card.end()


def ends(path: Path, here: Surroundings) -> None:
    sys.exit("an end")


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(local_workers, "work", timed)
    with closing(SharedCard()) as card:
        made = _Worker(_Place(card=card, sharing=1))
        yield made
        made.kill()


def test_a_worker_that_grows_stays(worker: Any, tmp_path: Path) -> None:
    pids = [ran(worker, tmp_path)]
    worker.executor.submit(watched).result()
    pids += [ran(worker, tmp_path) for _ in range(2)]
    assert len(set(pids)) == 1


@pytest.mark.filterwarnings("ignore:A worker stopped while some jobs")
def test_a_worker_in_anothers_place_is_known(worker: Any, tmp_path: Path) -> None:
    before = ran(worker, tmp_path)
    worker.executor.submit(exchanged).result()
    worker.executor.submit(os.getpid).result()  # after the first call loky has a size to compare with
    after = ran(worker, tmp_path)
    assert after != before
    assert worker.place.card.pids == {after}


def test_a_job_that_ends_its_process_ends_no_thread_of_the_sweep(
    worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local_workers, "work", ends)
    worker.run(job(tmp_path / "pid"), Surroundings.here())
    assert "SystemExit: an end" in capsys.readouterr().err


def ran(worker: Any, folder: Path) -> int:
    path = folder / "pid"
    path.unlink(missing_ok=True)
    worker.run(job(path), Surroundings.here())
    return int(path.read_text())


class _Numbered(type(Path())):  # type: ignore[misc]
    number = 0


def job(path: Path) -> Job:
    return cast(Job, _Numbered(path))
