"""A known limit of a strategy, met in the first step, is UNSUPPORTED with a remedy; any other error stays one."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._inductor.runtime.cache_dir_utils
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError

from optexp.errors import Unsupported
from optexp.strategies.compiled_optimizer import CompiledOptimizer
from optexp.strategies.cuda_graph import CudaGraph
from optexp.strategies.fusion import Fusion
from optexp.workers.arm import Arm
from optexp.workers.spec import Spec
from optexp.workloads.module import Module

PENALTY = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x)

def get_inputs():
    return [torch.randn(16, 4)]

def get_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

def train_step(model, batch, optimizer):
    x = batch[0].detach().requires_grad_()
    slope, = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    loss = (slope.norm(dim=1) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
"""


def test_a_gradient_of_a_gradient_is_not_compiled(tmp_path: Path) -> None:
    (tmp_path / "penalty.py").write_text(PENALTY)
    workload = Module(path=str(tmp_path / "penalty.py"), mode="train").resolve("cpu")
    Arm().setup(Spec(workload, (), "cpu", "float32", 0).pack())
    with pytest.raises(Unsupported, match="has no double backward"):
        Arm().setup(Spec(workload, (Fusion(backend="aot_eager"),), "cpu", "float32", 0).pack())


def test_a_graph_that_is_walked_twice_is_not_compiled() -> None:
    said = "This backward function was compiled with non-empty donated buffers which requires create_graph=False"
    assert "goes through its graph again" in (Fusion().limit(RuntimeError(said)) or "")


def test_a_copy_that_the_compiler_leaves_out_is_a_limit() -> None:
    said = "one of the variables needed for gradient computation has been modified by an inplace operation: [torch.."
    assert "keeps a tensor for backward that this step changes in place" in (Fusion().limit(RuntimeError(said)) or "")


def test_a_tensor_inside_a_compiled_forward_has_no_gradient_of_its_own() -> None:
    said = "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if ..."
    assert "a tensor that forward made inside" in (Fusion().limit(RuntimeError(said)) or "")


def compiled_by(backend: Callable[..., Any]) -> Exception:
    """The error of a call that a compiler's back end raised in."""
    with pytest.raises(TorchDynamoException) as raised:
        torch.compile(torch.sin, backend=backend)(torch.zeros(1))
    return raised.value


def test_a_step_that_torch_cannot_compile_is_a_limit_of_its_compiler_alone() -> None:
    def fails(*_: object) -> object:
        raise ValueError("no kernel for this stride")

    def fills(*_: object) -> object:
        raise torch.OutOfMemoryError("out of memory")

    def tears(*_: object) -> object:
        raise ImportError("kernel.so: file too short")

    reason = Fusion().limit(compiled_by(fails)) or ""
    assert "torch's compiler fails on this program, which runs without it" in reason
    assert "ValueError: no kernel for this stride" in reason
    assert Fusion().limit(compiled_by(fills)) is None
    assert Fusion().limit(compiled_by(tears)) is None
    assert Fusion(backend="kernels").limit(compiled_by(fails)) is None


def test_parts_of_a_compiled_forward_have_no_backward_of_their_own() -> None:
    said = "Trying to backward through the graph a second time (or directly access saved tensors after ..."
    assert "whose backward runs once" in (Fusion().limit(RuntimeError(said)) or "")


CONDITION = """
import torch
from torch import nn
from torch._higher_order_ops.scan import scan

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(torch.ones(4))

    def forward(self, x):
        _, y = scan(lambda h, row: ((h + row) * self.decay, (h + row) * 2), torch.zeros_like(x[0]), x)
        return torch.cond(y.mean() > 0, lambda y: y * 2, lambda y: y - 1, (y,))

def get_inputs():
    return [torch.randn(3, 4)]
"""


def test_what_the_compiler_cannot_compile_is_no_error_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "condition.py").write_text(CONDITION)
    workload = Module(path=str(tmp_path / "condition.py")).resolve("cpu")
    with pytest.raises(Unsupported, match="torch's compiler fails on this program, which runs without it"):
        Arm().setup(Spec(workload, (Fusion(),), "cpu", "float32", 0).pack())


