"""An error in backward shows the line of the user's forward pass whose gradient failed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from optexp.errors import Failure
from optexp.workers.arm import Arm
from optexp.workers.client import InProcess
from optexp.workers.serving import describe
from optexp.workers.spec import Spec
from optexp.workloads.mlp import Mlp
from optexp.workloads.module import Module

MODEL = """
import torch
from torch import nn


class Odd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        {backward}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        {forward}


def get_inputs():
    return [torch.randn(8, 4)]


def train_step(model, batch, optimizer):
    loss = model(batch[0]).square().mean()
    loss.backward()
    optimizer.step()
    return loss
"""
OVERWRITTEN = "y = torch.sigmoid(self.lin(x))  # kept\n        y += 1\n        return y"


def failure(folder: Path, mode: str, forward: str, backward: str = "return gradient") -> Failure:
    path = folder / "mine.py"
    path.write_text(MODEL.format(forward=forward, backward=backward))
    arm = InProcess(Arm(), "baseline")
    with pytest.raises(Failure) as caught:
        arm.call(Arm.setup, packed=Spec(Module(path=str(path), mode=mode), (), "cpu", "float32", 0).pack())
    return caught.value


@pytest.mark.parametrize("mode", ["forward_backward", "train"])
def test_the_line_whose_result_was_overwritten(tmp_path: Path, mode: str) -> None:
    found = failure(tmp_path, mode, OVERWRITTEN)
    assert "modified by an inplace operation" in found.message
    assert "y = torch.sigmoid(self.lin(x))  # kept" in found.traceback
    assert "Traceback of the forward call whose backward failed" in found.traceback
    files = [line.split('"')[1] for line in found.traceback.splitlines() if line.startswith("  File ")]
    assert set(files) == {str(tmp_path / "mine.py")}
    assert not torch.is_anomaly_enabled()


def test_the_call_of_a_function_whose_gradient_has_another_shape(tmp_path: Path) -> None:
    found = failure(tmp_path, "forward_backward", "return Odd.apply(self.lin(x))", "return gradient[:3]")
    assert "return Odd.apply(self.lin(x))" in found.traceback


def test_an_error_in_the_users_own_backward_has_its_own_traceback(tmp_path: Path) -> None:
    found = failure(tmp_path, "forward_backward", "return Odd.apply(self.lin(x))", "raise ValueError('mine')")
    assert "raise ValueError('mine')" in found.traceback
    assert "Traceback of the forward call" not in found.traceback


def test_an_error_of_forward_is_no_error_of_backward(tmp_path: Path) -> None:
    found = failure(tmp_path, "forward_backward", "return self.lin(x.t())")
    assert "the model cannot take its batch: " in found.message
    assert "return self.lin(x.t())" in found.message
    assert "Traceback of the forward call" not in found.traceback


class Once:
    """Fails in backward the first time only, so that nothing more can be told."""

    def __init__(self) -> None:
        self.calls = 0

    def step(self) -> Tensor:
        self.calls += 1
        x = torch.ones(2, requires_grad=True)
        y = x.exp()
        if self.calls == 1:
            with torch.no_grad():
                y.add_(1)
        y.sum().backward()
        return y


def test_it_is_done_once_more_and_no_oftener() -> None:
    target = Once()
    with pytest.raises(Failure) as caught:
        InProcess(target, "baseline").call(type(target).step)
    assert target.calls == 2
    assert "modified by an inplace operation" in caught.value.message
    assert "test_anomaly.py" in caught.value.traceback


def test_other_errors_are_not_repeated() -> None:
    calls = []

    class Fails:
        def step(self) -> None:
            calls.append(1)
            nn.Linear(2, 2)(torch.ones(3))

    with pytest.raises(Failure):
        InProcess(Fails(), "baseline").call(Fails.step)
    assert calls == [1]
    assert describe(ValueError("x")).message == "ValueError: x"


def test_memory_that_runs_out_in_a_batch_shows_none_of_our_frames() -> None:
    with pytest.raises(Failure) as raised:
        InProcess(Mlp(batch_size=10**12, dim=256), "baseline").call(Mlp.batch, torch.Generator())
    assert raised.value.message == "out of memory: 953674 GiB in one piece"
    assert raised.value.traceback == ""
    told = describe(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert (told.type, told.message.partition(" (")[0]) == ("OutOfMemoryError", "out of memory")
    assert describe(MemoryError()).message == "out of memory (MemoryError)"
    assert (
        describe(torch.OutOfMemoryError("CUDA out of memory.")).message == "torch.OutOfMemoryError: CUDA out of memory."
    )
    card = (
        "CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 7.94 GiB is"
        " free. Process 2799 has 1022.00 MiB memory in use. Process 2815 has 762.00 MiB memory in use."
    )
    told = describe(torch.OutOfMemoryError(card)).message
    assert told == "CUDA out of memory: 8.00 GiB in one piece, 7.94 GiB of 139.80 GiB free"
