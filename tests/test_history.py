"""Records over time: which belong together, what is shown of them, and what `watch` reports."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from random import Random

import pytest

from optexp.commands import history as history_command
from optexp.commands import watch
from optexp.config.watch_list import WatchList
from optexp.errors import ConfigError
from optexp.records.verdict import Verdict
from optexp.reporting import history, recorded, tracking
from optexp.reporting.recorded import Recorded
from optexp.reporting.titles import titles
from optexp.support.interrupting import INTERRUPTED
from tests.test_regression import timed


def records(count: int = 24, at: int = 12, size: float = 0.2, **changed: str) -> list[Recorded]:
    """A series with a step, the newest first, as the store gives it."""
    random = Random(1)
    found = []
    for n in range(count):
        result = timed(500 * (1 + size if n >= at else 1) * random.gauss(1, 0.01), seed=n, **changed)
        result.environment["git"] = {"commit": f"{n:040x}"[::-1], "dirty": n == 0}
        found.append(Recorded(f"{n:032x}", datetime(2026, 11, 1) + timedelta(days=n), result))
    return found[::-1]


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """The command handles signals of its process, which here is the tests'."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[Recorded]], None]:
    """Let the store hold these records."""

    def hold(found: Sequence[Recorded]) -> None:
        monkeypatch.setattr(recorded, "records", lambda *asked, **limits: iter(found))

    return hold


def test_series_are_told_apart_and_another_torch_continues_one() -> None:
    pytest.importorskip("ruptures", reason="the extra [watch] is not installed")
    newer = "2.14.0"
    upgraded = [
        replace(record, result=replace(record.result, environment={**record.result.environment, "torch": newer}))
        for record in records()[:12]
    ]
    wide = records(2, **{"workload.dim": "1024"})
    second, first = history.series([*wide, *upgraded, *records()[12:]])
    assert (len(first.records), len(second.records)) == (24, 2)
    assert [one.title for one in (first, second)] == ["mlp dim=512 · fusion", "mlp dim=1024 · fusion"]
    (step,) = first.steps.values()
    assert first.steps.keys() == {f"{12:032x}"}
    assert step.change == pytest.approx(0.2, abs=0.02)


def test_a_record_has_the_interval_of_its_headline_and_keys_of_one_name_are_told_apart() -> None:
    (record,) = records(1)
    assert record.result.speedup
    record.result.speedup = replace(record.result.speedup, low=2.5279, high=3.7)  # 2.53 would promise too much
    (one,) = history.series([record])
    assert history.row(one, record)[3] == "2.52 to 3.70"
    modes = [records(1, **{"workload.mode": name, "mode": name})[0].result for name in ("a", "b")]
    assert [title.split(" ", 1)[1] for title in titles(modes)] == [f"workload.mode={n} mode={n}" for n in ("a", "b")]


def test_the_command_shows_a_table_and_a_picture(
    stored: Callable[[Sequence[Recorded]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = records(1)[0].result
    refused.verdict = Verdict.INVALID
    refused.withhold()
    stored([Recorded("f" * 32, datetime(2026, 12, 24), refused), *records()])
    assert history_command.main(["workload=mlp", "strategy=fusion", "--plot", str(tmp_path / "history.png")]) == 0
    said = capsys.readouterr().out
    assert "mlp · fusion, 25 records" in said
    assert "2026-11-01 00:00   00000000*   FASTER" in said
    assert "2026-12-24 00:00   00000000*   INVALID" in said
    assert (tmp_path / "history.png").stat().st_size > 10_000
    assert history_command.main(["strategy=[fusion]", "--markdown"]) == 0
    assert "| when | commit | verdict | speedup | time/step | step |" in capsys.readouterr().out
    assert history_command.main(["workload.dim=64"]) == 1
    assert "optexp has no record with workload.dim=64" in capsys.readouterr().err
    assert history_command.main(["mlp"]) == 1
    assert "write key=value" in capsys.readouterr().err


def test_a_round_reports_a_step_once(
    stored: Callable[[Sequence[Recorded]], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("ruptures", reason="the extra [watch] is not installed")
    monkeypatch.chdir(tmp_path)
    typed: list[str] = []
    marked: list[str] = []
    status = 0
    monkeypatch.setattr(watch, "compare", lambda text, experiment: typed.append(f"{text} in {experiment}") or status)

    class Run:
        def log_batch(self, tags: dict[str, str]) -> None:
            marked.extend(tags.values())

    monkeypatch.setattr(tracking, "reopen", lambda store, run_id: Run())
    listed = tmp_path / "list.yaml"
    listed.write_text("comparisons: [workload=mlp strategy=fusion]\non_alert: echo alert $OPTEXP_ALERT_CHANGE\n")
    stored(records())
    assert watch.main([str(listed), "--once"]) == 5
    said = capfd.readouterr().out
    assert "mlp · fusion: 498 µs → 601 µs a step (+20.7%)" in said
    assert "since 2026-11-13 00:00, commit c0000000" in said
    assert "alert 1." in said
    assert typed == ["workload=mlp strategy=fusion in watch"]
    assert len(marked) == 1
    assert (tmp_path / "history.png").is_file()

    stored([replace(r, tags={watch.TAG: marked[0]} if r.started.day == 14 else {}) for r in records()])
    assert watch.main([str(listed), "--once"]) == 0  # though the step is now seen a record earlier
    stored(records(size=-0.2))
    assert watch.main([str(listed), "--once"]) == 0
    said = capfd.readouterr().out
    assert "401 µs a step (-19.5%)" in said
    assert "alert" not in said
    status = 1
    assert watch.main([str(listed), "--once"]) == 1
    assert "status 1: workload=mlp strategy=fusion" in capfd.readouterr().err
    status = 3
    assert watch.main([str(listed), "--once"]) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("comparisons: []", "list.yaml: there are no comparisons: write comparisons"),
        ("- workload=mlp", "list.yaml has no keys"),
        ("comparison: [workload=mlp]", "did you mean comparisons"),
        ("comparisons: [workload=mlp]\nplot: [1]", "list.yaml.plot"),
        ("comparisons: [", "cannot be read"),
    ],
)
def test_a_mistake_in_the_list_is_one_sentence(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        WatchList.read(tmp_path / "list.yaml")


def test_a_missing_list_and_a_wrong_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert watch.main([str(tmp_path / "none.yaml"), "--once"]) == 1
    assert "none.yaml cannot be read" in capsys.readouterr().err
    (tmp_path / "list.yaml").write_text("comparisons: [workload=mlp]")
    assert watch.main([str(tmp_path / "list.yaml"), "--every", "soon"]) == 1
    assert "--every=soon is no time" in capsys.readouterr().err


def test_an_interrupted_round_lets_its_comparison_end_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison gets SIGTERM's news as SIGINT, and is waited for."""
    pytest.importorskip("ruptures", reason="the extra [watch] is not installed")
    told: list[str] = []

    class Child:
        def __init__(self, command: list[str]) -> None:
            told.append(" ".join(command[1:]))

        def wait(self) -> int:
            told.append("wait")
            if told.count("wait") == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return 0

        def send_signal(self, number: int) -> None:
            told.append(signal.Signals(number).name)

    monkeypatch.setattr(subprocess, "Popen", Child)
    (tmp_path / "list.yaml").write_text("comparisons: [workload=mlp]")
    assert watch.main([str(tmp_path / "list.yaml")]) == INTERRUPTED
    assert told == ["-m optexp workload=mlp tracking.experiment=watch", "wait", "SIGINT", "wait"]
