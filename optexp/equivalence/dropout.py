"""Dropout that drops nothing: at p = 0 a step that draws random numbers can be compared with fp64, tensor by tensor."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

_PYTHON = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    F.multi_head_attention_forward,
)  # fmt: skip
_NATIVE = (  # they have no signature to ask
    torch.dropout, torch.dropout_, torch.feature_dropout, torch.feature_dropout_,
    torch.alpha_dropout, torch.alpha_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
)  # fmt: skip


def _rate_of(function: Callable[..., Any]) -> tuple[int, str]:
    names = list(inspect.signature(function).parameters)
    name = next(name for name in ("p", "dropout_p") if name in names)
    return names.index(name), name


# Where each function takes its rate: position and name.
_RATES: dict[Callable[..., Any], tuple[int, str]] = {
    **{function: _rate_of(function) for function in _PYTHON},
    **dict.fromkeys(_NATIVE, (1, "p")),
    F.scaled_dot_product_attention: (4, "dropout_p"),
}


class NoDropout(TorchFunctionMode):
    """Inside, every dropout function has rate 0, whatever it is called with; torch.compile traces it so."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RATES:
            position, name = _RATES[func]
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            else:
                kwargs = {**kwargs, name: 0.0}
        return func(*args, **kwargs)


def silence(model: nn.Module) -> None:
    """Rates that modules hold become 0 too, for kernels that read them there: of dropout, of whole layers (stochastic
    depth), inside attention and recurrent layers."""
    for module in model.modules():
        kind = type(module).__name__.lower()
        for name, value in vars(module).items():
            dropping = "drop" in name or (name == "p" and ("drop" in kind or "stochastic" in kind))
            if dropping and isinstance(value, float):
                setattr(module, name, 0.0)
