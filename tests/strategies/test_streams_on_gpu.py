"""Streams on a GPU: results are right, memory is not given away too early, and work runs side by side."""

import pytest
import torch
from torch import Tensor, nn

from optexp.program import Program, ResidentFeed, forward
from optexp.strategies.amp import Amp
from optexp.strategies.cuda_graph import CudaGraph
from optexp.strategies.fusion import Fusion
from optexp.strategies.inplace import Inplace
from optexp.strategies.pinned_memory import PinnedMemory
from optexp.strategies.streams import Streams
from optexp.trace import Trace, record
from optexp.workloads.branches import Branches
from optexp.workloads.mlp import Mlp
from optexp.workloads.pipeline import Pipeline
from tests.strategies.test_streams import Sized

CUDA = torch.device("cuda")


class Slow(nn.Module):
    """Two towers, each of which starts with a long wait, and memory that is given back in between."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))) for _ in range(3))
        self.mix = nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        outputs = [tower(x + i) for i, tower in enumerate(self.towers)]
        mixed = self.mix(torch.stack(outputs).sum(0))
        return mixed + self.towers[0](mixed) * self.towers[1](mixed)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("mode", ["forward", "forward_backward", "train"])
@pytest.mark.parametrize("combine", ["sum", "none"])
def test_branches_compute_the_same_on_a_gpu(build, observe, mode: str, combine: str, graph: bool):
    workload = Branches(mode=mode, towers=3, dim=256, layers=3, combine=combine)
    stack = (Streams(), CudaGraph()) if graph else (Streams(),)
    ours, plain = observe(build(workload, *stack, device="cuda"), 5), observe(build(workload, device="cuda"), 5)
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            if not name.startswith("param/"):
                torch.testing.assert_close(mine[name], value, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("trains", [False, True])
def test_memory_that_crosses_streams_is_not_given_away_too_early(graph: bool, trains: bool):
    torch.manual_seed(0)
    model, plain = Slow().cuda(), Slow().cuda()
    plain.load_state_dict(model.state_dict())
    feed = ResidentFeed(CUDA)
    feed.reset([(torch.randn(256, 512),) for _ in range(4)])

    def step(program: Program, batch):
        if not trains:
            return forward(program, batch)
        program.model.zero_grad(set_to_none=True)
        output = program.predict(batch)
        output.square().mean().backward()
        return {"output": output.detach()}

    expected = Program(model=plain, step=step, feed=feed)
    program = Program(model=model, step=step, feed=feed)
    for strategy in (Streams(), *([CudaGraph()] if graph else [])):
        program, _ = strategy.apply(program)
    for batch in list(feed.batches) * 5:
        ours, theirs = program.step(program, batch)["output"], step(expected, batch)["output"]
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        if trains:
            for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, other.grad, atol=1e-4, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_weight_that_lanes_share_is_lowered_before_it_is_read(graph: bool):
    """It changes sign before every step: what lay in that memory before would show."""
    model, plain, feed = Sized(4096).cuda(), Sized(4096).cuda(), ResidentFeed(CUDA)
    plain.load_state_dict(model.state_dict())
    feed.reset([(torch.randn(64, 8192),)])
    program = Program(model=model, step=forward, feed=feed)
    for strategy in (Amp(), Streams(), *([CudaGraph()] if graph else [])):
        program, _ = strategy.apply(program)
    for _ in range(20):
        for one in (model, plain):
            one.linear.weight.data.neg_()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            expected = plain(feed.batches[0][0])
        torch.testing.assert_close(program.run()["output"], expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("stack", [(CudaGraph(),), (Amp(), CudaGraph()), (Inplace(), CudaGraph())])
def test_captured_branches_run_side_by_side(build, tmp_path, stack):
    workload, traces = Branches(towers=2, dim=512, layers=4), {}
    notes = {}
    for name, strategies in (("before", stack), ("after", (*stack, Streams()))):
        program = build(workload, *strategies, device="cuda")
        record(program.run, 5, tmp_path / f"{name}.json.gz", CUDA)
        traces[name] = Trace.read(tmp_path / f"{name}.json.gz")
        notes = {"mode": "branches", "pieces": 3, "streams": 2}
    evidence = Streams().evidence(traces["before"], traces["after"], notes, {})
    assert evidence.engaged, evidence.text
    assert not Streams().evidence(traces["before"], traces["before"], notes, {}).engaged


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["forward", "train"])
def test_compiled_captured_branches_compute_the_same(build, observe, mode: str):
    workload = Branches(mode=mode, towers=2, dim=128, layers=2, optim="sgd")
    stacked = observe(build(workload, Fusion(), Streams(), CudaGraph(), device="cuda"), 4)
    for ours, theirs in zip(stacked, observe(build(workload, device="cuda"), 4), strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
def test_a_split_batch_computes_the_same_on_a_gpu(build, graph: bool):
    workload = Mlp(mode="forward", dim=256, batch_size=250)
    program = build(workload, Streams(mode="split", streams=3), *([CudaGraph()] if graph else []), device="cuda")
    plain = build(workload, device="cuda")
    for _ in range(10):
        torch.testing.assert_close(program.run()["output"], plain.run()["output"], atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_chunks_come_back_whole(build, pinned: bool):
    workload = Pipeline(rows=5000, dim=512, chunks=4)
    stack = (Streams(chunks=12), PinnedMemory()) if pinned else (Streams(chunks=12),)
    program, plain = build(workload, *stack, device="cuda"), build(workload, device="cuda")
    for _ in range(8):
        ours, theirs = program.run()["output"], plain.run()["output"]
        assert ours.device.type == theirs.device.type == "cpu"
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_chunks_of_a_model_whose_results_stay_on_the_device(build):
    workload = Mlp(mode="forward", dim=512, batch_size=4096, source="host")
    program = build(workload, Streams(mode="chunks", chunks=6), PinnedMemory(), device="cuda")
    plain = build(workload, device="cuda")
    for _ in range(6):
        ours, theirs = program.run()["output"], plain.run()["output"]
        assert ours.device.type == "cuda"
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_copies_of_chunks_run_beside_kernels(build, tmp_path):
    workload = Pipeline(rows=65536, dim=1024)
    program = build(workload, Streams(), PinnedMemory(), device="cuda")
    record(program.run, 3, tmp_path / "trace.json.gz", CUDA)
    notes = {"mode": "chunks", "chunks": 32, "streams": 3}
    trace = Trace.read(tmp_path / "trace.json.gz")
    evidence = Streams().evidence(trace, trace, notes, {})
    print(evidence.text)
    assert evidence.engaged, evidence.text
