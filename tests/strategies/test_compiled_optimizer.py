"""The whole optimizer step compiled: the same updates under any learning rate, compiled once, beside fusion."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from optexp.insight.trace import Op, Span, Trace
from optexp.strategies.compiled_optimizer import CompiledOptimizer, onto_device
from optexp.strategies.cuda_graph import CudaGraph
from optexp.strategies.fused_optimizer import FusedOptimizer
from optexp.strategies.fusion import Fusion
from optexp.strategy import Unsupported, compose
from optexp.workloads.mlp import Mlp

CPU = torch.device("cpu")
STEPS = (Span("step", 0.0, 9.0),)


def small(optim: str = "sgd") -> Mlp:
    return Mlp(mode="train", dim=8, layers=2, batch_size=4, optim=optim, lr=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["sgd", "adamw"])
def test_updates_are_those_of_the_plain_optimizer_at_any_rate(build, optim: str):
    torch._dynamo.reset()
    counters.clear()
    plain, compiled = build(small(optim)), build(small(optim), CompiledOptimizer())
    for rate in (0.1, 0.05, 0.2, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07):  # more than dynamo compiles anew
        plain.optimizer.param_groups[0]["lr"] = rate
        compiled.optimizer.param_groups[0]["lr"].fill_(rate)
        torch.testing.assert_close(compiled.run(), plain.run())
        for ours, theirs in zip(compiled.model.parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    found = {f"{group}/{name}": n for group, values in counters.items() for name, n in values.items()}
    assert found["compiled_optimizer/graphs"] <= 2
    trace = Trace(steps=STEPS, ops=(Op("Torch-Compiled Region: 0/0", 1.0, 1.0),))
    assert CompiledOptimizer().evidence(trace, trace, {"optimizer": "SGD"}, found).engaged


def test_rates_and_counts_become_tensors_and_keep_their_values(build):
    program = build(small("adamw"))
    program.run()
    onto_device(program.optimizer, CPU)
    (group,) = program.optimizer.param_groups
    assert group["lr"].item() == pytest.approx(0.1)
    assert all(state["step"].item() == 1 for state in program.optimizer.state.values())
    assert program.state()["optimizer/group0/lr"] is group["lr"]
    program.run()


@pytest.mark.parametrize(
    ("found", "regions", "words"),
    [
        ({}, 1, "no graph of AdamW.step"),
        ({"compiled_optimizer/graphs": 1.0, "compiled_optimizer/operations": 40.0}, 0, "ran it eagerly"),
        ({"compiled_optimizer/graphs": 2.0, "compiled_optimizer/operations": 80.0}, 1, "2 times, 40 operations each"),
    ],
)
def test_evidence_needs_a_graph_that_ran(found: dict[str, float], regions: int, words: str):
    trace = Trace(steps=STEPS, ops=(Op("Torch-Compiled Region: 0/0", 1.0, 1.0),) * regions)
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
