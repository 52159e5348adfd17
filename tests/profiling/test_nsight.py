"""Output of the Nsight tools as they print it: messages before the table, quoted columns, thousands, other units."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import pytest

from optexp.profiling import nsight
from optexp.records.nsight import ToolKernel

COLUMNS = (
    "ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size",
    "Device", "CC", "Section Name", "Metric Name", "Metric Unit", "Metric Value", "Rule Name", "Rule Type",
    "Rule Description", "Estimated Speedup Type", "Estimated Speedup",
)  # fmt: skip
ADD = "void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>>(int, T2, T3)"
GEMM = "sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x32"


def launch(index: int, name: str, us: str, unit: str = "ns", sm: str = "12.50", registers: str = "32") -> list[str]:
    """The rows of one launch in the page "details"."""
    start = [str(index), "4711", "python3.12", "127.0.0.1", name, "1", "7", "(128, 1, 1)", "(1024, 1, 1)", "0", "9.0"]
    metrics = [
        ("GPU Speed Of Light Throughput", "DRAM Frequency", "hz", "2,619,000,000.00"),
        ("GPU Speed Of Light Throughput", "Memory Throughput", "%", "91.20"),
        ("GPU Speed Of Light Throughput", "Duration", unit, us),
        ("GPU Speed Of Light Throughput", "Compute (SM) Throughput", "%", sm),
        ("Memory Workload Analysis", "Memory Throughput", "byte/s", "2,943,820,224.72"),
        ("Launch Statistics", "Registers Per Thread", "register/thread", registers),
        ("Occupancy", "Theoretical Occupancy", "%", "100"),
        ("Occupancy", "Achieved Occupancy", "%", "84.75"),
    ]
    rules = [
        ("SpeedOfLight", "SOLBottleneck", "INF", "The kernel is bound by memory.", "", ""),
        ("Occupancy", "AchievedOccupancy", "OPT", "The difference between theory\nand measurement is 15 %.", "local",
         "15.25"),
    ]  # fmt: skip
    rows = [[*start, *metric, "", "", "", "", ""] for metric in metrics]
    rows += [[*start, section, "", "", "", *rest] for section, *rest in rules]
    return [line(row) for row in (rows if index else [list(COLUMNS), *rows])]


def line(cells: Sequence[str]) -> str:
    written = io.StringIO()
    csv.writer(written, quoting=csv.QUOTE_ALL, lineterminator="\n").writerow(cells)
    return written.getvalue()


PAGE = "".join(
    [
        "==PROF== Connected to process 4711 (/usr/bin/python3.12)\n",
        *launch(0, ADD, "12,000"),
        *launch(1, ADD, "14,000", sm="13.50"),
        *launch(2, GEMM, "1.5", unit="ms", registers="168"),
    ]
)


def test_launches_of_one_kernel_are_one_row_with_means() -> None:
    gemm, add = nsight.kernels(PAGE)
    assert add == ToolKernel(
        "vectorized_elementwise_kernel<CUDAFunctor_add>",
        launches=2,
        grid="1024×1×1",
        block="128×1×1",
        us=pytest.approx(13.0),
        sm_percent=pytest.approx(13.0),
        memory_percent=pytest.approx(91.2),
        occupancy_percent=pytest.approx(84.75),
        theoretical_occupancy_percent=pytest.approx(100.0),
        registers=32,
    )
    assert (gemm.name, gemm.us, gemm.registers) == (GEMM, pytest.approx(1500.0), 168)


def test_advice_is_what_a_rule_says_beyond_facts() -> None:
    found = nsight.advice(PAGE)
    assert {row.rule for row in found} == {"AchievedOccupancy"}
    assert len(found) == 2  # one for each kernel
    assert found[0].text == "The difference between theory and measurement is 15 %."
    assert found[0].speedup_percent == 15.25


@pytest.mark.parametrize("text", ["", "==PROF== Connected\n==WARNING== No kernels were profiled.\n"])
def test_no_table_no_rows(text: str) -> None:
    assert nsight.kernels(text) == []
    assert nsight.advice(text) == []


def test_a_refusal_is_told_in_words() -> None:
    denied = (
        "==PROF== Connected to process 1\n==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access"
        " NVIDIA GPU Performance Counters on the target device 0.\n"
    )
    assert "ERR_NVGPUCTRPERM" in nsight.refusal(denied)
    assert nsight.refusal("==ERROR== The application returned an error code (1).\n").endswith("error code (1)")
    assert nsight.refusal("==PROF== Disconnected from process 1\n") == ""


KERNELS = """\
Generating SQLite file baseline.sqlite from baseline.nsys-rep
Processing [baseline.sqlite] with [reports/cuda_gpu_kern_sum.py]...
Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
91.3,28918591,5,5783718.2,5780070.0,5777126,5797542,8313.1,"void burn<float, (int)4>(float *, int, int)"
8.7,2755000,50,55100.0,55000.0,54000,57000,100.5,sm90_gemm
"""
API = """\
Time (%),Total Time (ns),Num Calls,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
81.2,131012864,1,131012864.0,131012864.0,131012864,131012864,0.0,cudaMalloc
"""
COPIES = """\
Time (%),Total Time (ns),Count,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Operation
100.0,1184,1,1184.0,1184.0,1184,1184,0.0,[CUDA memcpy Host-to-Device]
"""
RANGES = """\
Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Style,Range
60.0,2000,2,1000.0,1000.0,900,1100,100.0,PushPop,:attention
"""


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (KERNELS, [("burn", 5, 0.913, 28918.591, 5780.07), ("sm90_gemm", 50, 0.087, 2755.0, 55.0)]),
        (API, [("cudaMalloc", 1, 0.812, 131012.864, 131012.864)]),
        (COPIES, [("[CUDA memcpy Host-to-Device]", 1, 1.0, 1.184, 1.184)]),
        (RANGES, [("attention", 2, 0.6, 2.0, 1.0)]),
        ("SKIPPED: baseline.sqlite does not contain CUDA kernel data.\n", []),
    ],
)
def test_summaries_of_nsight_systems(text: str, rows: list[tuple[object, ...]]) -> None:
    table = nsight.summary("a title", text)
    found = [(row.name, row.calls, row.share, row.total_us, row.median_us) for row in table.rows]
    assert found == [(*row[:2], *map(pytest.approx, row[2:])) for row in rows]


def test_a_real_page_whose_metrics_end_before_the_columns_of_rules() -> None:
    """Nsight Compute's output for a product with a number on an H100."""
    page = (Path(__file__).parent / "ncu_details.csv").read_text()
    (row,) = nsight.kernels(page)
    assert (row.us, row.sm_percent, row.memory_percent, row.registers) == (11.23, 6.16, 49.57, 32)
    assert (row.occupancy_percent, row.theoretical_occupancy_percent) == (72.01, 100)
    assert nsight.advice(page)
