"""`Trainer(callbacks=[OptexpCallback()])` marks the loop of Lightning, with automatic optimization."""

from __future__ import annotations

from typing import Any

from torch import nn

from optexp.errors import ConfigError
from optexp.support.marks import marking, steps

try:
    from lightning.pytorch import Callback, LightningModule
except ModuleNotFoundError:
    from pytorch_lightning import Callback, LightningModule

HOOKS = (  # of a step; the loop below calls none of them
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "on_train_batch_start",
    "on_before_backward", "backward", "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping",
    "clip_gradients", "optimizer_step", "on_before_zero_grad", "optimizer_zero_grad", "lr_scheduler_step",
    "on_train_batch_end",
)  # fmt: skip


class OptexpCallback(Callback):  # type: ignore[misc]
    """Ends the script where training begins, with `training_step`, its backward pass and the optimizer as the step."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not marking():
            return
        if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
            raise ConfigError(
                "OptexpCallback needs automatic optimization with one optimizer: write the loop of several in a script,"
                " and mark it with optexp.steps"
            )
        if differs := beyond(trainer, pl_module):
            raise ConfigError(
                f"OptexpCallback does not repeat {differs}: write the loop in a script, and mark it with optexp.steps"
            )
        for name in ("log", "log_dict"):
            setattr(pl_module, name, _no_log)
        loop(TrainingStep(pl_module), trainer, trainer.optimizers[0], _scheduler(trainer), trainer.train_dataloader)


def beyond(trainer: Any, module: Any) -> str:
    """Parts of Lightning's step that `loop` leaves out, in words; empty where it is the same step."""
    found = []
    if str(trainer.precision) != "32-true":
        found.append(f"precision={trainer.precision} (strategy=amp has its own)")
    if "value" in str(trainer.gradient_clip_algorithm).lower():
        found.append("gradient_clip_algorithm=value")
    found += [f"{name}()" for name in HOOKS if getattr(type(module), name) is not getattr(LightningModule, name)]
    return ", ".join(found)


class TrainingStep(nn.Module):
    """`training_step` as the forward of a module, so that strategies change all of it."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any, index: int) -> Any:
        """The loss."""
        found = self.module.training_step(batch, index)
        return found["loss"] if isinstance(found, dict) else found


def loop(model: Any, trainer: Any, optimizer: Any, scheduler: Any, loader: Any) -> None:
    """Lightning's loop without its callbacks, logs and checkpoints."""
    every, clip = trainer.accumulate_grad_batches, trainer.gradient_clip_val
    for index, batch in enumerate(steps(loader, model=model, optimizer=optimizer, every=every)):
        loss = model(batch, index) / every
        loss.backward()
        if (index + 1) % every == 0:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()


def _scheduler(trainer: Any) -> Any:
    """The schedule that is stepped with the optimizer, if there is one."""
    by_step = [each.scheduler for each in trainer.lr_scheduler_configs if each.interval == "step"]
    return by_step[0] if by_step else None


def _no_log(*args: Any, **kwargs: Any) -> None:
    """In place of `self.log`, which needs Lightning's own loop."""
