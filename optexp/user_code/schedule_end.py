"""A schedule that ends: torch's raises after a given number of steps, and arms take more steps than the script does."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR


def outlast_schedules() -> None:
    """Keep the last rates of a schedule in all steps after its end."""
    usual: Callable[[OneCycleLR], list[float | Tensor]] = OneCycleLR.get_lr

    def get_lr(self: OneCycleLR) -> list[float | Tensor]:
        if self.last_epoch > self.total_steps:
            return [group["lr"] for group in self.optimizer.param_groups]
        return usual(self)

    OneCycleLR.get_lr = get_lr  # type: ignore[method-assign]
