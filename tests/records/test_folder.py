"""Records: every run has a folder of its own, an interrupted one says so, and a full disk costs files, not results."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext, suppress
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from optexp.comparison import recorder
from optexp.comparison.recorder import Recorder
from optexp.errors import ConfigError
from optexp.records import folder
from optexp.records.folder import NotDrawn, claim, drawing, full, refusal, tolerating
from optexp.result import Result, Verdict
from optexp.support.stopwatch import Stopwatch

EXAMPLE = Path(__file__).parents[1] / "results" / "faster.json"


def test_nobody_gets_a_folder_that_another_has(tmp_path: Path) -> None:
    with ThreadPool(8) as pool:
        claimed = pool.map(claim, [tmp_path / "day" / "12-00-00"] * 20)
    assert len(set(claimed)) == 20
    assert all(path.is_dir() for path in claimed)


def test_a_disk_that_refuses_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "x" / "y", tmp_path / "file" / "x"):
        with pytest.raises(ConfigError, match=r"cannot write .*; name another folder"):
            claim(place)
    assert refusal(ValueError()) is None
    assert refusal(OSError(errno.EACCES, "no")) is None  # of no file
    assert refusal(OSError(errno.ENOSPC, "No space left on device")) is not None
    with pytest.raises(ConfigError, match=r"cannot write /proc/sys/x: /proc/sys is not writable; name another folder"):
        claim(Path("/proc/sys/x"))
    with pytest.raises(ConfigError, match=r"cannot write /proc/x: No such file or directory; name another folder"):
        claim(Path("/proc/x"))  # of no size, which is not full
    monkeypatch.setattr(folder, "LEAST_BYTES", 2**70)
    with pytest.raises(ConfigError, match=r"its disk has .* left"):
        claim(tmp_path / "not" / "there")
    assert not (tmp_path / "not").exists()
    assert full(tmp_path) is not None


def test_other_errors_pass(tmp_path: Path) -> None:
    notes: list[str] = []
    with tolerating(notes):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))
    assert notes == [f"not written {tmp_path}: No space left on device"]
    with pytest.raises(BlockingIOError), tolerating(notes):
        raise BlockingIOError(errno.EAGAIN, "again")


def session_of(result: Result, output: Path) -> Any:
    return SimpleNamespace(
        result=result,
        output=output,
        watch=Stopwatch(),
        experiment=SimpleNamespace(tracking=SimpleNamespace(enabled=False)),
        progress=SimpleNamespace(name="measurement", stop=lambda: None, expect=lambda seconds: None),
        working=lambda phase, text: nullcontext(),
    )


def test_what_was_measured_is_shown_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    result, shown = Result.read(EXAMPLE), list[Result]()
    monkeypatch.setattr(Result, "write", refuse)
    with Recorder(session_of(result, tmp_path), lambda result, *_: shown.append(result)) as record:
        record.finish(result)
    assert [found.verdict for found in shown] == [Verdict.FASTER]
    assert "not written: No space left on device" in shown[0].notes


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="of Linux")
def test_a_record_is_whole_or_not_there(tmp_path: Path) -> None:
    (tmp_path / ".result.json").symlink_to("/dev/full")
    (tmp_path / "result.json").write_text("the one before")
    with pytest.raises(OSError, match="No space left"):
        Result.read(EXAMPLE).write(tmp_path / "result.json")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("result.json", "the one before")]


@pytest.mark.parametrize("decided", [False, True])
def test_an_interrupted_run_leaves_a_record_that_says_so(
    decided: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = Result.read(EXAMPLE)
    with suppress(KeyboardInterrupt), Recorder(session_of(result, tmp_path), lambda *_: None) as record:
        if decided:
            record.finish(result)
        raise KeyboardInterrupt("SIGTERM")
    said = capsys.readouterr().out
    found = Result.read(tmp_path / "result.json")
    if decided:
        assert found.verdict is Verdict.FASTER
        assert "INTERRUPTED" not in said
        return
    record = f"the record is {tmp_path}/result.json"
    assert said == f"{found.workload} · {found.label}  INTERRUPTED (SIGTERM) during measurement: {record}\n"
    assert found.headline == "ERROR: interrupted (SIGTERM) during measurement"
    assert (found.verdict, found.speedup, found.error and found.error.type) == (Verdict.ERROR, None, "Interrupted")


def test_a_run_that_is_interrupted_while_it_starts_leaves_one_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = OmegaConf.create({"workload": {"_target_": "optexp.workloads.mlp.Mlp"}, "device": "cpu"})
    recorder.not_built(KeyboardInterrupt("SIGINT"), config, tmp_path, lambda *_: pytest.fail("nothing is shown"))
    assert Result.read(tmp_path / "result.json").headline == "ERROR: interrupted (SIGINT) during its start"
    assert "mlp · baseline  INTERRUPTED (SIGINT) during its start: " in capsys.readouterr().out


def test_a_page_that_cannot_be_made_costs_the_page_and_not_the_verdict() -> None:
    notes: list[str] = []
    with pytest.warns(NotDrawn, match="the report could not be made: KeyError: 'absent'"), drawing("the report", notes):
        _ = dict[str, str]()["absent"]
    assert notes[0].startswith("the report could not be made: KeyError: 'absent' (test_folder.py:")
    with pytest.raises(OSError, match="full"), drawing("the report", notes):
        raise OSError("full")
    assert len(notes) == 1
