"""Convolutions that read and return channels-last: weights, state and inputs converted, and the same numbers."""

import pytest
import torch
from torch import Tensor, nn

from optexp.program import Program, ResidentFeed, forward
from optexp.strategies.amp import Amp
from optexp.strategies.channels_last import ChannelsLast
from optexp.strategies.cuda_graph import CudaGraph
from optexp.strategies.inplace import Inplace
from optexp.trace import Kernel, Span, Trace
from optexp.workloads.lenet5 import LeNet5
from optexp.workloads.mlp import Mlp
from optexp.workloads.module import Module
from optexp.workloads.training import Training

LENET = LeNet5(batch_size=4, optim="sgd")
LAST = torch.channels_last


@pytest.mark.parametrize("stack", [(), (Inplace(),)], ids=["alone", "inplace"])
def test_steps_are_those_of_the_plain_layout(build, observe, stack):
    for ours, plain in zip(observe(build(LENET, ChannelsLast(), *stack)), observe(build(LENET)), strict=True):
        for name, value in plain.items():
            torch.testing.assert_close(ours[name], value, atol=1e-6, rtol=1e-5, msg=name)


def test_weights_state_gradients_and_batches_are_converted(build):
    program = build(LENET, ChannelsLast())
    program.run()
    weight = program.model[3].weight
    state = program.optimizer.state[weight]["momentum_buffer"]
    assert all(tensor.is_contiguous(memory_format=LAST) for tensor in (weight, weight.grad, state))
    given = torch.randn(4, 3, 5, 5)
    program.feed.reset([(given,)])
    for images in (program.feed.next()[0], program.feed.bring((given,))[0]):
        assert torch.equal(images, given)
        assert images.is_contiguous(memory_format=LAST)


def test_batches_of_a_loader_are_converted_when_the_model_is_called(build):
    program = build(Training(batch_size=4, architecture="lenet5"))
    optimized, notes = ChannelsLast().apply(program)
    assert optimized.feed is program.feed
    assert notes["after"] == {"last": 2, "first": 0, "either": 0}


def test_evidence_compares_what_convolutions_return(build):
    _, notes = ChannelsLast().apply(build(LENET))
    steps = (Span("step", 0.0, 9.0),)
    kernel = Kernel("void cudnn::engines_precompiled::nchwToNhwcKernel<__half>", 1.0, 1.0)
    before, after = Trace(steps=steps, kernels=(kernel, kernel)), Trace(steps=steps)
    evidence = ChannelsLast().evidence(before, after, notes, {})
    assert evidence.engaged
    assert evidence.text == "2 of 2 convolutions return channels-last (0 before), 2 transposes a step became 0"


def test_a_model_that_is_so_already_is_not_engaged():
    feed = ResidentFeed(torch.device("cpu"))
    feed.reset([(torch.randn(2, 4, 5, 5),)])
    model = nn.Conv2d(4, 8, 3).to(memory_format=LAST)
    _, notes = ChannelsLast().apply(Program(model=model, step=forward, feed=feed))
    evidence = ChannelsLast().evidence(None, None, notes, {})
    assert not evidence.engaged
    assert evidence.text == "1 of 1 convolutions return channels-last, as many as before"


def test_convolutions_in_what_torch_compiles_itself_are_counted():
    class Compiled(nn.Conv2d):
        @torch.compile(backend="eager", fullgraph=True)
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, super().forward, super().forward, (x,))

    feed = ResidentFeed(torch.device("cpu"))
    feed.reset([(torch.randn(2, 4, 5, 5),)])
    _, notes = ChannelsLast().apply(Program(model=Compiled(4, 8, 3), step=forward, feed=feed))
    assert notes["after"] == {"last": 1, "first": 0, "either": 0}


def test_weights_for_volumes_stay_as_they_are():
    feed = ResidentFeed(torch.device("cpu"))
    feed.reset([(torch.randn(2, 4, 5, 5),)])
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Unflatten(1, (2, 4)), nn.Conv3d(2, 3, 2))
    expected = model(feed.next()[0])
    program, notes = ChannelsLast().apply(Program(model=model, step=forward, feed=feed))
    torch.testing.assert_close(program.step(program, feed.next())["output"], expected)
    trace = Trace(steps=(Span("step", 0.0, 9.0),))
    assert ChannelsLast().evidence(trace, trace, notes, {}).text.startswith("1 of 1 convolutions")


def test_a_model_without_images_is_unsupported(build):
    assert "leave channels_last out" in ChannelsLast().unsupported(build(Mlp(dim=4)), torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_stacks_with_lower_precision_and_capture(build, observe, captured: bool):
    stack = [Amp(), *([CudaGraph()] if captured else [])]
    program = build(LENET, ChannelsLast(), *stack, device="cuda")
    for ours, plain in zip(observe(program), observe(build(LENET, *stack, device="cuda")), strict=True):
        for name, value in plain.items():
            assert (ours[name].float() - value.float()).abs().mean() < 1e-2, name
    assert program.model[3].weight.grad.is_contiguous(memory_format=LAST)


PARTS = """
import torch
from torch import nn
class Model(nn.ModuleDict):
    def __init__(self): super().__init__({"G": nn.ConvTranspose2d(8, 3, 4), "D": nn.Conv2d(3, 4, 3)})
def get_inputs(): return [torch.rand(2, 3, 4, 4)]
def get_optimizer(params): return torch.optim.SGD(params, 0.1)
def train_step(model, batch, optimizer):
    loss = (model["D"](model["G"](batch[0].mean() * torch.ones(2, 8, 1, 1))) - model["D"](batch[0])).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
"""


def test_a_step_that_calls_parts_of_its_model_alone_is_seen_whole(tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    workload = Module(path=str(tmp_path / "parts.py"), mode="train")
    program = workload.build(torch.device("cpu"), torch.float32, 0)
    program.feed.reset(workload.batches(torch.Generator().manual_seed(0), 1))
    _, notes = ChannelsLast().apply(program)
    assert sum(notes["after"].values()) == 3
    assert notes["after"]["last"] > notes["before"]["last"]
    assert any("never model(...)" in note for note in workload.notes())
    _, notes = Amp().apply(program)
    assert "the step never calls model(...)" in Amp().evidence(Trace(steps=()), Trace(steps=()), notes, {}).text
