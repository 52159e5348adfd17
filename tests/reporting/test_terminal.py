"""What a person sees: every verdict says what it is, and no speedup where there is none."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from optexp.records.measurement import About, Cache, Control, Measurement, Severity, Watch
from optexp.records.profile import ArmProfile, ProfileRecord
from optexp.reporting import ranking, summary, terminal
from optexp.reporting.titles import titles
from optexp.result import ArmSummary, Engagement, Problem, Result, Verdict
from optexp.support import units

RESULTS = {path.stem.upper(): Result.read(path) for path in (Path(__file__).parents[1] / "results").glob("*.json")}
CONTROL_CODE = re.compile(r"\x1b|\r")


def shown(result: Result, capsys: pytest.CaptureFixture[str]) -> str:
    terminal.show(result, Path(__file__).parents[1])
    return capsys.readouterr().out


def on(is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=120)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_there_is_an_example_of_every_verdict() -> None:
    assert set(RESULTS) == set(Verdict)


@pytest.mark.parametrize("verdict", Verdict)
def test_a_verdict_begins_with_its_headline_and_leaves_no_control_codes_in_a_pipe(
    verdict: Verdict, capsys: pytest.CaptureFixture[str]
) -> None:
    result = RESULTS[verdict]
    text = shown(result, capsys)
    assert text.splitlines()[0] == f"{result.workload} · {result.label}  {result.headline}"
    assert not CONTROL_CODE.search(text)


@pytest.mark.parametrize("verdict", [v for v in Verdict if not v.measured and v is not Verdict.PROFILED])
def test_without_a_measurement_no_figures_of_time_are_shown(
    verdict: Verdict, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(RESULTS[verdict], capsys)
    for trace in ("time/step", "candidate  ", "µs", "faster", "paid back"):
        assert trace not in text


@pytest.mark.parametrize(("watchdog", "helps"), [("slow start", True), ("cores", True), ("work aside", False)])
def test_a_quiet_machine_is_advised_where_it_would_help(watchdog: str, helps: bool) -> None:
    about = About.MACHINE if helps else About.ARMS
    barked = Watch(watchdog, False, "", Severity.REFUSES, about)
    result = replace(RESULTS[Verdict.INVALID], objections=[barked])
    assert summary.what_now(result).endswith("when the machine is quiet.") is helps
    assert summary.what_now(replace(result, objections=[])) == "The measurement is not shown."
    assert summary.what_now(RESULTS[Verdict.FASTER]) == ""


def test_controls_that_failed_are_not_among_those_that_passed() -> None:
    control = Control("same", True, True, "", 1.0)
    found = Measurement(controls={"A/A": control, "delay": control})
    result = replace(RESULTS[Verdict.FASTER], measurement=found, placement=None)
    assert summary.measured(result) == "controls passed (A/A, delay)"
    found.controls["delay"] = replace(control, ok=False)
    assert summary.measured(result) == "of the controls only these passed (A/A)"


def test_percentiles_that_too_few_steps_give_are_left_out() -> None:
    result = replace(RESULTS[Verdict.FASTER])
    result.baseline = replace(result.baseline, alone_us=800.0, p95_us=900.0)
    result.candidate = replace(result.candidate, alone_us=130.0, p95_us=None)
    alone = [row.name for row in summary.rows(result, details=True) if "alone" in row.name]
    assert alone == ["one step alone, median"]
    assert not [row for row in summary.rows(RESULTS[Verdict.FASTER], details=True) if "alone" in row.name]


def test_single_steps_are_told_where_they_gain_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    result = replace(RESULTS[Verdict.FASTER])
    assert result.speedup is not None
    for alone_us, text in ((800.0, ""), (2000.0, "a step that is waited for is 2.50× faster (2 ms → 800 µs)")):
        result.baseline = replace(result.baseline, alone_us=alone_us)
        result.candidate = replace(result.candidate, alone_us=alone_us / result.speedup.estimate if not text else 800.0)
        assert summary.single(result) == text
    assert "a step that is waited for" in shown(result, capsys)
    assert summary.single(replace(result, verdict=Verdict.INCONCLUSIVE)) == ""


def test_an_undecided_verdict_is_not_explained(capsys: pytest.CaptureFixture[str]) -> None:
    said = "Copies: 1 ms → 2 ms a step"
    assert said in shown(replace(RESULTS[Verdict.FASTER], explanation=[said]), capsys)
    assert said not in shown(replace(RESULTS[Verdict.INCONCLUSIVE], explanation=[said]), capsys)


def test_a_few_bytes_are_not_shown() -> None:
    profile = ProfileRecord(ArmProfile({"memory_pinned_mib": 9 / 2**20}), ArmProfile())
    few = replace(RESULTS[Verdict.FASTER].candidate, peak_mib=36 / 2**20)
    result = replace(RESULTS[Verdict.FASTER], profile=profile, baseline=few, candidate=few)
    assert summary.memory(result) == ""
    assert not {"pinned on the host", "peak memory"} & {row.name for row in summary.rows(result, details=True)}


def test_memory_beyond_the_peak_is_shown_where_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"memory_reserved_mib": 64.0, "memory_process_mib": 2048.0}
    profile = ProfileRecord(ArmProfile(figures), ArmProfile({"memory_reserved_mib": 32.0}))
    result = replace(RESULTS[Verdict.FASTER], profile=profile)
    rows = {row.name: (row.baseline, row.candidate) for row in summary.rows(result, details=True)}
    assert rows["reserved by torch"] == ("64 MiB", "32 MiB")
    assert rows["of the process (NVML)"] == ("2 GiB", "")
    assert "pinned on the host" not in rows
    assert "reserved by torch 64 MiB → 32 MiB, of the process (NVML) 2 GiB" in shown(result, capsys)


def test_times_say_whose_clock_took_them() -> None:
    result = RESULTS[Verdict.FASTER]
    names = [row.name for row in summary.rows(result, details=True)]
    assert names[:2] == ["time/step (wall clock of the host)", "device time/step (span between events, warm L2)"]
    cold = replace(result, measurement=Measurement(l2=Cache("cold")))
    assert summary.rows(cold, details=True)[0].name == "time/step (device, each step by events, emptied L2)"


def test_what_the_low_end_of_the_interval_pays_back_is_told() -> None:
    text = summary.cost(RESULTS[Verdict.FASTER])
    assert "paid back after 2,405 steps (warm caches, 2,420 at the low end of the interval)" in text
    assert "saves 10.4 min in 1,000,000 steps (saves 10.3 min at the low end of the interval)" in text


def test_shapes_that_take_turns_are_counted() -> None:
    result = replace(
        RESULTS[Verdict.FASTER], measurement=None, placement=None, config={"workload.shapes": [{"B": 16}, {"B": 64}]}
    )
    assert summary.measured(result) == "2 shapes in turn"


def test_unsupported_is_its_reason_and_its_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "report.html").touch()
    terminal.show(RESULTS[Verdict.UNSUPPORTED], tmp_path)
    _, _, report = capsys.readouterr().out.strip().splitlines()
    assert report.split() == ["report", str(tmp_path / "report.html")]


def test_an_error_shows_the_end_of_the_arms_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    result = RESULTS[Verdict.ERROR]
    long = replace(result, error=Problem("KeyError", "x", "first\n" + "frame\n" * 50 + "KeyError: 'x'"))
    text = shown(long, capsys)
    assert "KeyError: 'x'" in text
    assert "first" not in text


def test_a_measured_verdict_compares_the_arms(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [re.split(r"\s{2,}", line.strip()) for line in shown(RESULTS[Verdict.FASTER], capsys).splitlines()]
    assert ["time/step", "752 µs", "127 µs", "5.92× faster"] in lines
    assert ["throughput", "340 k/s", "2.01 M/s", "5.92× more"] in lines
    assert ["peak memory", "41.5 MiB", "48.9 MiB", "1.18× more"] in lines
    assert ["kernels/step", "47", "47", "same"] in lines
    labels = [line[0] for line in lines]
    assert [label for label in labels if label in ("verified", "evidence", "why", "cost", "try next")] == [
        "verified", "evidence", "why", "cost", "try next",
    ]  # fmt: skip


def test_a_verified_stack_shows_that_it_engaged(capsys: pytest.CaptureFixture[str]) -> None:
    result = replace(RESULTS[Verdict.VERIFIED], evidence=[Engagement("fusion", True, "2 graphs compiled")])
    lines = [re.split(r" {2,}", line.strip()) for line in shown(result, capsys).splitlines()]
    assert ["evidence", "fusion: 2 graphs compiled"] in lines


def test_a_note_is_left_out_only_where_the_headline_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    verified = RESULTS[Verdict.VERIFIED]
    said = verified.headline.partition(": ")[2]
    text = shown(replace(verified, notes=["parameters keep their precisions", f"amp: {said}"]), capsys)
    assert "note      parameters keep their precisions" in text
    assert "amp: " not in text


@pytest.mark.parametrize("verdict", Verdict)
def test_a_blank_line_stands_below_the_headline(verdict: Verdict, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(RESULTS[verdict], capsys)
    opening = len(terminal.opening(RESULTS[verdict]))
    assert text.splitlines()[opening] == ""


def test_a_slower_candidate_is_never_called_faster(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(RESULTS[Verdict.SLOWER], capsys)
    assert "1.11× slower" in text
    assert "faster" not in text
    assert "never paid back" in text


def test_an_undecided_ratio_is_not_called_a_gain(capsys: pytest.CaptureFixture[str]) -> None:
    setups = {row.name: row.change for row in summary.rows(RESULTS[Verdict.INCONCLUSIVE], details=True)}
    assert setups["set-up"] == "undecided"
    text = shown(RESULTS[Verdict.INCONCLUSIVE], capsys)
    assert "faster" not in text
    assert "paid back" not in text
    assert text.count("undecided") == 2  # time and throughput; memory is counted, not estimated


def test_a_profile_shows_bottlenecks_and_what_fits_them(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(RESULTS[Verdict.PROFILED], capsys)
    for part in ("dispatch", "71%", "aten::addmm", "many_small_kernels", "cuda_graph, fusion", "try next"):
        assert part in text


def test_the_record_is_named_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.html").touch()
    terminal.show(RESULTS[Verdict.FASTER], tmp_path / "out")
    text = capsys.readouterr().out
    assert re.search(r"report +out/report.html", text)
    assert "result.json" not in text


def test_brackets_of_a_strategy_are_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.output().print(terminal.sweep_table(ranking.rows([RESULTS[Verdict.INVALID]])))
    assert "fusion[mode=default]" in capsys.readouterr().out


def test_no_line_of_a_pipe_ends_in_blanks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for result in RESULTS.values():
        terminal.show(result, tmp_path)
    terminal.output().print(terminal.sweep_table(ranking.rows(list(RESULTS.values()))))
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert not [line for line in lines if line != line.rstrip()]


def test_a_sweep_is_ranked_by_the_lower_end_and_failures_come_last() -> None:
    ranked = [result.verdict for result in summary.ranked(RESULTS.values())]
    assert ranked[:4] == [Verdict.FASTER, Verdict.SAME, Verdict.INCONCLUSIVE, Verdict.SLOWER]
    assert ranked[-1] == Verdict.ERROR


def test_jobs_of_a_sweep_are_told_apart_by_what_differs() -> None:
    first = RESULTS[Verdict.FASTER]
    second = replace(first, config={**first.config, "workload.dim": 512})
    other = replace(first, workload="gelu", config={"workload": "gelu", "workload.size": 1024})
    lost = replace(first, config={}, fingerprint="")
    assert titles([first, second, other, lost]) == ["mlp dim=256", "mlp dim=512", "gelu", "mlp"]
    shapes = [replace(first, config={"workload": "mlp", "workload.shapes": [{"B": size}]}) for size in (16, None)]
    assert titles(shapes) == ["mlp shapes=[{B: 16}]", "mlp shapes=[{B: null}]"]


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (units.microseconds, 112.4, "112 µs"),
        (units.microseconds, 4210.0, "4.21 ms"),
        (units.mebibytes, 412.0, "412 MiB"),
        (units.mebibytes, 1023.6, "1024 MiB"),
        (units.mebibytes, 1536.0, "1.5 GiB"),
        (units.mebibytes, 0.5, "512 KiB"),
        (units.mebibytes, 9 / 2**20, "under 1 KiB"),
        (units.mebibytes, 0.0, "none"),
        (units.rate, 342.0, "342/s"),
        (units.rate, 340_500.0, "340 k/s"),
        (units.rate, 2.1e6, "2.1 M/s"),
        (units.count, 1234.0, "1,234"),
        (units.share, 0.0312, "3.1%"),
        (units.share, 0.713, "71%"),
    ],
)
def test_units_are_human(function: object, value: float, text: str) -> None:
    assert callable(function)
    assert function(value) == text


def test_progress_in_a_pipe_is_one_plain_line_a_phase() -> None:
    console = on(is_terminal=False)
    with terminal.Progress(console=console) as progress:
        for process in range(3):
            progress.phase("arms", f"process {process}")
            progress.phase("measurement", f"process {process}")
            progress.update("measuring", remaining_s=10)
    assert written(console).splitlines() == [
        "arms: process 0",
        "measurement: process 0",
        "measurement: measuring, about 10 s to go",
    ]


def test_progress_in_a_pipe_is_not_silent_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    console, time = on(is_terminal=False), iter([1000.0, 1059.0, 1062.0, 1062.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(time))  # type: ignore[attr-defined]
    with terminal.Progress(console=console) as progress:
        progress.phase("measurement", "pairs")  # said at 1000 s
        for done in (1, 2):
            progress.update("pairs", done, 10)
    assert written(console) == "measurement: pairs\nmeasurement: pairs, 2 of 10\n"


def test_progress_on_a_terminal_says_how_long_it_may_take() -> None:
    console = on(is_terminal=True)
    with terminal.Progress(console=console) as progress:
        progress.phase("verification", "fresh inputs")
        progress.update("verifying", 3, 10, remaining_s=42)
        progress.live.refresh()
    text = written(console)
    assert "verification: verifying, 3 of 10" in text
    assert "about 40 s to go" in text


def test_progress_may_be_stopped_twice() -> None:
    with terminal.Progress(console=on(is_terminal=True)) as progress:
        progress.stop()


def test_a_study_breaks_sentences_and_no_other_word() -> None:
    heads = ["variant", "strategy", "time/step", "speedup", "verdict"]
    row = [
        "functional",
        "fusion[backend=torchscript]",
        "131 µs",
        "1.00× (0.993 to 0.997)",
        "NOT_ENGAGED: fused nothing",
    ]
    text = io.StringIO()
    Console(file=text, width=88).print(terminal.study_table("How much?", heads, [row]))
    assert "fusion[backend=torchscript]" in text.getvalue()
    assert "1.00× (0.993 to 0.997)" in text.getvalue()


def test_memory_that_says_nothing_is_left_out() -> None:
    result = RESULTS[Verdict.FASTER]
    arm = ArmProfile({"memory_pinned_mib": 9 / 2**20, "memory_reserved_mib": 64.0})
    shown = replace(
        result, profile=ProfileRecord(arm, arm),
        baseline=ArmSummary(peak_mib=26 / 2**20), candidate=ArmSummary(peak_mib=2.5),
    )  # fmt: skip
    assert summary.memory(shown) == "reserved by torch 64 MiB → 64 MiB"
    (peak,) = [row for row in summary.rows(shown) if row.name == "peak memory"]
    assert (peak.baseline, peak.candidate, peak.change) == ("under 1 KiB", "2.5 MiB", "")
