"""Inference tensors come out, with the same bits; where something is differentiated there is a reason."""

import pytest
import torch
from torch import nn

from optexp.errors import Unsupported
from optexp.program import Program, ResidentFeed, forward
from optexp.strategies.cuda_graph import CudaGraph
from optexp.strategies.fusion import Fusion
from optexp.strategies.inference_mode import InferenceMode
from optexp.strategy import BITWISE, compose
from optexp.workloads.gelu import Gelu
from optexp.workloads.mlp import Mlp

MLP = Mlp(mode="forward", dim=8, batch_size=4)


@pytest.mark.parametrize("workload", [Gelu(size=8), MLP], ids=["gelu", "mlp"])
def test_the_same_bits_in_inference_tensors(build, workload):
    program, plain = build(workload, InferenceMode()), build(workload)
    ours, theirs = program.run()["output"], plain.run()["output"]
    assert ours.is_inference()
    assert not theirs.is_inference()
    assert torch.equal(ours, theirs)
    assert InferenceMode().contract is BITWISE


def test_evidence_counts_what_came_out(build):
    _, notes = InferenceMode().apply(build(MLP))
    evidence = InferenceMode().evidence(None, None, notes, {})
    assert evidence.engaged
    assert evidence.text == "1 of 1 outputs are inference tensors"


def test_a_model_that_returns_its_input_is_not_engaged():
    feed = ResidentFeed(torch.device("cpu"))
    feed.reset([(torch.ones(4),)])
    _, notes = InferenceMode().apply(Program(model=nn.Identity(), step=forward, feed=feed))
    evidence = InferenceMode().evidence(None, None, notes, {})
    assert not evidence.engaged
    assert "is an input" in evidence.text


@pytest.mark.parametrize("mode", ["forward_backward", "train"])
def test_what_is_differentiated_is_unsupported(build, mode: str):
    program = build(Mlp(mode=mode, dim=8, batch_size=4))
    assert "use workload.mode=forward" in InferenceMode().unsupported(program, torch.device("cpu"))


def test_a_model_that_differentiates_inside_says_why_not():
    class Force(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                x = x.clone().requires_grad_()
                return torch.autograd.grad(x.square().sum(), x)[0]

    feed = ResidentFeed(torch.device("cpu"))
    feed.reset([(torch.ones(4),)])
    program = Program(model=Force(), step=forward, feed=feed)
    program.run()
    with pytest.raises(Unsupported, match=r"does not run in inference mode .*: leave it out"):
        InferenceMode().apply(program)


def test_a_model_that_is_captured_by_itself_is_out_of_its_reach():
    with pytest.raises(Unsupported, match=r"inference_mode does not work with cuda_graph\[scope=model\]"):
        compose([InferenceMode(), CudaGraph("model")])
    compose([InferenceMode(), CudaGraph()])


@pytest.mark.gpu
@pytest.mark.parametrize("stack", [(CudaGraph(),), (Fusion(),), (Fusion(), CudaGraph())])
def test_captured_and_compiled_steps_infer_too(build, stack):
    program, plain = build(MLP, InferenceMode(), *stack, device="cuda"), build(MLP, device="cuda")
    for _ in range(4):
        ours, theirs = program.run()["output"], plain.run()["output"]
        assert ours.is_inference()
        torch.testing.assert_close(ours.clone(), theirs, atol=1e-5, rtol=1e-5)
