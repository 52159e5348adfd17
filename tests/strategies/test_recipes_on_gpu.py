"""On a GPU: what strategies say of themselves in plain PyTorch runs without optexp, and computes the same."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from optexp.kernelkit import extension
from optexp.strategies.amp import Amp
from optexp.strategies.cuda_graph import CudaGraph
from optexp.strategies.fusion import Fusion
from optexp.strategies.inplace import Inplace
from optexp.strategies.memory_pool import MemoryPool
from optexp.strategies.pinned_memory import PinnedMemory
from optexp.strategies.prefetch import Prefetch
from optexp.strategies.streams import Streams
from optexp.strategy import Strategy
from optexp.workload import Workload
from optexp.workloads.branches import Branches
from optexp.workloads.gelu import Gelu
from optexp.workloads.lenet5 import LeNet5
from optexp.workloads.mlp import Mlp
from optexp.workloads.pipeline import Pipeline
from optexp.workloads.training import Training
from tests.export.test_repro import executed, written

pytestmark = pytest.mark.gpu

SLOW = pytest.mark.slow
NVCC = pytest.mark.skipif(extension.why_not(torch.device("cuda")) is not None, reason="needs the CUDA compiler")
STACKS: list[tuple[Callable[[], Workload], tuple[Strategy, ...]]] = [
    (lambda: LeNet5(batch_size=16, source="host"), (PinnedMemory(), Prefetch(), CudaGraph())),
    (lambda: Training(batch_size=16), (PinnedMemory(workers=2), Prefetch())),
    (lambda: Pipeline(rows=1000, dim=64), (PinnedMemory(),)),
    (lambda: Pipeline(rows=1000, dim=64), (Streams(chunks=6), PinnedMemory())),
    (lambda: Mlp(mode="forward", dim=64, source="host"), (Streams(mode="chunks", chunks=4), PinnedMemory())),
    (lambda: Mlp(mode="forward", dim=64), (Streams(mode="split"), CudaGraph())),
    (lambda: Branches(towers=3, dim=64, layers=2), (Streams(), CudaGraph())),
    (lambda: Branches(towers=2, dim=64, mode="forward_backward"), (Amp(), Streams(), CudaGraph())),
    (lambda: Branches(towers=2, dim=64), (Inplace(), Streams())),
    (lambda: Mlp(mode="forward", dim=64), (MemoryPool(), CudaGraph())),
    (lambda: Mlp(mode="forward_backward", dim=64), (MemoryPool(),)),
    (lambda: Mlp(mode="forward_backward", dim=64), (CudaGraph("model"),)),
    (lambda: Mlp(mode="train", dim=64), (CudaGraph("forward_backward"),)),
    (lambda: Mlp(mode="train", dim=64), (Amp("float16"), CudaGraph("forward_backward"))),
    (lambda: Mlp(mode="train", dim=64), (Amp("float16"), CudaGraph("model"))),
    (lambda: Gelu(size=1024, mode="forward_backward"), (Fusion(backend="kernels"), CudaGraph())),
    pytest.param(lambda: Gelu(size=1024), (Fusion(backend="cuda"),), marks=NVCC),
    pytest.param(lambda: Branches(towers=2, dim=64), (Fusion(), Streams(), CudaGraph()), marks=SLOW),
]


def named(value: Callable[[], Workload] | tuple[Strategy, ...]) -> str:
    """The same in every process, which addresses of functions are not."""
    if isinstance(value, tuple):
        return "+".join(type(strategy).__name__ for strategy in value)
    return type(value()).__name__


@pytest.mark.parametrize(("workload", "stack"), STACKS, ids=named)
def test_it_computes_what_the_program_computes(
    workload: Callable[[], Workload], stack: tuple[Strategy, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = written(tmp_path, workload(), stack, device="cuda")
    file = executed(tmp_path / "repro.py", monkeypatch)
    file["model"].load_state_dict(program.model.state_dict())
    batch = tuple(next(file["batches"]))
    result, (expected, *_) = file["step"](batch), program.step(program, batch).values()
    assert result.device == expected.device
    torch.testing.assert_close(result.float(), expected.float(), atol=1e-3, rtol=1e-3)
