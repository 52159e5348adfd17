"""Tables of a GPU's trace: calls of its API, copies by kind, and launches by configuration, per step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from optexp.profiling.device_tables import api_calls, copies, launches
from optexp.profiling.tables import tables
from optexp.reporting import operators_page
from optexp.trace import Trace


@pytest.fixture
def stepped(chrome: Callable[[], Any]) -> Trace:
    """A step of two kernels, one copy from pageable memory, and a graph of three kernels."""
    build = chrome()

    def step() -> None:
        build.copy("Memcpy HtoD (Pageable -> Device)", 40.0, 2**20)
        build.op("aten::mm", host_us=40.0, gpu_us=30.0, kernel="void gemm<128>(float*)", grid=264)
        build.op("aten::add", host_us=20.0, gpu_us=5.0, kernel="void add<4>(float*)", grid=66)
        build.graph(kernels=3, kernel_us=2.0, kernel="void small(float*)", grid=16)

    return build.steps(step, count=4)  # type: ignore[no-any-return]


def test_launches_by_configuration(stepped: Trace) -> None:
    rows = {row.name: row for row in launches(stepped)}
    assert [row.name for row in launches(stepped)] == ["gemm", "small", "add"]
    assert (rows["gemm"].grid, rows["gemm"].block, rows["gemm"].calls) == ("264×1×1", "128×1×1", 1)
    assert (rows["gemm"].waves, rows["add"].waves) == (2.0, 0.5)
    assert rows["gemm"].us == pytest.approx(30.0)
    assert rows["gemm"].launch_us == pytest.approx(10.0)  # a quarter of the operator's host time
    assert rows["small"].in_graph
    assert (rows["small"].calls, rows["small"].us, rows["small"].launch_us) == (3, pytest.approx(6.0), None)


def test_copies_by_kind(stepped: Trace) -> None:
    (row,) = copies(stepped)
    assert (row.kind, row.count, row.bytes, row.pageable) == ("HtoD", 1, 2**20, 2**20)
    assert row.us == pytest.approx(40.0)


def test_calls_of_the_api_add_up_to_one(stepped: Trace) -> None:
    rows = {row.name: row for row in api_calls(stepped)}
    assert sum(row.share for row in rows.values()) == pytest.approx(1)
    assert (rows["cudaLaunchKernel"].calls, rows["cudaGraphLaunch"].calls) == (2, 1)
    assert rows["cudaLaunchKernel"].us == pytest.approx(15.0)


def test_without_times_counts_and_sizes_stay(stepped: Trace) -> None:
    found = tables({}, stepped).untimed()
    times = [*(row.us for row in found.api), *(row.us for row in found.copies), *(row.us for row in found.launches)]
    assert times
    assert not any(times)
    assert found.copies[0].bytes == 2**20
    assert found.launches[0].waves == 2.0


def test_the_page_has_each_table_and_a_cpu_has_none(stepped: Trace) -> None:
    page = operators_page.markdown("x", tables({}, stepped))
    assert "| `gemm` | 264×1×1 | 128×1×1 | 1 | 2 | 30 µs | 10 µs |" in page
    assert "| HtoD | 1 | 1 | 1 | 40 µs |" in page
    assert "`small` (in a graph)" in page
    assert "## CUDA API" in page
    bare = operators_page.markdown("x", tables({}, Trace(stepped.steps)))
    assert "## Launches" not in bare
    assert "## Copies" not in bare
