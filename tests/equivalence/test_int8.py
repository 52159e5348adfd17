"""Plain int8: rounded operands of products, and a verification that tells 8 bits from 4."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import optexp
from optexp.equivalence.int8 import RoundedProducts
from optexp.result import Verdict


class Products(nn.Module):
    """Each kind of product once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv, self.recurrent = nn.Linear(8, 8), nn.Conv1d(4, 4, 3, padding=1), nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.linear(x), self.conv(x), self.recurrent(x)[0], x @ self.linear.weight, x.bmm(x.mT)]


def test_every_kind_of_product_has_rounded_operands() -> None:
    torch.manual_seed(0)
    model, x = Products(), torch.randn(4, 4, 8)
    with torch.no_grad():
        plain = model(x)
        with RoundedProducts():
            rounded = model(x)
            assert torch.equal(x + x, 2 * x)
            assert not nn.functional.linear(torch.zeros(2, 8), model.linear.weight).any()  # no division by 0
    for ours, theirs in zip(rounded, plain, strict=True):
        off = float((ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt())
        assert 1e-4 < off < 0.03


def test_operands_have_255_values() -> None:
    x = torch.randn(64, 64)
    with RoundedProducts():
        rounded = torch.mm(x, torch.eye(64))
    steps = rounded / (x.abs().max() / 127)
    torch.testing.assert_close(steps, steps.round(), atol=1e-3, rtol=0)
    assert steps.abs().max() <= 127.001


SOURCE = """
import torch
from torch import nn

def eight(model: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)

def four(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 2:
            step = parameter.abs().max() / 7
            parameter.data = (parameter / step).round() * step
"""


@pytest.mark.parametrize(
    ("function", "mode", "verdict"),
    [
        ("eight", "forward", Verdict.VERIFIED),
        ("four", "forward", Verdict.NOT_EQUIVALENT),
        ("four", "train", Verdict.UNSUPPORTED),
    ],
)
def test_eight_bits_pass_and_four_do_not_and_gradients_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, mode: str, verdict: Verdict
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quantizing.py").write_text(SOURCE)
    result = optexp.compare(
        nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)),
        torch.randn(16, 32),
        strategy="replace",
        overrides=[f"strategy.replace.target=quantizing.py:{function}", "strategy.replace.precision=int8"],
        mode=mode,
        verify="only",
        isolation="none",
        tracking={"enabled": False},
    )
    assert result.verdict is verdict, result.headline
    assert ("workload.mode=forward" in result.headline) is (verdict is Verdict.UNSUPPORTED)
