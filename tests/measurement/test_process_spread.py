"""One process does not show how processes differ: what is known of that widens its interval."""

from __future__ import annotations

import json
from math import log
from pathlib import Path
from random import Random
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from optexp.comparison import spread_of_processes
from optexp.measurement import process_spread, statistics
from optexp.measurement.clock import Timing
from optexp.measurement.process_spread import PRIORS, Seen, StepKind, expected, remember, remembered, seen
from optexp.measurement.samples import Pair, Sample
from optexp.records.measurement import ProcessSpread
from optexp.records.verdict import Verdict

CLAIMS = (Verdict.FASTER, Verdict.SLOWER)


def test_equal_programs_are_not_told_apart_by_the_luck_of_one_process() -> None:
    """Processes differ by 3 %, their blocks by 1 %: without the spread, most of these would be called different."""
    random, wrong, blind = Random(3), 0, 0
    for _ in range(600):
        known = [
            found for _ in range(2) if (found := seen(StepKind.CPU, 100.0, [random.gauss(0, 0.03) for _ in range(6)]))
        ]
        spread, luck = expected(known, StepKind.CPU, 90.0), random.gauss(0, 0.03)
        blocks = [[random.gauss(luck, 0.01) for _ in range(30)]]
        wrong += statistics.verdict(blocks, 0.99, 0.01, spread)[0] in CLAIMS
        blind += statistics.verdict(blocks, 0.99, 0.01)[0] in CLAIMS
    assert wrong <= 8
    assert blind > 300


def test_equal_programs_are_not_told_apart_by_the_moment_at_which_blocks_suffice() -> None:
    random, spread, wrong, counts = Random(7), expected([], StepKind.CPU, 100.0), 0, []
    for _ in range(600):
        luck = random.gauss(0, spread.deviation)
        blocks = [random.gauss(luck, 0.01) for _ in range(10)]
        while len(blocks) < 30 and not statistics.blocks_suffice(blocks, 0.99, spread):
            blocks.append(random.gauss(luck, 0.01))
        counts.append(len(blocks))
        wrong += statistics.verdict([blocks], 0.99, 0.01, spread)[0] in CLAIMS
    assert wrong <= 8
    assert 10 < sum(counts) / len(counts) < 15


@pytest.mark.parametrize(
    ("scatter", "suffices"),
    [(0.002, True), (0.03, False)],
    ids=["steady blocks", "blocks that scatter as processes do"],
)
def test_the_size_of_a_gain_is_no_reason_to_end(scatter: float, suffices: bool) -> None:
    spread = expected([], StepKind.CPU, 100.0)
    for gain in (0.0, 1.0):
        blocks = [random.gauss(gain, scatter) for random in (Random(2),) for _ in range(12)]
        assert statistics.blocks_suffice(blocks, 0.99, spread) is suffices


def test_a_large_gain_is_still_found() -> None:
    random, spread = Random(4), expected([], StepKind.CPU, 100.0)
    blocks = [[random.gauss(log(1.5), 0.02) for _ in range(30)]]
    verdict, interval = statistics.verdict(blocks, 0.99, 0.01, spread)
    assert verdict is Verdict.FASTER
    assert interval.estimate == median(blocks[0])
    assert 0.25 < interval.low < 0.35


def test_the_interval_is_never_narrower_than_over_the_blocks() -> None:
    blocks = [Random(5).gauss(0, 0.01) for _ in range(30)]
    inner = statistics.over_blocks(blocks, 0.99)
    for deviation, freedom in ((0.0, 10**6), (0.001, 8), (0.1, 3)):
        outer = statistics.interval([blocks], 0.99, ProcessSpread(deviation, freedom))
        assert outer.low <= inner.low + 1e-9
        assert outer.high >= inner.high - 1e-9


def test_only_steps_like_these_are_pooled() -> None:
    wide = Seen(StepKind.CPU, 100.0, 0.1**2, 100)
    assert expected([wide], StepKind.CPU, 100.0).deviation == pytest.approx(0.1, rel=0.05)
    for kind, step_us in ((StepKind.CPU, 1000.0), (StepKind.CPU, 10.0), (StepKind.HOST_BOUND, 100.0)):
        found = expected([wide], kind, step_us)
        assert found.deviation == pytest.approx(PRIORS[kind].deviation)
        assert found.freedom == PRIORS[kind].freedom


def test_what_is_remembered_is_read_and_what_is_broken_is_nothing(tmp_path: Path) -> None:
    path, found = tmp_path / "new" / "spread.json", Seen(StepKind.DEVICE_BOUND, 374.0, 4e-6, 6)
    assert remembered(path) == []
    for _ in range(process_spread.MOST + 5):
        remember(path, found)
    assert remembered(path) == [found] * process_spread.MOST
    path.write_text('[{"kind": "no such"}]')
    assert remembered(path) == []
    assert seen(StepKind.CPU, 1.0, [0.1, 0.2]) is None


