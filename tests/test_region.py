"""`optexp.region`: a range while somebody profiles, and nothing at all otherwise."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

import optexp
from optexp.profiling.breakdown import breakdown
from optexp.profiling.regions import excerpt, phases, regions
from optexp.support import ranges
from optexp.support.ranges import REGION
from optexp.trace import Trace, record


def network(x: Tensor) -> Tensor:
    with optexp.region("outer"):
        x = x.sin()
        with optexp.region("inner"):
            x = x @ x
    return x.cos()


def seen(function: Callable[[], object]) -> list[str]:
    with profile() as profiler:
        function()
    return sorted(e.name.removeprefix(REGION) for e in profiler.events() if e.name.startswith(REGION))


def test_a_profiler_of_anybodys_sees_regions() -> None:
    assert seen(lambda: network(torch.ones(2, 2))) == ["inner", "outer"]


def test_a_region_ends_where_its_block_raises() -> None:
    def run() -> None:
        with pytest.raises(ValueError, match="mine"), optexp.region("broken"):
            raise ValueError("mine")
        with optexp.region("whole"):
            torch.ones(2)

    assert seen(run) == ["broken", "whole"]


def test_a_compiled_graph_stays_whole_and_is_not_compiled_anew_by_a_profiler() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled, x = torch.compile(network, backend=backend, fullgraph=True), torch.ones(2, 2)
    assert torch.equal(compiled(x), network(x))
    assert seen(lambda: compiled(x)) == []
    assert len(graphs) == 1


def test_the_first_region_of_a_process_may_be_met_by_dynamo(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys, optexp\nassert 'torch' not in sys.modules\nimport torch\n"
        "@torch.compile(backend='eager', fullgraph=True)\n"
        "def f(x):\n    with optexp.region('first'):\n        return x + 1\n"
        "print(f(torch.ones(1)).item())\n"
    )
    done = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "2.0", done.stderr


def test_a_tracer_sees_through_it() -> None:
    x = torch.ones(2, 2)
    assert torch.equal(torch.jit.trace(network, x)(x), network(x))  # type: ignore[no-untyped-call]
    assert torch.equal(torch.fx.symbolic_trace(network)(x), network(x))


def test_outside_a_profile_it_costs_next_to_nothing() -> None:
    def entered(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            with optexp.region("cheap"):
                pass
        return (time.perf_counter() - start) / count

    assert min(entered(2000) for _ in range(20)) < 5e-6


@pytest.mark.parametrize("on", [True, False])
def test_nvtx_ranges_are_pushed_while_they_are_asked_for(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    with ranges.nvtx(on):
        network(torch.ones(2, 2))
    network(torch.ones(2, 2))
    assert calls == (["outer", "inner", "pop", "pop"] if on else [])


@pytest.mark.gpu
def test_regions_stand_in_a_captured_graph_and_on_a_gpu() -> None:
    x = torch.rand(64, 64, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        network(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with ranges.nvtx(), torch.cuda.graph(graph):
        y = network(x)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(y, network(x))


@pytest.mark.gpu
def test_device_time_of_a_region_is_that_of_its_kernels(tmp_path: Path) -> None:
    """Forward and backward of two layers, against the kernels of each layer run alone."""
    device = torch.device("cuda")
    big, small = (nn.Linear(2048, 2048, device=device) for _ in range(2))
    x, y = torch.randn(4096, 2048, device=device), torch.randn(256, 2048, device=device)

    def step(names: tuple[str, ...] = ("big", "small")) -> None:
        for name, layer, batch in (("big", big, x), ("small", small, y)):
            if name in names:
                with optexp.region(name):
                    loss = layer(batch).square().mean()
                loss.backward()

    def traced(names: tuple[str, ...]) -> Trace:
        record(lambda: step(names), 5, tmp_path / "trace.json.gz", device)
        return Trace.read(tmp_path / "trace.json.gz")

    step()
    trace = traced(("big", "small"))
    found = {row.name: row for row in regions(trace)}
    assert phases(trace) == []
    for name in ("big", "small"):
        alone = traced((name,))
        # AccumulateGrad and the fill of the first gradient belong to no operator of the region.
        theirs = sum(k.duration for k in (*alone.kernels, *alone.copies)) / len(alone.steps)
        row = found[name]
        ours = (row.device_us or 0.0) + (row.backward_device_us or 0.0)
        assert row.backward_device_us, f"{name}: no kernel of its backward was joined: {row}"
        assert ours == pytest.approx(theirs, rel=0.25), f"{name}: {ours} µs in the region, {theirs} µs alone"
    assert sum(row.device_share for row in found.values()) <= 1.0 + 1e-6
    part = breakdown(excerpt(trace, "big").alone)
    assert sum(part.terms.values()) == pytest.approx(1.0, abs=0.01), part.terms
    assert 0 < (part.kernels or 0.0) < len(trace.kernels) / len(trace.steps), (part.kernels, len(trace.kernels))
