"""A small GPT-style language model as Hugging Face builds it, with random weights: it predicts the next token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optexp.program import Batch
from optexp.schema import choice
from optexp.workload import Workload, extra, known, sgd_or_adamw


@dataclass
class CausalLm(Workload):
    """GPT-2's architecture. One sample is one sequence; `dropout` is 0, so that every element can be compared."""

    sizes: ClassVar = {
        "cuda": {"batch_size": 8, "sequence": 256, "layers": 6, "hidden": 384, "heads": 6, "vocabulary": 50257},
        "cpu": {"batch_size": 2, "sequence": 32, "layers": 2, "hidden": 64, "heads": 2, "vocabulary": 1024},
    }
    preload: ClassVar = ("transformers.models.gpt2.modeling_gpt2",)

    mode: str = choice("train", "forward_backward", "forward")
    batch_size: int | None = None
    sequence: int | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    vocabulary: int | None = None
    attention: str = choice("sdpa", "eager")
    dropout: float = 0.0
    optim: str = choice("adamw", "sgd")
    lr: float = 3e-4

    @property
    def samples(self) -> int:
        return known(self.batch_size)

    def model(self) -> nn.Module:
        transformers = extra("transformers", self.name)
        config = transformers.GPT2Config(
            vocab_size=known(self.vocabulary),
            n_positions=known(self.sequence),
            n_embd=known(self.hidden),
            n_layer=known(self.layers),
            n_head=known(self.heads),
            embd_pdrop=self.dropout,
            attn_pdrop=self.dropout,
            resid_pdrop=self.dropout,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
            attn_implementation=self.attention,
        )
        model: nn.Module = transformers.GPT2LMHeadModel(config)
        return model

    def batch(self, generator: torch.Generator) -> Batch:
        shape = known(self.batch_size), known(self.sequence)
        return (torch.randint(known(self.vocabulary), shape, generator=generator, device=generator.device),)

    def loss(self, output: Any, batch: Batch) -> Tensor:
        assert isinstance(batch, tuple)
        return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return sgd_or_adamw(self.optim, model, self.lr)
