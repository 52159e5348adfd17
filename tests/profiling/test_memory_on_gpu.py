"""Memory by category on a GPU: the composition of the peak is the allocator's, and differences are explained."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from torch import Tensor, nn

from optexp.profiling.memory_difference import COMPLETE, difference
from optexp.records.memory import MemoryProfile
from optexp.strategies.amp import Amp
from optexp.strategies.cuda_graph import CudaGraph
from optexp.strategies.fusion import Fusion
from optexp.strategies.pinned_memory import PinnedMemory
from optexp.strategy import Strategy, compose
from optexp.workers.arm import Arm
from optexp.workers.spec import Spec
from optexp.workload import Workload
from optexp.workloads.bert import Bert
from optexp.workloads.lenet5 import LeNet5
from optexp.workloads.mlp import Mlp

pytestmark = pytest.mark.gpu

DIM, LAYERS, BATCH = 1024, 4, 2048
WORKLOADS: dict[str, Callable[[], Workload]] = {
    "mlp": lambda: Mlp(mode="train", dim=DIM, layers=LAYERS, batch_size=BATCH),
    "bert": lambda: Bert("train", batch_size=8, sequence=128, layers=2, hidden=256, heads=4, vocabulary=2000),
    "lenet5": lambda: LeNet5("train", batch_size=256),
}
STACKS: dict[str, Callable[[], list[Strategy]]] = {
    "plain": list,
    "cuda_graph": lambda: [CudaGraph()],
    "amp": lambda: [Amp("bfloat16")],
    "amp+cuda_graph": lambda: [Amp("bfloat16"), CudaGraph()],
}


@dataclass(frozen=True)
class Seen:
    """found: as recorded;  measured: the peak of an earlier pass, in bytes;  snapshot: the allocator's own record"""

    found: MemoryProfile
    measured: float
    snapshot: Path

    @property
    def at_peak(self) -> MemoryProfile:
        return self.found.reconciled(self.measured)


def seen(workload: Workload, stack: list[Strategy]) -> Seen:
    """One arm in this process, without what arms before it left."""
    release()
    snapshot = Path(mkdtemp()) / "arm.pickle"
    arm = Arm()
    arm.setup(Spec(workload, compose(stack), "cuda:0", "float32", 0).pack())
    measured = arm.peak_memory(steps=3).peak_mib
    found = arm.memory_by_category(str(snapshot))
    del arm
    release()
    assert measured is not None
    assert found is not None, "the allocator's history was incomplete"
    return Seen(found, measured * 2**20, snapshot)


def release() -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@cache
def seen_as(workload: str, stack: str) -> Seen:
    return seen(WORKLOADS[workload](), STACKS[stack]())


def told(found: MemoryProfile) -> str:
    """The composition in MiB, with the largest allocations, for a message."""
    sizes = {category: round(size / 2**20, 3) for category, size in found.peak.items()}
    rows = [
        f"{r.category} {r.name} {r.module} {r.where} {r.count}× {r.bytes / 2**20:.3f}" for r in found.allocations[:12]
    ]
    return "\n".join([f"peak {found.peak_bytes / 2**20:.3f} MiB: {sizes}", *rows])


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_composition_adds_up_to_the_allocators_peak(workload: str, stack: str) -> None:
    run = seen_as(workload, stack)
    found, text = run.found, told(run.found)
    assert sum(found.peak.values()) == found.peak_bytes
    assert found.peak_bytes == pytest.approx(run.measured, rel=0.01), f"measured {run.measured / 2**20:.3f} MiB; {text}"
    assert found.peak.get("unknown", 0) <= 0.02 * found.peak_bytes, text
    assert found.peak["parameters"] > 0, text
    assert found.peak["optimizer_state"] >= 1.9 * found.peak["parameters"] * 0.9, text
    assert ("graph_pools" in found.peak) == ("cuda_graph" in stack), text


@pytest.mark.parametrize("stack", [name for name in STACKS if name != "plain"])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_difference_is_explained(workload: str, stack: str) -> None:
    before, after = seen_as(workload, "plain").at_peak, seen_as(workload, stack).at_peak
    found = difference(before, after)
    if found is None:
        assert after.peak_bytes == pytest.approx(before.peak_bytes, rel=0.011, abs=2**16)
        return
    text = "\n".join([*found.sentences, told(before), told(after)])
    assert found.explained >= COMPLETE, text
    if stack == "cuda_graph":
        assert any("CUDA graphs keep" in sentence for sentence in found.sentences), text


def test_lower_precision_is_seen_in_what_backward_is_given() -> None:
    rows = seen_as("mlp", "amp").found.saved
    assert {row.dtype for row in rows} >= {"bfloat16"}, rows
    assert any(row.name.startswith("cast of ") for row in rows), rows


def test_activations_of_an_mlp_are_known_exactly() -> None:
    run = seen_as("mlp", "plain")
    assert run.found.saved_bytes == 2 * LAYERS * BATCH * DIM * 4, run.found.saved
    assert {row.module for row in run.found.saved} >= {"1", "2"}, run.found.saved


class Chain(nn.Module):
    """Three operators, each on a line of its own; the second one's result is kept for the third's backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = torch.tanh(y)
        return self.second(z)


@dataclass
class ChainMlp(Mlp):
    def model(self) -> nn.Module:
        return Chain()


def test_allocations_have_their_line_and_module() -> None:
    run = seen(ChainMlp(mode="train", dim=DIM, layers=1, batch_size=BATCH), [])
    kept = {
        (row.where.rpartition(":")[0], row.module) for row in run.found.allocations if row.category == "activations"
    }
    assert ("profiling/test_memory_on_gpu.py", "") in kept, told(run.found)


def test_the_snapshot_is_what_memory_viz_reads() -> None:
    from torch.cuda import _memory_viz

    run = seen_as("lenet5", "plain")
    taken = pickle.loads(run.snapshot.read_bytes())
    assert any(entry["action"] == "alloc" and entry["frames"] for trace in taken["device_traces"] for entry in trace)
    assert "<html" in _memory_viz.trace_plot(taken).lower() or "<script" in _memory_viz.trace_plot(taken).lower()


def test_the_cache_is_described() -> None:
    cache_state = seen_as("mlp", "plain").found.cache
    assert cache_state is not None
    assert cache_state.reserved_bytes >= cache_state.allocated_bytes > 0
    assert 0 <= cache_state.largest_free_bytes <= cache_state.fragmented_bytes
    assert cache_state.inactive_split_bytes <= cache_state.fragmented_bytes
    assert cache_state.driver_calls == 0, "steady steps allocate from the cache"


def test_a_fused_program_says_that_the_compiler_chose() -> None:
    after = seen(WORKLOADS["mlp"](), [Fusion()])
    before = seen_as("mlp", "plain").at_peak
    assert any(row.compiled for row in after.found.saved), after.found.saved
    found = difference(before, after.at_peak)
    text = told(before) + told(after.at_peak)
    assert found is None or found.explained >= COMPLETE, text


def test_batches_that_are_copied_in_each_step_are_inputs() -> None:
    workload = LeNet5("train", batch_size=256)
    run = seen(replace(workload, source="host"), [PinnedMemory()])
    assert run.found.peak.get("inputs", 0) >= 256 * 28 * 28 * 4, told(run.found)
