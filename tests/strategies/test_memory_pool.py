"""Memory pools: who gets which variables, what is shared, and on a GPU what the allocator says about itself."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from optexp.comparison.session import Session
from optexp.config import Experiment
from optexp.errors import Unsupported
from optexp.program import Snapshot
from optexp.reporting.terminal import Progress
from optexp.strategies.cuda_graph import CudaGraph
from optexp.strategies.memory_pool import MemoryPool, share_workspaces
from optexp.strategies.streams import Streams
from optexp.strategy import compose
from optexp.support.stopwatch import Stopwatch
from optexp.trace import Call, Span, Trace
from optexp.workers import pool
from optexp.workloads.mlp import Mlp
from optexp.workloads.workspace import Workspace

CPU = torch.device("cpu")
SMALL = Workspace(batch_size=2, channels=4, image=8, layers=3)


def calls(**counts: int) -> Trace:
    api = tuple(Call(name, 0.0, 1.0) for name, count in counts.items() for _ in range(count))
    return Trace(steps=(Span("step", 0.0, 9.0),), api=api)


# --- variables


@pytest.mark.parametrize(
    ("kind", "variables"),
    [
        ("private", {}),
        ("emptied", {}),
        ("workspace", {}),
        ("none", {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
        ("expandable", dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")),
        ("async", dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "backend:cudaMallocAsync")),
    ],
)
def test_allocator_settings_are_variables_because_torch_reads_them_when_it_loads(kind: str, variables: dict):
    assert MemoryPool(kind).environment() == variables


def test_an_arm_starts_with_the_variables_of_its_own_stack(
    experiment: Callable[..., Experiment], tmp_path, monkeypatch: pytest.MonkeyPatch
):
    """Else baseline and candidate would have the same allocator, and there would be nothing to compare."""

    class Fake:
        def __init__(self, variables=(), home=None) -> None:
            self.variables, self.closed = dict(variables), False

        def preload(self, modules, device_type) -> None:
            pass

        def end_workers(self) -> None:
            pass

        def close(self) -> None:
            self.closed = True

    shared = Fake()
    monkeypatch.setattr(pool, "Launcher", Fake)
    monkeypatch.setattr(pool, "launcher", lambda: shared)
    described = experiment("workload=mlp", "strategy=memory_pool", "strategy.memory_pool.kind=none", "device=cpu")
    with Progress() as progress:
        comparison = Session(described, "cpu", tmp_path, Stopwatch(0.0), progress)
        candidate = comparison.pool.launcher(comparison.stack)
        assert candidate.variables == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # type: ignore[attr-defined]
        assert comparison.pool.launcher(comparison.stack) is candidate
        assert comparison.pool.launcher(comparison.baseline) is comparison.pool.launcher(()) is shared
        comparison.close()
    assert (candidate.closed, shared.closed) == (True, False)  # type: ignore[attr-defined]


# --- what does not go together


@pytest.mark.parametrize("kind", ["none", "async", "emptied"])
def test_what_has_no_pool_cannot_be_captured(kind: str):
    with pytest.raises(Unsupported, match=rf"memory_pool\[kind={kind}\] does not work with cuda_graph"):
        compose([MemoryPool(kind), CudaGraph()])
    assert len(compose([MemoryPool(), CudaGraph()])) == 2


@pytest.mark.parametrize("kind", ["workspace", "private"])
def test_memory_is_not_shared_by_what_runs_side_by_side(kind: str):
    with pytest.raises(Unsupported, match="does not work with streams"):
        compose([MemoryPool(kind), Streams()])


def test_a_cpu_has_no_cuda_allocator(build):
    assert "kind=workspace" in MemoryPool().unsupported(build(Mlp(dim=4)), CPU)
    assert MemoryPool("workspace").unsupported(build(SMALL), CPU) is None
    assert "no module keeps scratch memory" in MemoryPool("workspace").unsupported(build(Mlp(dim=4)), CPU)


def test_a_workspace_that_the_first_step_makes_is_one(build):
    lazy = build(SMALL)
    for index in (0, 2, 4):
        del lazy.model[index].workspace
        lazy.model[index].register_forward_pre_hook(make_workspace)
    assert MemoryPool("workspace").unsupported(lazy, CPU) is None
    assert "workspace" not in vars(lazy.model[0]), "the program stays as it was"


def make_workspace(module, given) -> None:
    module.workspace = vars(module).get("workspace", torch.empty(0, 0, 0))


# --- one workspace


def test_modules_share_one_workspace_and_compute_the_same(build, observe):
    plain, shared = build(SMALL), build(SMALL)
    shared, notes = MemoryPool("workspace").apply(shared)
    each = 2 * 4 * 9 * 64 * 4
    assert notes == {"modules": 3, "bytes": [3 * each, each]}
    assert len({shared.model[i].workspace.data_ptr() for i in (0, 2, 4)}) == 1
    shared.feed.reset(plain.feed.batches)
    for ours, theirs in zip(observe(shared), observe(plain), strict=True):
        assert torch.equal(ours["output"], theirs["output"])
    evidence = MemoryPool("workspace").evidence(calls(), calls(), notes, {})
    assert evidence.text == "3 modules share 0.0176 MiB of workspace, not 0.0527"


def test_the_largest_workspace_serves_all(build):
    program = build(SMALL)
    program.run()
    program.model[2].workspace = torch.empty(10, 10_000)
    _, notes = MemoryPool("workspace").apply(program)
    assert notes["bytes"][1] <= 10 * 10_000 * 4
    assert program.model[0].workspace.shape == (2, 36, 64)


def test_a_workspace_keeps_its_strides(build):
    program = build(SMALL)
    program.run()
    odd = {0: torch.empty(36, 128)[:, ::2].t(), 2: torch.empty(2, 4, 8, 8).to(memory_format=torch.channels_last)}
    for index, workspace in odd.items():
        program.model[index].workspace = workspace
    program.model[4].workspace = torch.empty(0, 3)
    notes = share_workspaces(program.model)
    assert notes == {"modules": 3, "bytes": [4 * (36 * 128 - 1 + 512), 4 * (36 * 128 - 1)]}
    for index, workspace in odd.items():
        assert program.model[index].workspace.shape == workspace.shape
        assert program.model[index].workspace.stride() == workspace.stride()


def test_nothing_to_share_is_not_engaged(build):
    _, notes = MemoryPool("workspace").apply(build(Mlp(dim=4)))
    assert not MemoryPool("workspace").evidence(calls(), calls(), notes, {}).engaged


# --- evidence


@pytest.mark.parametrize("kind", ["none", "emptied"])
def test_without_a_cache_every_step_asks_the_driver(kind: str):
    busy = calls(cudaMalloc=3, cudaFree=3)
    evidence = MemoryPool(kind).evidence(calls(), busy, {}, {})
    assert evidence.engaged
    assert evidence.text == "6 calls of cudaMalloc and cudaFree a step, not 0"
    assert not MemoryPool(kind).evidence(busy, busy, {}, {}).engaged


@pytest.mark.parametrize(
    ("kind", "notes", "engaged"),
    [
        ("private", {"private": 2**21}, True),
        ("private", {"private": 0}, False),
        ("expandable", {"expandable": 2}, True),
        ("expandable", {"expandable": 0}, False),
        ("async", {"backend": "cudaMallocAsync"}, True),
        ("async", {"backend": "native"}, False),
    ],
)
def test_the_allocator_is_asked_what_it_is(kind: str, notes: dict, engaged: bool):
    assert MemoryPool(kind).evidence(calls(), calls(), notes, {}).engaged is engaged


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("mode", ["forward", "train"])
def test_a_private_pool_serves_steps_that_compute_the_same(build, observe, mode: str, graph: bool):
    workload = Mlp(mode=mode, dim=64, batch_size=32)
    program = build(workload, device="cuda")
    before = Snapshot(program).values
    program, notes = MemoryPool().apply(program)
    assert notes["private"] > 0
    assert all(torch.equal(value, before[name]) for name, value in program.state().items())
    if graph:
        program, _ = CudaGraph().apply(program)
        assert tuple(program.step.graph.pool()) == tuple(program.pool.id)
        assert program.pool.use_count() > 1
    else:
        assert program.pool.use_count() == 1
    program.feed.reset(program.feed.batches)
    for ours, plain in zip(observe(program, 5), observe(build(workload, device="cuda"), 5), strict=True):
        for name, value in plain.items():
            if not name.startswith("param/"):
                torch.testing.assert_close(ours[name], value, atol=1e-5, rtol=1e-5)


ARM = f"""
import sys
sys.path[:] = {sys.path!r}
from dataclasses import replace
from pathlib import Path
import cloudpickle, torch
from optexp.workers.arm import Arm
from optexp.workers.spec import Spec
from optexp.trace import Trace
from optexp.strategies.memory_pool import MemoryPool
from optexp.workloads.mlp import Mlp

