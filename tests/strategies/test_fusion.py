"""torch.compile through the stack: right numbers, graph breaks told, and reasons where it cannot run."""

import pytest
import torch
from torch import Tensor, nn

from optexp.insight.trace import Call, Op, Span, Trace, record
from optexp.program import Program
from optexp.strategies import fusion
from optexp.strategies.amp import Amp
from optexp.strategies.cuda_graph import CudaGraph
from optexp.strategies.fusion import Fusion
from optexp.strategies.inplace import Inplace
from optexp.strategy import Unsupported, compose
from optexp.workloads.gelu import Gelu
from optexp.workloads.mlp import Mlp

CPU = torch.device("cpu")


def profile(regions: int = 0, launches: int = 0) -> Trace:
    """A trace of one step that called this many compiled regions and launched this many graphs."""
    return Trace(
        steps=(Span("step", 0.0, 9.0),),
        ops=(Op("Torch-Compiled Region: 0/0", 0.0, 1.0),) * regions,
        api=(Call("cudaGraphLaunch", 0.0, 1.0),) * launches,
    )


@pytest.mark.slow
def test_training_with_amp_compiled_computes_the_same(build, observe):
    workload = Mlp(mode="train", dim=32, layers=2, batch_size=16)
    compiled = observe(build(workload, Fusion(fullgraph=True), Amp()))
    for ours, plain in zip(compiled, observe(build(workload)), strict=True):
        assert ours.keys() == plain.keys()
        for name, value in plain.items():
            torch.testing.assert_close(ours[name].float(), value, atol=3e-2, rtol=3e-2)
    # The optimizer saw compiled gradients: parameters moved.
    assert not torch.equal(compiled[0]["param/0.weight"], compiled[1]["param/0.weight"])


@pytest.mark.slow
def test_formula_compiled_after_rewriting_in_place(build, observe, tmp_path):
    program, unfused = build(Gelu(size=64), Inplace(), Fusion(fullgraph=True)), build(Gelu(size=64))
    for ours, plain in zip(observe(program), observe(unfused), strict=True):
        torch.testing.assert_close(ours["output"], plain["output"])
    traces = []
    for name, arm in (("before", unfused), ("after", program)):
        record(arm.run, 2, tmp_path / f"{name}.json.gz", CPU)
        traces.append(Trace.read(tmp_path / f"{name}.json.gz"))
    counters = {"stats/unique_graphs": 1.0}
    assert Fusion().evidence(*traces, {"captures": False}, counters).text == "1 graph compiled, 1 calls a step"
    assert not Fusion().evidence(*reversed(traces), {"captures": False}, counters).engaged


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1


def test_fullgraph_refuses_a_graph_break(build):
    plain = build(Gelu(size=4))
    program = Program(model=Broken(), step=plain.step, feed=plain.feed)
    whole, _ = Fusion(fullgraph=True).apply(program)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        whole.run()


def test_evidence_counts_graphs_and_breaks():
    strategy, notes = Fusion(), {"captures": False}
    counters = {"stats/unique_graphs": 2.0, "graph_break/call to print\n  more": 1.0}
    engaged = strategy.evidence(profile(), profile(regions=6), notes, counters)
    assert engaged.engaged
    assert engaged.text == "2 graphs compiled, 1 graph breaks (call to print), 6 calls a step"
    assert not strategy.evidence(profile(), profile(), notes, counters).engaged  # compiled, never run
    assert not strategy.evidence(profile(), profile(regions=6), notes, {}).engaged  # run by someone else
    # Inside a captured step only its launches are visible.
    assert strategy.evidence(profile(), profile(launches=1), notes, counters).engaged
    # A capturing mode that fell back to plain launches did not do what it says.
    assert not strategy.evidence(profile(), profile(regions=6), {"captures": True}, counters).engaged


def test_capturing_modes_capture_once():
    for mode in ("reduce-overhead", "max-autotune"):
        with pytest.raises(Unsupported, match="both capture"):
            compose([Fusion(mode=mode), CudaGraph()])
    assert [s.name for s in compose([CudaGraph(), Fusion(), Amp()])] == ["amp", "fusion", "cuda_graph"]


def test_reasons_say_what_to_do(build, monkeypatch: pytest.MonkeyPatch):
    program = build(Gelu(size=4))
    assert Fusion().unsupported(program, CPU) is None
    assert "strategy.fusion.mode=default" in Fusion(mode="reduce-overhead").unsupported(program, CPU)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler was not found" in Fusion().unsupported(program, CPU)
    monkeypatch.setattr(fusion, "find_spec", lambda name: None)
    assert "pip install triton" in Fusion().unsupported(program, torch.device("cuda"))


def test_label_shows_what_differs_from_the_default():
    assert Fusion().label == "fusion"
    assert Fusion(mode="max-autotune", fullgraph=True).label == "fusion[mode=max-autotune,fullgraph=True]"
