"""`trainer.add_callback(OptexpCallback(trainer))` marks the loop of Hugging Face's Trainer."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

from optexp.errors import ConfigError
from optexp.support.marks import marking, steps


class OptexpCallback(transformers.TrainerCallback):
    """Ends the script where training begins, with the Trainer's step as the step."""

    def __init__(self, trainer: transformers.Trainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if marking():
            if args.fp16:
                raise ConfigError(
                    "OptexpCallback does not repeat the loss scale of fp16=True: use bf16, or strategy=amp"
                )
            self.trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
            loop(self.trainer, *(kwargs[name] for name in ("model", "optimizer", "lr_scheduler", "train_dataloader")))


def loop(trainer: Any, model: Any, optimizer: Any, lr_scheduler: Any, loader: Any) -> None:
    """The Trainer's own loop without its callbacks, logs and checkpoints."""
    every = trainer.args.gradient_accumulation_steps
    for index, inputs in enumerate(steps(loader, model=model, optimizer=optimizer, every=every)):
        trainer.training_step(model, inputs)  # with its backward pass
        if (index + 1) % every == 0:
            if trainer.args.max_grad_norm:
                nn.utils.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
            optimizer.step()
            lr_scheduler.step()
            model.zero_grad()