QUEUE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("queue", torch.randn(4, 8))

    def forward(self, x):
        y = self.linear(x) @ self.queue.clone()
        torch._dynamo.graph_break()
        self.queue[:, :1] = x.detach().mean(0)[:, None]
        return y

def get_inputs():
    return [torch.randn(3, 4)]
"""


@pytest.mark.slow
def test_a_copy_that_the_compiler_leaves_out_is_no_error_of_the_program(tmp_path: Path) -> None:
    """As the queue of a momentum contrast, which the step reads, and then writes."""
    (tmp_path / "queue_written.py").write_text(QUEUE)
    workload = Module(path=str(tmp_path / "queue_written.py"), mode="forward_backward").resolve("cpu")
    with pytest.raises(Unsupported, match="keeps a tensor for backward that this step changes in place"):
        Arm().setup(Spec(workload, (Fusion(),), "cpu", "float32", 0).pack())


def test_an_error_in_generated_code_is_the_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "generated.py").write_text("raise RuntimeError('tensors are immutable')\n")
    with pytest.raises(RuntimeError) as raised:
        runpy.run_path(str(tmp_path / "generated.py"))
    assert "tensors are immutable" in (Fusion().limit(raised.value) or "")
    assert "tensors are immutable" in (CompiledOptimizer().limit(raised.value) or "")


def test_an_error_inside_of_the_compiler_is_its_own() -> None:
    def broken(*_: Any) -> Any:
        raise IndexError("list index out of range")

    with patch("torch._dynamo.guards.GuardBuilder.SHAPE_ENV", broken), pytest.raises(IndexError) as raised:
        torch.compile(torch.sin, backend="eager")(torch.zeros(2))
    assert "IndexError: list index out of range" in (Fusion().limit(raised.value) or "")


def test_memory_that_ran_out_is_no_limit() -> None:
    error = InductorError(torch.OutOfMemoryError("out of memory"), None)
    assert Fusion().limit(error) is None


def test_other_errors_are_no_limits() -> None:
    assert Fusion().limit(RuntimeError("something else")) is None


OWN_OPTIMIZER = """
import torch
from torch import nn

class Signed(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, dict(lr=lr, capturable=False))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign() * float.fromhex(group["lr"].hex()))

def Model():
    return nn.Linear(4, 2)

def get_inputs():
    return [torch.randn(8, 4), torch.randint(2, (8,))]

loss = nn.CrossEntropyLoss()

def get_optimizer(parameters):
    return Signed(parameters, lr=0.1)
"""


def test_an_optimizer_that_takes_no_tensor_as_its_rate_is_a_limit(tmp_path: Path) -> None:
    (tmp_path / "signed.py").write_text(OWN_OPTIMIZER)
    workload = Module(path=str(tmp_path / "signed.py"), mode="train").resolve("cpu")
    Arm().setup(Spec(workload, (), "cpu", "float32", 0).pack())
    with pytest.raises(Unsupported, match="Signed fails with them"):
        Arm().setup(Spec(workload, (CompiledOptimizer(),), "cpu", "float32", 0).pack())


class Halved(torch.optim.SGD):
    """An optimizer of a user's that fails in a model, for want of memory, or by itself."""

    def __init__(self, error: Exception, fails: Callable[[Exception], None]) -> None:
        super().__init__([torch.nn.Parameter(torch.ones(1))])
        self.error, self.fails = error, fails

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.fails(self.error)


class Fails(torch.nn.Module):
    def forward(self, error: Exception) -> None:
        raise error


def throw(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "fails", "ours"),
    [
        (TypeError("a tensor"), throw, True),
        (TypeError("a tensor"), Fails(), False),
        (torch.OutOfMemoryError("out of memory"), throw, False),
    ],
)
def test_only_its_own_errors_are_those_of_an_optimizer(error: Exception, fails: Any, ours: bool) -> None:
    with pytest.raises(type(error)) as raised:
        Halved(error, fails).step()
    reason = CudaGraph().limit(raised.value)
    assert ("Halved fails with them (TypeError: a tensor)" in reason) if reason else not ours
