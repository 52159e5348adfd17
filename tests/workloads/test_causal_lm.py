"""The language model predicts the next token and sees none that come later."""

import math

import pytest
import torch

from optexp.workloads.causal_lm import CausalLm

pytest.importorskip("transformers")

TINY = {"batch_size": 2, "sequence": 8, "layers": 1, "hidden": 16, "heads": 2, "vocabulary": 50}


def build(workload: CausalLm):
    program = workload.build(torch.device("cpu"), torch.float32, seed=0)
    program.feed.reset([workload.batch(torch.Generator().manual_seed(0))])
    return program


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_later_tokens_change_nothing_before(attention: str):
    program = build(CausalLm(mode="forward", attention=attention, **TINY))
    (tokens,) = program.feed.batches[0]
    before = program.run()
    assert list(before) == ["output.logits"], "no cache is returned"
    changed = tokens.clone()
    changed[:, 5] = (tokens[:, 5] + 1) % 50
    after = program.step(program, (changed,))["output.logits"]
    torch.testing.assert_close(after[:, :5], before["output.logits"][:, :5])
    assert not torch.allclose(after[:, 5:], before["output.logits"][:, 5:])


def test_loss_is_of_the_next_token_and_falls():
    program = build(CausalLm(lr=1e-2, **TINY))
    (tokens,) = program.feed.batches[0]
    logits = program.model(tokens).logits.log_softmax(-1)
    expected = -torch.stack([logits[b, t, tokens[b, t + 1]] for b in range(2) for t in range(7)]).mean()
    losses = [program.run()["loss"].item() for _ in range(10)]
    assert losses[0] == pytest.approx(expected.item(), rel=1e-5)
    assert losses[0] == pytest.approx(math.log(50), rel=0.1)
    assert losses[-1] < losses[0]
