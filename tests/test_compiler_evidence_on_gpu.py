"""Compiler evidence on a GPU: stages of a compiled step, resources of Inductor's, a user's and libraries' kernels."""

from __future__ import annotations

import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from optexp.comparison import runner
from optexp.config import search_path
from optexp.kernelkit import triton_code
from optexp.profiling.compiler_log import read
from optexp.profiling.occupancy import occupancy
from optexp.result import Result
from optexp.trace import Trace, record
from optexp.workers.arm import Arm

pytestmark = pytest.mark.gpu

PROGRAM = """
import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def doubled(x, y, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < size), mask=at < size)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(512, 512), nn.LayerNorm(512)
        self.inner = torch.compile(lambda x: self.norm(nn.functional.gelu(self.linear(x))))

    def forward(self, x):
        x = self.inner(x)
        y = torch.empty_like(x)
        doubled[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
        return y


def get_inputs():
    return [torch.randn(1024, 512)]


def get_init_inputs():
    return []
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiled")


@pytest.fixture(scope="module")
def found(folder: Path) -> Result:
    (folder / "own.py").write_text(PROGRAM)
    search_path.register()
    quick = ["mode=profile", "measurement=quick", "measurement.process_s=0.5", "measurement.warmup_s=0.2"]
    own = ["workload=module", f"workload.path={folder / 'own.py'}", "tracking.enabled=false", "device=cuda"]
    own += ["environment.allow_foreign=true"]  # the tests' own process uses the GPU
    with initialize_config_dir(version_base="1.3", config_dir=str(search_path.CONF)):
        config = compose("config", overrides=[*quick, *own])
    result = runner.run(config, folder / "out", show=lambda *_: None)
    assert result.profile.baseline is not None, f"{result.headline} {result.error}"
    assert result.profile.baseline.compiler is not None, result.headline
    return result


def test_every_stage_of_the_graph_is_there(found: Result, folder: Path) -> None:
    graphs = found.profile.baseline.compiler.graphs
    shown = [(g.id, g.direction, g.kernels, g.library_calls, list(g.files)) for g in graphs]
    assert len(graphs) == 1, shown
    graph = graphs[0]
    assert list(graph.files) == ["captured", "transformed", "ir_before", "ir_after", "generated"], shown
    assert (graph.kernels or 0) >= 1, shown
    assert (graph.library_calls or 0) >= 1, f"{shown}: no GEMM was found in the generated code"
    assert graph.bytes_unfused > graph.bytes_after > 0, graph
    assert "triton" in (folder / "out" / graph.files["generated"]).read_text()


def test_kernels_have_their_resources_by_origin(found: Result, folder: Path) -> None:
    rows = found.profile.baseline.compiler.kernels
    by_origin = {row.origin: row for row in rows}
    assert {"Inductor", "Triton", "library"} <= by_origin.keys(), rows
    for origin in ("Inductor", "Triton"):
        row = by_origin[origin]
        assert row.registers, row
        assert row.spills is not None, row
        assert row.occupancy is not None and 0 < row.occupancy <= 1, row  # noqa: PT018
        assert row.limited_by, row
        assert row.waves, row
        assert ".entry" in (folder / "out" / row.files["ptx"]).read_text(), row
        assert "EXIT" in (folder / "out" / row.files["sass"]).read_text(), row
    assert by_origin["Triton"].name == "doubled", by_origin["Triton"]
    assert by_origin["library"].registers, f"the trace tells no registers: {by_origin['library']}"


def test_code_and_trace_tell_the_same_registers_and_the_occupancy_calculator_agrees(tmp_path: Path) -> None:
    device = torch.device("cuda")
    call, x = torch.compile(lambda x: torch.softmax(x * 2, -1)), torch.randn(512, 1000, device=device)
    call(x)
    record(lambda: call(x), 2, tmp_path / "trace.json.gz", device)
    trace = Trace.read(tmp_path / "trace.json.gz")
    codes = {variant.key: variant for variant in triton_code.variants() if variant.origin == "Inductor"}
    joined = [
        (kernel, codes[kernel.name, prod(kernel.block) // 32])
        for kernel in trace.kernels
        if (kernel.name, prod(kernel.block) // 32) in codes
    ]
    assert joined, f"launched {[(k.name, k.block) for k in trace.kernels]}, known {list(codes)}"
    for kernel, code in joined:
        assert kernel.registers == code.registers, (kernel, code.key, code.registers)
        assert kernel.shared_bytes >= code.shared, (kernel, code.key, code.shared)
        assert code.ptx, f"{code.key}: no PTX in Triton's cache"
        assert code.cubin, f"{code.key}: no machine code in Triton's cache"
    arm = Arm()
    arm.device = device
    limits, card = arm.device_limits(), torch.cuda.get_device_properties(0)
    assert limits is not None, f"unknown compute capability {card.major}.{card.minor}"
    found = occupancy(limits, 256, 32, 0)
    assert found is not None
    assert found.share == 1.0, (limits, found)


def test_skipped_cuda_graphs_are_in_the_log(tmp_path: Path) -> None:
    """A step that changes its input is not captured by mode=reduce-overhead, which says why."""
    done = subprocess.run([sys.executable, "-c", SKIPS, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    log = read(tmp_path)
    assert any("mutat" in reason for reason in log.skips), f"skips {dict(log.skips)}; said {done.stderr[-2000:]}"


SKIPS = """
import sys
from pathlib import Path
import torch
from optexp.kernelkit import structured_log

structured_log.keep(Path(sys.argv[1]))
call = torch.compile(lambda x: x.add_(1), mode="reduce-overhead")
x = torch.zeros(64, device="cuda")
for _ in range(3):
    call(x)
"""
