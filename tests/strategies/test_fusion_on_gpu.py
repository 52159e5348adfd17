"""On a real GPU: our kernels and TorchScript's, alone and stacked, compute the same and show that they ran."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from optexp.kernelkit import extension, kernel
from optexp.strategies.amp import Amp
from optexp.strategies.cuda_graph import CudaGraph
from optexp.strategies.fusion import Fusion
from optexp.strategy import Evidence, Strategy
from optexp.trace import Trace, record
from optexp.workload import Workload
from optexp.workloads.elementwise import Elementwise
from optexp.workloads.gelu import Gelu
from optexp.workloads.layernorm_linear import LayerNormLinear
from optexp.workloads.linear_gelu import LinearGelu
from optexp.workloads.mlp import Mlp
from optexp.workloads.softmax import Softmax

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
WORKLOADS: dict[str, tuple[Workload, str]] = {
    "gelu": (Gelu(size=256, mode="forward_backward"), "1 gelu"),
    "elementwise": (Elementwise(rows=64, columns=200, mode="forward_backward"), "1 relu_bias_scale"),
    "softmax": (Softmax(rows=64, columns=1000, mode="forward_backward"), "1 softmax"),
    "layernorm_linear": (LayerNormLinear(rows=64, features=128, out=96, mode="forward_backward"), "1 layernorm_linear"),
    "layernorm_linear-forward": (LayerNormLinear(rows=64, features=128, out=96), "1 layernorm_linear"),
    "linear_gelu": (LinearGelu(rows=64, features=128, out=96, mode="forward_backward"), "1 linear_gelu"),
    "mlp": (Mlp(mode="train", dim=64, layers=3, batch_size=32), "3 linear_gelu"),
}
IN_CUDA = ("gelu", "elementwise", "layernorm_linear", "layernorm_linear-forward")


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo compiles a function only so often, and all these workloads share theirs; they are small, too."""
    torch._dynamo.reset()
    monkeypatch.setattr(kernel, "SMALL", 0)


def compare(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]], tolerance: float) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            if name.startswith("param/"):  # Adam takes the sign of gradients near zero
                assert (mine[name] - value).abs().mean() < tolerance, name
            else:
                torch.testing.assert_close(mine[name], value, atol=tolerance, rtol=tolerance, msg=name)


def evidence(strategy: Strategy, workload: Workload, stack: list[Strategy], build, folder: Path) -> Evidence:
    """What a profile of the stack says of the strategy, beside one without it."""
    torch._dynamo.utils.counters.clear()
    traces, notes = [], {}
    for name, members in (("before", [s for s in stack if s is not strategy]), ("after", stack)):
        program = build(workload, *members, device="cuda")
        for _ in range(3):
            program.run()
        record(program.run, 3, folder / f"{name}.json.gz", CUDA)
        traces.append(Trace.read(folder / f"{name}.json.gz"))
    every = torch._dynamo.utils.counters.items()
    counters = {f"{group}/{name}": float(n) for group, values in every for name, n in values.items()}
    _, notes = strategy.apply(build(workload, device="cuda"))  # which compiles, and counts
    return strategy.evidence(*traces, notes, counters)  # type: ignore[call-arg]


WITH_NVCC = pytest.mark.skipif(extension.why_not(CUDA) is not None, reason="needs the CUDA compiler")
OURS = [
    *(("kernels", name) for name in WORKLOADS),
    *(pytest.param("cuda", name, marks=WITH_NVCC) for name in IN_CUDA),
]


@pytest.mark.parametrize(("backend", "name"), OURS)
def test_our_kernels_compute_the_same_and_are_launched(backend: str, name: str, build, observe, tmp_path: Path) -> None:
    workload, replaced = WORKLOADS[name]
    strategy = Fusion(backend=backend, fullgraph=True)
    compare(observe(build(workload, strategy, device="cuda")), observe(build(workload, device="cuda")), 1e-4)
    found = evidence(strategy, workload, [strategy], build, tmp_path)
    assert found.engaged, found.text
    assert replaced in found.text
    assert backend == "cuda" or "of our kernels a step" in found.text


@pytest.mark.parametrize("backend", ["kernels", "torchscript"])
@pytest.mark.parametrize("mode", ["forward", "train"])
def test_stacked_with_amp_and_captured(backend: str, mode: str, build, observe) -> None:
    workload = Mlp(mode=mode, dim=64, layers=3, batch_size=32)
    stack = [Amp("bfloat16"), Fusion(backend=backend), CudaGraph()]
    ours = observe(build(workload, *stack, device="cuda"), 4)
    compare(ours, observe(build(workload, Amp("bfloat16"), device="cuda"), 4), 2e-2)
    assert not torch.equal(*(next(iter(values.values())) for values in ours[:2]))  # batches differ, so must results


def test_kernels_inside_a_graph_are_seen(build, tmp_path: Path) -> None:
    strategy = Fusion(backend="kernels")
    found = evidence(strategy, Mlp(dim=64, layers=2, batch_size=32), [strategy, CudaGraph()], build, tmp_path)
    assert found.engaged, found.text
    assert "1 CUDA Graph launch a step" in found.text


def test_in_a_graph_small_calls_are_ours_too(build, observe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    workload, strategy = LayerNormLinear(rows=128, features=1024, out=1024), Fusion(backend="kernels")
    for stack, engaged in (([strategy], False), ([strategy, CudaGraph()], True)):
        found = evidence(strategy, workload, stack, build, tmp_path)
        assert found.engaged == engaged, found.text
        torch._dynamo.reset()
    ours, theirs = (observe(build(workload, *stack, device="cuda")) for stack in ([strategy, CudaGraph()], []))
    compare(ours, theirs, 1e-4)


def test_a_mask_of_each_replay_is_its_own(build) -> None:
    workload = Elementwise(rows=64, columns=64, variant="relu_bias_dropout", p=0.5)
    program = build(workload, Fusion(backend="kernels", fullgraph=True), CudaGraph(), device="cuda")
    batch = program.feed.next()
    first, second = (program.step(program, batch)["output"].clone() for _ in range(2))
    assert not torch.equal(first == 0, second == 0)


def test_torchscript_fuses_a_chain(build, observe, tmp_path: Path) -> None:
    workload, strategy = Elementwise(rows=256, columns=256), Fusion(backend="torchscript")
    compare(observe(build(workload, strategy, device="cuda")), observe(build(workload, device="cuda")), 1e-5)
    found = evidence(strategy, workload, [strategy], build, tmp_path)
    assert found.engaged, found.text
    assert "fused kernels a step" in found.text


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_the_parts_of_the_compiler_compute_the_same(build, observe, backend: str) -> None:
    workload = Mlp(mode="train", dim=64, layers=2, batch_size=32)
    plain = observe(build(workload, device="cuda"))
    for ours, theirs in zip(observe(build(workload, Fusion(backend=backend), device="cuda")), plain, strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(
                ours[name], value, atol=1e-4, rtol=1e-3, msg=lambda text, at=name: f"{at}: {text}"
            )
