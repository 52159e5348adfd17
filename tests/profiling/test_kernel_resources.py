"""Occupancy from registers, shared memory and block, and the table of a step's kernels with compiled code."""

from __future__ import annotations

import pytest

from optexp.profiling.kernel_resources import kernel_resources, ran
from optexp.profiling.occupancy import occupancy, resident_blocks
from optexp.records.compiler import DeviceLimits
from optexp.workers.messages import KernelCode
from tests.profiling.conftest import ChromeTrace

H100 = DeviceLimits(multiprocessors=132, threads=2048, registers=65536, shared_bytes=233472, blocks=32)


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "share", "blocks", "limit"),
    [
        (256, 32, 0, 1.0, 8, "threads"),
        (256, 64, 0, 0.5, 4, "registers"),
        (128, 255, 0, 0.125, 2, "registers"),
        (256, 32, 100 * 1024, 0.25, 2, "shared memory"),
        (32, 16, 0, 0.5, 32, "blocks"),
        (100, 16, 0, 1.0, 16, "threads"),  # four warps, the last one not full
    ],
)
def test_occupancy_is_bound_by_the_scarcest_resource(
    threads: int, registers: int, shared: int, share: float, blocks: int, limit: str
) -> None:
    found = occupancy(H100, threads, registers, shared)
    assert found is not None
    assert (found.share, found.blocks_per_sm, found.limited_by) == (share, blocks, limit)


def test_a_block_that_does_not_fit_has_no_occupancy() -> None:
    assert occupancy(H100, 1024, 255, 0) is None
    assert resident_blocks((9, 0)) == 32
    assert resident_blocks((99, 0)) is None


def traced() -> ChromeTrace:
    """Steps with a kernel of Inductor's, one of a library and one of ours, as a GPU's trace shows them."""
    chrome = ChromeTrace()
    for name, us, grid, block, registers, shared in (
        ("triton_poi_fused_add_0", 40.0, [528, 1, 1], [256, 1, 1], 32, 0),
        ("void cutlass::Kernel2<cutlass_80_tensorop>(Params)", 90.0, [132, 2, 1], [128, 1, 1], 168, 99328),
        ("void optexp::gelu_forward<float, 4>(float const*, float*, long)", 10.0, [66, 1, 1], [64, 1, 1], 20, 0),
    ):
        chrome.event(
            "kernel", name, chrome.gpu, us, stream=7, grid=grid, block=block,
            **{"registers per thread": registers, "shared memory": shared},
        )  # fmt: skip
        chrome.gpu += us
    return chrome


def test_the_table_joins_launches_with_code_and_limits() -> None:
    chrome = ChromeTrace()
    rows = traced().events
    trace = chrome.steps(lambda: chrome.events.extend({**row, "ts": row["ts"] + chrome.host} for row in rows), count=1)
    assert ran(trace)[0][1] == 4  # warps of the kernel with most time
    assert ("triton_poi_fused_add_0", 8) in ran(trace)
    code = KernelCode("triton_poi_fused_add_0", "Inductor", 8, 32, 2, 0, {"ptx": "add.ptx"})
    library, inductor, ours = kernel_resources(trace, [code], H100, "code/candidate", most=9)
    assert (library.origin, library.registers, library.shared_bytes) == ("library", 168, 99328)
    assert (library.blocks_per_sm, library.limited_by) == (2, "shared memory")
    assert library.waves == pytest.approx(264 / (2 * 132))
    assert (inductor.origin, inductor.spills, inductor.occupancy) == ("Inductor", 2, 1.0)
    assert inductor.files == {"ptx": "code/candidate/add.ptx"}
    assert (ours.origin, ours.grid, ours.block, ours.spills) == ("CUDA C++", "66×1×1", "64×1×1", None)
    without = kernel_resources(trace, [], None, "", most=1)
    assert [(row.occupancy, row.waves, row.registers) for row in without] == [(None, None, 168)]
