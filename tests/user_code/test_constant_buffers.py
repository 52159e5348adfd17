"""Buffers that no step changes, as masks and tables, may be in one program alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.result import Verdict
from tests.user_code.test_rare_steps import compared

PROGRAM = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        %s

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        %s

def get_inputs():
    return [torch.randn(4, 8, 16)]

def train_step(model, batch, optimizer):
    optimizer.zero_grad()
    loss = model(batch[0]).square().mean()
    loss.backward()
    optimizer.step()
    return loss

def get_optimizer(params):
    return torch.optim.AdamW(params)
"""
MASK = 'self.register_buffer("mask", torch.ones(8, 8).tril())'
MASKED = '(q @ k.mT / 4).masked_fill(self.mask == 0, float("-inf")).softmax(-1) @ v'
EXPLICIT = PROGRAM % (MASK, f"return {MASKED}")
FUSED = PROGRAM % ("pass", "return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)")
COUNTING = PROGRAM % (f'{MASK}; self.register_buffer("steps", torch.zeros(()))', f"self.steps += 1; return {MASKED}")


@pytest.mark.parametrize(("first", "after"), [(EXPLICIT, FUSED), (FUSED, EXPLICIT)], ids=["left out", "added"])
def test_a_mask_may_be_in_one_program_alone(first: str, after: str, tmp_path: Path) -> None:
    result = compared(tmp_path, after, first)
    assert result.verdict is Verdict.VERIFIED, result.headline


def test_a_buffer_that_steps_change_may_not_be_left_out(tmp_path: Path) -> None:
    result = compared(tmp_path, FUSED, COUNTING)
    assert result.verdict is Verdict.NOT_EQUIVALENT
    assert "buffer/steps fails G0: missing" in result.headline
