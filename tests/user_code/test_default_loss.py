"""The loss of a model without one tells results of another sign or in another order apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from optexp.result import Verdict
from optexp.user_code.adapters import own_loss
from optexp.workloads.module import Module
from tests.two_files import compared

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "another sign": torch.neg,
    "columns": lambda x: x.flip(-1),
    "rows": lambda x: x.flip(0),
    "heads and places": lambda x: x.transpose(1, 2),
    "one row": lambda x: torch.cat([x[1:], x[:1]]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_another_result_is_another_loss(change: str, size: float) -> None:
    output = torch.randn(4, 6, 6, 8, generator=torch.Generator().manual_seed(0)) * size
    right, wrong = (own_loss(x, ()).item() for x in (output, CHANGES[change](output)))
    assert abs(right - wrong) > 1e-3 * right > 0


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_outputs_of_zero_have_gradients(size: float) -> None:
    output = (torch.randn(8, 8, generator=torch.Generator().manual_seed(0)) * size).relu().requires_grad_()
    own_loss(output, ()).backward()
    assert output.grad is not None
    zeros, others = (output.grad[chosen].abs() for chosen in (output == 0, output != 0))
    assert zeros.min() > others.mean() / 100


def test_an_output_without_elements_leaves_the_loss_as_it_is() -> None:
    output = torch.randn(3, 4)
    none = torch.empty(0, 4)
    assert own_loss((output, none), ()).item() == own_loss((output,), ()).item()


def test_complex_numbers_are_learned_from() -> None:
    output = torch.randn(4, 6, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    right, wrong = (own_loss(x, ()).item() for x in (output, output.conj()))
    assert abs(right - wrong) > 1e-3 * right > 0


SEVERAL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 6)

    def forward(self, x):
        y = self.out(x)
        own = {"weight": self.out.weight, "rows": len(y)}
        return own | {"y": 100 * y, "best": y.argmax(-1), "width": 1e-4 * y.var(-1)}

def get_inputs():
    return [torch.randn(5, 8)]
"""


@pytest.mark.parametrize("mode", ["forward_backward", "train"])
def test_each_of_several_outputs_is_a_result_of_a_step_with_gradients(tmp_path: Path, mode: str) -> None:
    (tmp_path / "net.py").write_text(SEVERAL)
    workload = Module(mode=mode, path=str(tmp_path / "net.py"))
    program = workload.build(torch.device("cpu"), torch.float32, 0)
    found = program.step(program, workload.batch(torch.Generator().manual_seed(0)))
    assert found.keys() == {"loss", "output.y", "output.best", "output.width", "output.rows"}
    assert not any(tensor.requires_grad for tensor in found.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("y.argmax(-1)", "y.argmax(-1).clamp(max=4)", "output.best"),
        ("y.var(-1)", "y.var(-1, unbiased=False)", "output.width"),
        ("len(y)", "len(y) + 1", "output.rows"),
        ("y.argmax(-1)", "y.max(-1).indices", ""),
    ],
)
def test_each_of_several_outputs_is_compared(tmp_path: Path, old: str, new: str, named: str) -> None:
    settings = ("workload.mode=forward_backward", "measurement.verification_seeds=1")
    result = compared(tmp_path, SEVERAL, SEVERAL.replace(old, new), *settings)
    assert result.verdict is (Verdict.NOT_EQUIVALENT if named else Verdict.VERIFIED), result.headline
    assert named in result.headline
