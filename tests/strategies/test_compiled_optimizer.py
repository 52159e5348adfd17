"""The whole optimizer step compiled: the same updates under any learning rate, compiled once, beside fusion."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from optexp.errors import Unsupported
from optexp.strategies.compiled_optimizer import CompiledOptimizer, onto_device
from optexp.strategies.cuda_graph import CudaGraph
from optexp.strategies.fused_optimizer import FusedOptimizer
from optexp.strategies.fusion import Fusion
from optexp.strategy import compose, grouped
from optexp.trace import Call, Op, Span, Trace, record
from optexp.workloads.mlp import Mlp

CPU = torch.device("cpu")
STEPS = (Span("step", 0.0, 9.0),)


def small(optim: str = "sgd") -> Mlp:
    return Mlp(mode="train", dim=8, layers=2, batch_size=4, optim=optim, lr=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["sgd", "adamw"])
def test_updates_are_those_of_the_plain_optimizer_at_any_rate(build, optim: str, tmp_path):
    torch._dynamo.reset()
    counters.clear()
    plain, compiled = build(small(optim)), build(small(optim), CompiledOptimizer())
    for rate in (0.1, 0.05, 0.2, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07):  # more than dynamo compiles anew
        plain.optimizer.param_groups[0]["lr"] = rate
        compiled.optimizer.param_groups[0]["lr"].fill_(rate)
        torch.testing.assert_close(compiled.run(), plain.run())
        for ours, theirs in zip(compiled.model.parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    found = {f"{group}/{name}": float(n) for group, values in counters.items() for name, n in values.items()}
    traces = []
    for name, program in (("plain", plain), ("compiled", compiled)):
        record(program.run, 2, tmp_path / f"{name}.json.gz", CPU)
        traces.append(Trace.read(tmp_path / f"{name}.json.gz"))
    assert sum(grouped(found, "claimed").values()) == found["stats/unique_graphs"] <= 2
    assert CompiledOptimizer().evidence(*traces, {"optimizer": "SGD"}, found).engaged
    assert not CompiledOptimizer().evidence(*reversed(traces), {"optimizer": "SGD"}, found).engaged
    fused = Fusion().evidence(*traces, {"captures": False}, found)
    assert fused.text.startswith("torch.compile made no graph"), "this one is not fusion's"


def test_rates_and_counts_become_tensors_and_keep_their_values(build):
    program = build(small("adamw"))
    program.run()
    onto_device(program.optimizer, CPU)
    (group,) = program.optimizer.param_groups
    assert group["lr"].item() == pytest.approx(0.1)
    assert all(state["step"].item() == 1 for state in program.optimizer.state.values())
    assert program.state()["optimizer/group0/lr"].data_ptr() == group["lr"].data_ptr()
    program.run()


TWICE = {"claimed/1/0": 1.0, "claimed/1/1": 1.0, "compiled_optimizer/operations": 80.0}


@pytest.mark.parametrize(
    ("found", "region", "launches", "eager", "words"),
    [
        ({}, "0/0", 0, False, "no graph of AdamW.step"),
        (TWICE, None, 0, True, "ran it eagerly"),
        (TWICE, "0/0", 0, True, "ran it eagerly"),  # another strategy's region
        (TWICE, None, 1, True, "ran it eagerly"),  # another strategy's graph, and the optimizer outside
        (TWICE, "1/1", 0, False, "2 times, 40 operations each"),
        (TWICE, None, 1, False, "2 times, 40 operations each"),
    ],
)
def test_evidence_needs_a_graph_of_its_own_that_ran(found, region: str | None, launches: int, eager: bool, words: str):
    trace = Trace(
        steps=STEPS,
        ops=(Op(f"Torch-Compiled Region: {region}", 1.0, 1.0),) if region else (),
        api=(Call("cudaGraphLaunch", 0.0, 1.0),) * launches,
        annotations=(Span("Optimizer.step#AdamW.step", 0.0, 1.0),) * eager,
    )
    evidence = CompiledOptimizer().evidence(trace, trace, {"optimizer": "AdamW"}, found)
    assert evidence.engaged == ("each" in words)
    assert words in evidence.text


def test_what_cannot_be_compiled_is_named(build):
    assert "workload.mode=train" in CompiledOptimizer().unsupported(build(Mlp(dim=4)), CPU)
    program = build(small())
    program = replace(program, optimizer=torch.optim.Adagrad(program.model.parameters()))
    assert "Adagrad takes no tensor as learning rate" in CompiledOptimizer().unsupported(program, CPU)


def test_stacks_with_fusion_but_not_with_another_optimizer():
    assert [s.name for s in compose([Fusion(), CompiledOptimizer()])] == ["compiled_optimizer", "fusion"]
    with pytest.raises(Unsupported, match="leave one out"):
        compose([CompiledOptimizer(), FusedOptimizer()])


@pytest.mark.gpu
@pytest.mark.parametrize("optim", ["sgd", "adamw"])
@pytest.mark.parametrize("stack", [(), (Fusion(),), (CudaGraph(),)], ids=["alone", "fusion", "graph"])
def test_on_a_gpu(build, observe, optim: str, stack):
    compiled = observe(build(small(optim), CompiledOptimizer(), *stack, device="cuda"), 4)
    for ours, theirs in zip(compiled, observe(build(small(optim), device="cuda"), 4), strict=True):
        for name, value in theirs.items():  # near zero Adam takes a gradient's sign: parameters agree on average
            assert (ours[name] - value).abs().mean() < 1e-3, name
