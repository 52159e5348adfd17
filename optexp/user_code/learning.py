"""The loss and the optimizer of a user's model: as they named or wrote them, else a default that is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optexp.errors import ConfigError, first_line
from optexp.program import TAKE_SPARSE, Batch
from optexp.support.sparse import is_sparse
from optexp.user_code.adapters import LOSSES, OPTIMIZERS, against, bound, by_label, kind, own_loss

if TYPE_CHECKING:
    from optexp.user_code.workload import UserWorkload


def criterion(own: UserWorkload) -> Callable[[Any, Batch], Tensor]:
    """loss(output, batch) of a program."""
    count = own.targets
    if own.loss is not None:
        return against(bound(LOSSES[own.loss], own.loss_args), _needed_labels(own, own.loss))
    if (given := own.parts.loss) is not None:
        if by_label(given):
            return against(given, _needed_labels(own, "loss"))
        return lambda output, batch: given(output, own.layout.unpack(batch))
    if count:
        name = "cross_entropy" if own.layout.integer_labels else "mse_loss"
        own.remarks.append(f"loss: {name}, because none was given")
        return against(LOSSES[name], count)
    own.remarks.append("loss: the output's own, else a weighted mean of its squares, because none was given")
    return own_loss


def _needed_labels(own: UserWorkload, name: str) -> int:
    if not own.targets:
        raise ConfigError(
            f"{name} compares outputs with a target, and a batch has none: add one after the model's inputs,"
            " as in {shape: [32], dtype: int64, high: 10}"
        )
    return own.targets


def new_optimizer(own: UserWorkload, model: nn.Module) -> torch.optim.Optimizer:
    """The user's optimizer of the model's parameters, AdamW by default.

    Raises:
        ConfigError: the optimizer does not take the parameters or their gradients, or is no optimizer.
    """
    parameters = list(model.parameters())
    if own.optimizer is None and own.parts.optimizer is not None:
        made = own.parts.optimizer(parameters)
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(f"get_optimizer(params) returned {kind(made)}: it must be a torch.optim.Optimizer")
        return made
    if own.optimizer is None:
        own.remarks.append(f"optimizer: AdamW with lr={own.lr:g}, because none was given")
    cls: Any = OPTIMIZERS[own.optimizer or "AdamW"]
    _refuse_sparse(model, cls)
    try:
        made = cls([p for p in parameters if p.requires_grad], lr=own.lr, **own.optimizer_args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer={own.optimizer or 'AdamW'}: {first_line(error)}") from None
    assert isinstance(made, torch.optim.Optimizer)
    return made


def _refuse_sparse(model: nn.Module, cls: Any) -> None:
    """Raises ConfigError where an optimizer's class updates no such parameters, or takes no such gradients."""
    if odd := [n for n, p in model.named_parameters() if p.requires_grad and is_sparse(p)]:
        layout = str(model.get_parameter(odd[0]).layout).removeprefix("torch.")
        raise ConfigError(
            f"the parameter {odd[0]} is {layout}, and no optimizer of torch's updates such a one: hold its values"
            " in a dense parameter, freeze it, or compare gradients alone with workload.mode=forward_backward"
        )
    if any(getattr(module, "sparse", False) is True for module in model.modules()) and cls not in TAKE_SPARSE:
        raise ConfigError(
            f"the model has sparse gradients (sparse=True), which {cls.__name__} does not take: leave that out, or"
            f" give an optimizer that does ({', '.join(each.__name__ for each in TAKE_SPARSE)})"
        )
