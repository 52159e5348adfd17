"""Regions and phases: host time as a clock sees it, device time by launch, backward joined, one region alone."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn

import optexp
from optexp.errors import ConfigError
from optexp.profiling.breakdown import breakdown
from optexp.profiling.operators import BACKWARD, by_name
from optexp.profiling.regions import REST, excerpt, phases, regions
from optexp.records.ranges import RangeEntry
from optexp.support.ranges import PHASE, REGION, phase
from optexp.trace import Trace
from tests.profiling.conftest import ChromeTrace
from tests.profiling.recording import undisturbed


def test_host_time_is_what_a_clock_sees(tmp_path: Path) -> None:
    seconds = defaultdict[str, list[float]](list)

    def step() -> None:
        for name, pause_s in (("short", 0.004), ("long", 0.012)):
            start = time.perf_counter()
            with optexp.region(name):
                time.sleep(pause_s)
            seconds[name].append(time.perf_counter() - start)

    trace = undisturbed(step, tmp_path / "trace.json.gz")
    found = {row.name: row for row in regions(trace)}
    assert list(found) == ["short", "long"]
    for name, row in found.items():
        assert row.calls == 1
        assert min(seconds[name]) * 0.97e6 <= (row.host_us or 0) <= max(seconds[name]) * 1.03e6
    assert sum(row.host_share for row in found.values()) == pytest.approx(1.0, abs=0.1)


def test_a_region_inside_itself_counts_once_and_in_another_for_both(tmp_path: Path) -> None:
    def recursive(depth: int) -> None:
        with optexp.region("recursive"):
            time.sleep(0.002)
            if depth:
                recursive(depth - 1)

    def step() -> None:
        with optexp.region("around"):
            recursive(2)

    found = {row.name: row for row in regions(undisturbed(step, tmp_path / "trace.json.gz"))}
    assert found["recursive"].calls == 1
    assert (found["recursive"].host_us or 0) == pytest.approx(found["around"].host_us, rel=0.05)
    assert (found["recursive"].host_us or 0) < 3 * 3 * 2000


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    torch.manual_seed(0)
    first, second = nn.Linear(64, 512), nn.Linear(512, 8)
    x = torch.randn(256, 64)

    def step() -> None:
        with phase("forward"):
            with optexp.region("first"):
                y = first(x).relu()
            with optexp.region("second"):
                loss = second(y).square().mean()
        with phase("backward"):
            loss.backward()

    return undisturbed(step, tmp_path_factory.mktemp("traces") / "trace.json.gz")


def test_backward_functions_belong_to_the_region_of_their_forward_operator(training: Trace) -> None:
    found = {row.name: row for row in regions(training)}
    functions = [op for op in training.ops if op.name.startswith(BACKWARD) and "AccumulateGrad" not in op.name]
    whole = sum(op.duration for op in functions) / len(training.steps)
    both = [found[name].backward_host_us or 0.0 for name in ("first", "second")]
    assert all(both)
    assert sum(both) == pytest.approx(whole, rel=0.02)
    relu = [op.duration for op in functions if "ReluBackward" in op.name]
    assert (found["first"].backward_host_us or 0.0) > sum(relu) / len(training.steps)


def test_phases_and_the_rest_add_up_to_the_step(training: Trace) -> None:
    rows = phases(training)
    assert [row.name for row in rows] == ["forward", "backward", REST]
    assert sum(row.host_share for row in rows) == pytest.approx(1.0, abs=1e-6)
    assert all(row.backward_host_us == 0.0 for row in rows)


def test_one_region_alone_has_its_operators_and_no_other(training: Trace) -> None:
    part = excerpt(training, "first")
    rows = {row.name: row for row in by_name(part.tables)}
    whole = {row.name: row for row in by_name(training)}
    assert rows["aten::linear"].calls == 1
    assert whole["aten::linear"].calls == 2
    assert "aten::relu" in rows
    assert "aten::mean" not in rows
    assert f"{BACKWARD}ReluBackward0" in rows
    assert f"{BACKWARD}MeanBackward0" not in rows
    row = next(row for row in regions(training) if row.name == "first")
    found = breakdown(part.alone)
    assert sum(found.terms.values()) == pytest.approx(1.0, abs=0.01)
    assert found.wall_us == pytest.approx((row.host_us or 0.0) + (row.backward_host_us or 0.0), rel=0.02)


def test_a_region_that_was_not_entered_is_refused_with_those_that_were(training: Trace) -> None:
    with pytest.raises(ConfigError, match=r"thrid: the traced steps never entered.*entered first, second"):
        excerpt(training, "thrid")


# --- on a GPU, from events of its format -------------------------------------------------------------------------


def mark(build: ChromeTrace, name: str, start: float) -> None:
    build.event("user_annotation", name, start, build.host - start)


def rows(trace: Trace) -> dict[str, RangeEntry]:
    return {row.name: row for row in regions(trace)}


def test_device_time_is_that_of_kernels_launched_inside_whenever_they_run(chrome: type[ChromeTrace]) -> None:
    build = chrome()

    def step() -> None:
        build.op("aten::mm", 20.0, 500.0, "gemm")  # the host runs ahead: what follows is launched long before it runs
        start = build.host
        build.op("aten::add", 20.0, 30.0, "add")
        build.op("aten::relu", 20.0, 10.0, "relu")
        mark(build, f"{REGION}tail", start)
        build.op("aten::mul", 20.0, 60.0, "mul")

    row = rows(build.steps(step))["tail"]
    assert (row.device_us, row.host_us, row.kernels, row.calls) == (
        pytest.approx(40.0), pytest.approx(40.0), 2.0, 1.0,
    )  # fmt: skip
    assert row.device_share == pytest.approx(40 / 600)


def test_kernels_of_autograds_thread_count_for_the_forward_region_and_for_the_phase(chrome: type[ChromeTrace]) -> None:
    build = chrome()

    def step() -> None:
        start = build.host
        build.op("aten::mm", 20.0, 100.0, "gemm", **{"Sequence number": build.id})
        number = build.id - 1
        mark(build, f"{REGION}layer", start)
        waits, before = build.host, len(build.events)
        build.op(f"{BACKWARD}MmBackward0", 30.0, 250.0, "gemm_back", **{"Sequence number": number})
        build.op(f"{BACKWARD}torch::autograd::AccumulateGrad", 10.0, 5.0, "accumulate")
        for event in build.events[before:]:
            event["tid"] = 99 if event["cat"] != "kernel" else event["tid"]
        mark(build, f"{PHASE}backward", waits)

    trace = build.steps(step)
    row = rows(trace)["layer"]
    assert (row.device_us, row.backward_device_us) == (pytest.approx(100.0), pytest.approx(250.0))
    assert (row.host_us, row.backward_host_us) == (pytest.approx(20.0), pytest.approx(30.0))
    backward, rest = phases(trace)
    assert (backward.name, backward.device_us, backward.kernels) == ("backward", pytest.approx(255.0), 2.0)
    assert (rest.name, rest.device_us) == (REST, pytest.approx(100.0))


def test_time_of_a_region_alone_has_its_gaps_and_no_other(chrome: type[ChromeTrace]) -> None:
    build = chrome()

    def step() -> None:
        build.op("aten::mm", 20.0, 100.0, "gemm")
        build.synchronise()
        build.spend("cpu_op", "python", 300.0)  # a gap outside
        start = build.host
        for _ in range(3):
            build.op("aten::add", 40.0, 10.0, "add", grid=16)  # the host is late with each
        mark(build, f"{REGION}slow", start)
        build.synchronise()
        build.spend("cpu_op", "python", 200.0)

    trace = build.steps(step)
    whole, part = breakdown(trace), breakdown(excerpt(trace, "slow").alone)
    assert sum(part.terms.values()) == pytest.approx(1.0, abs=0.01)
    assert part.kernels == 3
    assert part.wall_us == pytest.approx(120.0, abs=5.0)  # what the host takes for three operators
    assert part.us("dispatch") == pytest.approx(90.0, abs=5.0)
    assert whole.us("dispatch") + whole.us("synchronisation") > 500


def test_a_region_that_runs_while_the_host_is_elsewhere_has_no_gap(chrome: type[ChromeTrace]) -> None:
    build = chrome()

    def step() -> None:
        build.op("aten::mm", 20.0, 500.0, "gemm")
        start = build.host
        build.op("aten::add", 20.0, 30.0, "add")
        build.op("aten::relu", 20.0, 10.0, "relu")
        mark(build, f"{REGION}tail", start)
        build.op("aten::mul", 20.0, 60.0, "mul")
        build.synchronise()

    part = breakdown(excerpt(build.steps(step), "tail").alone)
    assert part.wall_us == pytest.approx(40.0)
    assert part.busy == pytest.approx(1.0)


def test_a_region_without_work_costs_what_the_device_idles_meanwhile(chrome: type[ChromeTrace]) -> None:
    build = chrome()

    def step() -> None:
        build.op("aten::mm", 20.0, 100.0, "gemm")  # runs until 113
        start = build.host
        build.spend("cpu_op", "python", 200.0)
        mark(build, f"{REGION}thinking", start)
        build.op("aten::mul", 20.0, 60.0, "mul")
        build.synchronise()

    trace = build.steps(step)
    assert rows(trace)["thinking"].device_us == 0.0
    part = excerpt(trace, "thinking")
    assert breakdown(part.alone).wall_us == pytest.approx(107.0, abs=1.0)
    assert not part.tables.kernels