def session(folder: Path, monkeypatch: pytest.MonkeyPatch, busy_us: float | None = None, gpu: bool = False) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    arm = SimpleNamespace(busy_us=busy_us)
    environment, measurement = {"cpu": "a processor", "gpu_uuid": "GPU-1"}, SimpleNamespace(watchdogs=[])
    result = SimpleNamespace(baseline=arm, candidate=arm, environment=environment, measurement=measurement)
    return SimpleNamespace(result=result, machine=SimpleNamespace(on_gpu=gpu, cores=[0, 1]), isolated=True)


def sample(log_ratio: float, wall_s: float = 1e-4) -> Any:
    timing = SimpleNamespace(wall_s=wall_s, cold=False)
    pair = SimpleNamespace(baseline=timing, candidate=timing)
    return SimpleNamespace(kept=[pair] * 10, log_ratio=log_ratio)


@pytest.mark.parametrize(
    ("processes", "kinds", "suffice"),
    [(1, ["main"], True), (5, ["main"], False), (1, ["main", "same"], False)],
    ids=["one process", "several", "beside a control"],
)
def test_pairs_of_one_process_may_suffice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, kinds: list[str], suffice: bool
) -> None:
    here, timing = session(tmp_path, monkeypatch), Timing(20, 1e-4, None)
    here.settings = SimpleNamespace(processes_max=processes, confidence=0.99)
    found = Sample([Pair(timing, timing, True, kind) for kind in kinds for _ in range(12)])
    assert spread_of_processes.pairs_suffice(here, found) is suffice


def test_several_processes_leave_what_a_single_one_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = session(tmp_path, monkeypatch)
    before = spread_of_processes.expected(here, [sample(0.0)])
    several = [sample(luck) for luck in (-0.2, -0.1, 0.0, 0.1, 0.2)]
    assert spread_of_processes.expected(here, several) is None
    spread_of_processes.learn(here, several)
    after = spread_of_processes.expected(here, [sample(0.0)])
    assert before is not None
    assert after is not None
    assert after.deviation > 2 * before.deviation
    assert after.freedom == before.freedom + 4
    assert "1 earlier comparison on this device" in after.source


@pytest.mark.parametrize(("busy_us", "kind"), [(99.0, "device"), (50.0, "host"), (None, "host")])
def test_steps_of_a_gpu_are_bound_by_it_or_by_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy_us: float | None, kind: str
) -> None:
    found = spread_of_processes.expected(session(tmp_path, monkeypatch, busy_us, gpu=True), [sample(0.0)])
    assert found is not None
    assert f"{kind}-bound" in found.source


def test_one_comparison_far_from_usual_widens_little() -> None:
    """As of a candidate that is twice as fast in some processes."""
    usual = [Seen(StepKind.CPU, 100.0, 0.03**2, 4)] * 3
    found = expected([*usual, Seen(StepKind.CPU, 100.0, 0.4**2, 4)], StepKind.CPU, 100.0)
    assert found.deviation < 0.07
    noisy = expected([Seen(StepKind.CPU, 100.0, 0.4**2, 4)] * 20, StepKind.CPU, 100.0)
    assert noisy.deviation > 0.35


@pytest.mark.parametrize(
    "changed", [{"variance": -1.0}, {"step_us": 0.0}, {"freedom": 0}, {"freedom": -6}, {"freedom": 10**9}]
)
def test_numbers_that_cannot_be_are_not_read(tmp_path: Path, changed: dict[str, float]) -> None:
    path, row = tmp_path / "spread.json", {"kind": StepKind.CPU, "step_us": 9.0, "variance": 1e-4, "freedom": 4}
    path.write_text(json.dumps([row]))
    assert len(remembered(path)) == 1
    path.write_text(json.dumps([row | changed]))
    assert remembered(path) == []
    path.write_text(json.dumps([row]) + " " * process_spread.MOST_BYTES)
    assert remembered(path) == []


def test_disturbed_comparisons_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, watch = session(tmp_path, monkeypatch), SimpleNamespace(refuses=False, undecides=True)
    here.result.measurement.watchdogs.append(watch)
    spread_of_processes.learn(here, [sample(luck) for luck in (-0.2, 0.0, 0.2)])
    found = spread_of_processes.expected(here, [sample(0.0)])
    assert found is not None
    assert found.freedom == PRIORS[StepKind.CPU].freedom
