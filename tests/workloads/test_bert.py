"""BERT is Hugging Face's, at BERT-base's size on a GPU, and learns by guessing masked tokens."""

import math
import sys

import pytest
import torch

from optexp.errors import Unsupported
from optexp.workloads.bert import Bert
from tests.workloads.operators import operators

CPU = torch.device("cpu")
TINY = {"batch_size": 2, "sequence": 12, "layers": 1, "hidden": 16, "heads": 2, "vocabulary": 50}


def build(workload: Bert):
    program = workload.build(CPU, torch.float32, seed=0)
    program.feed.reset([workload.batch(torch.Generator().manual_seed(0))])
    return program


def test_missing_library_is_said_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Unsupported) as reason:
        Bert(**TINY).model()
    assert str(reason.value) == "workload=bert needs transformers: pip install 'optexp[models]'"


def test_on_a_gpu_it_is_bert_base():
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = Bert().resolve("cuda").model()
    assert sum(p.numel() for p in model.parameters()) == 109_482_240


def test_outputs_have_names_and_attention_written_out_agrees():
    pytest.importorskip("transformers")
    fused, written = (build(Bert(attention=attention, **TINY)).run() for attention in ("sdpa", "eager"))
    assert {name: tuple(t.shape) for name, t in fused.items()} == {
        "output.last_hidden_state": (2, 12, 16),
        "output.pooler_output": (2, 16),
    }
    for name, tensor in fused.items():
        torch.testing.assert_close(tensor, written[name])


def test_every_sequence_has_as_many_tokens_to_guess():
    tokens, labels = Bert(mode="train", **TINY).batch(torch.Generator().manual_seed(1))
    assert (labels >= 0).sum(dim=1).tolist() == [2, 2]
    assert (tokens[labels >= 0] == 0).all()


def test_it_learns():
    pytest.importorskip("transformers")
    program = build(Bert(mode="train", lr=1e-2, **TINY))
    losses = [program.run()["loss"].item() for _ in range(10)]
    assert losses[0] == pytest.approx(math.log(50), rel=0.1)
    assert losses[-1] < losses[0]
    assert all(p.grad is not None for p in program.model.parameters())


def test_attention_written_out_is_no_fused_one():
    pytest.importorskip("transformers")
    fused, written = (operators(build(Bert(attention=attention, **TINY))) for attention in ("sdpa", "eager"))
    assert any("scaled_dot_product" in name for name in fused)
    assert not any("scaled_dot_product" in name for name in written)
    assert written["_softmax"] == 1
