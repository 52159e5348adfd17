"""BERT as Hugging Face builds it, with random weights: a transformer encoder over batch sizes and sequence lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optexp.program import Batch
from optexp.schema import choice
from optexp.workload import Workload, extra, known, sgd_or_adamw

MASKED = 0.15  # of the tokens are to be guessed, as BERT was trained
IGNORED = -100  # cross_entropy's word for a token that is not


@dataclass
class Bert(Workload):
    """BertModel when it infers; BertForMaskedLM when it learns. One sample is one sequence.

    Sizes left open are BERT-base's on a GPU. `dropout` is 0, unlike in the published model, whose rate is 0.1: without
    it every element of a step can be compared.
    """

    sizes: ClassVar = {
        "cuda": {"batch_size": 16, "sequence": 256, "layers": 12, "hidden": 768, "heads": 12},
        "cpu": {"batch_size": 2, "sequence": 64, "layers": 2, "hidden": 128, "heads": 2},
    }
    preload: ClassVar = ("transformers.models.bert.modeling_bert",)

    mode: str = choice("forward", "forward_backward", "train")
    batch_size: int | None = None
    sequence: int | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    vocabulary: int = 30522
    attention: str = choice("sdpa", "eager")
    dropout: float = 0.0
    optim: str = choice("adamw", "sgd")
    lr: float = 1e-4

    @property
    def samples(self) -> int:
        return known(self.batch_size)

    @property
    def targets(self) -> int:
        return 0 if self.mode == "forward" else 1

    def model(self) -> nn.Module:
        transformers = extra("transformers", self.name)
        hidden = known(self.hidden)
        config = transformers.BertConfig(
            vocab_size=self.vocabulary,
            hidden_size=hidden,
            num_hidden_layers=known(self.layers),
            num_attention_heads=known(self.heads),
            intermediate_size=4 * hidden,
            max_position_embeddings=max(512, known(self.sequence)),
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
            attn_implementation=self.attention,
        )
        kind = transformers.BertModel if self.mode == "forward" else transformers.BertForMaskedLM
        model: nn.Module = kind(config)
        return model

    def batch(self, generator: torch.Generator) -> Batch:
        device, shape = generator.device, (known(self.batch_size), known(self.sequence))
        tokens = torch.randint(self.vocabulary, shape, generator=generator, device=device)
        if self.mode == "forward":
            return (tokens,)
        guessed = max(1, round(MASKED * shape[1]))  # the same number in every sequence: never none
        order = torch.rand(shape, generator=generator, device=device).argsort(dim=1)
        labels = torch.where(order < guessed, tokens, IGNORED)
        return tokens.masked_fill(order < guessed, 0), labels

    def loss(self, output: Any, batch: Batch) -> Tensor:
        assert isinstance(batch, tuple)
        return F.cross_entropy(output.logits.flatten(0, 1), batch[-1].flatten(), ignore_index=IGNORED)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return sgd_or_adamw(self.optim, model, self.lr)
