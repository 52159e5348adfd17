"""A Hugging Face class by its import path alone: its config, inputs and labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from optexp.errors import ConfigError
from optexp.program import Program
from optexp.strategies.replace import Replace
from optexp.workloads.module import Module
from tests.export.test_repro import assert_same, executed, written

pytest.importorskip("transformers")
CPU = torch.device("cpu")
BERT = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 50}
DISTIL = {"n_layers": 1, "dim": 16, "hidden_dim": 32, "n_heads": 2, "vocab_size": 50}
GPT2 = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 50, "bos_token_id": None, "eos_token_id": None}
VIT = {**{key: value for key, value in BERT.items() if key != "vocab_size"}, "image_size": 32}
SHAPES = [{"batch": 2, "sequence": 8}, {"batch": 1, "sequence": 16}]
T5 = {"num_layers": 1, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "vocab_size": 50}


def workload(name: str, config: dict[str, Any], mode: str = "train", **settings: Any) -> Module:
    given = Module(target=f"transformers:{name}", mode=mode, kwargs={"config": config} if config else {}, **settings)
    return given.resolve("cpu")


def ready(one: Module) -> Program:
    program = one.build(CPU, torch.float32, 0)
    program.feed.reset(one.batches(torch.Generator().manual_seed(0), 2))
    return program


@pytest.mark.parametrize(
    ("name", "config", "entries"),
    [
        ("DistilBertForSequenceClassification", DISTIL, {"labels": (4,)}),
        ("BertForTokenClassification", {**BERT, "num_labels": 5}, {"labels": (4, 64)}),
        ("BertForSequenceClassification", {**BERT, "num_labels": 1}, {"labels": (4,)}),  # a regression
        ("GPT2LMHeadModel", GPT2, {"labels": (4, 64)}),
        ("T5ForConditionalGeneration", T5, {"decoder_input_ids": (4, 64), "labels": (4, 64)}),
        ("ViTForImageClassification", VIT, {"pixel_values": (4, 3, 32, 32), "labels": (4,)}),
    ],
)
def test_it_learns_by_its_own_loss(name: str, config: dict[str, Any], entries: dict[str, Any]) -> None:
    one = workload(name, config)
    program = ready(one)
    batch = program.feed.next()
    assert isinstance(batch, dict)
    if "pixel_values" not in entries:
        entries = {"input_ids": (4, 64), "attention_mask": (4, 64), **entries}
    assert {key: tuple(tensor.shape) for key, tensor in batch.items()} == entries
    assert program.run()["loss"].isfinite()
    loss = program.loss
    assert loss is not None
    output = program.model(**batch)
    assert torch.equal(loss(output, batch), output.loss)
    assert one.notes()[0].startswith("batch: ")


def test_sizes_of_its_batches_are_named_in_shapes() -> None:
    one = workload(
        "DistilBertModel", DISTIL, "forward", shapes=[{"batch": 2, "sequence": 8}, {"sequence": 16, "batch": 1}]
    )
    shapes = [tuple(batch["input_ids"].shape) for batch in one.batches(torch.Generator().manual_seed(0), 2)]
    assert shapes == [(2, 8), (1, 16)]
    one.build(CPU, torch.float32, 0)
    assert one.notes()[0].startswith("batch: input_ids [batch, sequence], attention_mask [batch, sequence], because no")


def test_ids_lie_in_the_vocabulary_and_nothing_is_padding() -> None:
    (batch,) = workload("DistilBertModel", DISTIL, "forward").batches(torch.Generator().manual_seed(0), 1)
    assert batch["input_ids"].max() == 49
    assert torch.equal(batch["attention_mask"], torch.ones(4, 64, dtype=torch.int64))


def test_its_default_config_is_used() -> None:
    made = workload("DistilBertForSequenceClassification", {}).made_with
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    described = made(DistilBertForSequenceClassification)[1]["config"]
    assert described.make().to_dict() == DistilBertConfig().to_dict()


@pytest.mark.parametrize(
    ("name", "config", "told"),
    [
        ("Wav2Vec2Model", {}, r"^workload=module: describe the inputs of workload.target"),
        ("DistilBertModel", {"n_layer": 1, "_target_": "transformers.DistilBertConfg"}, r"has no 'DistilBertConfg'"),
        (
            "DistilBertModel",
            {"n_layer": 1},
            r"^workload.kwargs.config: DistilBertConfig has no 'n_layer' \(did you mean n_",
        ),
        ("BertModel", {"num_hidden_layers": "two"}, r"^workload.kwargs.config: .*BertConfig refuses its arguments"),
    ],
)
def test_mistakes_are_told_in_one_sentence(name: str, config: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        ready(workload(name, config))
    assert "\n" not in str(caught.value)


def test_the_file_to_take_home_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = workload("DistilBertModel", DISTIL, "forward")
    program = written(tmp_path, one, (Replace("transformers:DistilBertModel"),))
    assert_same(executed(tmp_path / "repro.py", monkeypatch), program)