kind, folder = sys.argv[1], Path(sys.argv[2])
strategy = MemoryPool(kind)
# Activations of 16 MiB lie in segments of their own, which nothing else keeps from being given back.
spec = Spec(Mlp(mode="train", dim=1024, batch_size=4096), [strategy] if kind != "plain" else [], "cuda:0", "float32", 0)
arm = Arm()
notes = arm.setup(spec.pack()).notes.get("memory_pool", {{}})
memory = arm.peak_memory(steps=3)
arm.profile(str(folder / f"{{kind}}.json.gz"), steps=3)
if kind != "plain":
    before, after = (Trace.read(folder / f"{{name}}.json.gz") for name in ("plain", kind))
    evidence = strategy.evidence(before, after, notes, {{}})
    assert evidence.engaged, evidence.text
    print(evidence.text)
print(memory)
assert (memory.peak_mib is None) == (kind == "none")
assert all(value >= 0 for value in vars(memory).values() if value is not None)
if kind == "private":
    assert memory.pools_mib == 0, "what a pool keeps between steps is not counted twice"
"""


@pytest.mark.gpu
@pytest.mark.slow
def test_every_kind_engages_in_an_arm_with_its_variables(tmp_path):
    script = tmp_path / "arm.py"
    script.write_text(ARM)
    for kind in ("plain", "private", "expandable", "async", "none", "emptied"):
        variables = MemoryPool(kind).environment() if kind != "plain" else {}
        command = [sys.executable, script, kind, tmp_path]
        environment = {**os.environ, **variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{kind}: {done.stderr}"
        print(kind, done.stdout)
