"""Dropout that drops nothing: at p = 0 a step that draws random numbers can be compared with fp64, tensor by tensor.

And the rates of a step, which tell a wrong one however little it shows in the results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from optexp.support.eagerly import eagerly

DIGITS = 6  # of a rate: 1 - 0.9 is 0.1

_PYTHON = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    F.multi_head_attention_forward,
)  # fmt: skip
_NATIVE = (  # they have no signature to ask
    torch.dropout, torch.dropout_, torch.feature_dropout, torch.feature_dropout_,
    torch.alpha_dropout, torch.alpha_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
)  # fmt: skip


@dataclass(frozen=True)
class Argument:
    """Where a function takes an argument, and its default."""

    position: int
    name: str
    default: Any

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return args[self.position] if len(args) > self.position else kwargs.get(self.name, self.default)


def _argument(function: Callable[..., Any], *names: str) -> Argument:
    parameters = list(inspect.signature(function).parameters.values())
    return next(Argument(i, p.name, p.default) for i, p in enumerate(parameters) if p.name in names)


# By function: its rate, and whether it drops at all.
_RATES: dict[Callable[..., Any], Argument] = {
    **{function: _argument(function, "p", "dropout_p") for function in _PYTHON},
    **dict.fromkeys(_NATIVE, Argument(1, "p", 0.0)),
    F.scaled_dot_product_attention: Argument(4, "dropout_p", 0.0),
}
_DROPPING: dict[Callable[..., Any], Argument] = {
    **{function: _argument(function, "training") for function in _PYTHON},
    **dict.fromkeys(_NATIVE, Argument(2, "train", True)),
}


class NoDropout(TorchFunctionMode):
    """Inside, every dropout function has rate 0, whatever it is called with; torch.compile traces it so."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if rate := _RATES.get(func):
            if len(args) > rate.position:
                args = (*args[: rate.position], 0.0, *args[rate.position + 1 :])
            else:
                kwargs = {**kwargs, rate.name: 0.0}
        return func(*args, **kwargs)


class _Seen(TorchFunctionMode):
    """Inside, the rates of all dropout functions that drop are written down."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RATES and (func not in _DROPPING or _DROPPING[func].of(args, kwargs)):
            self.rates += [rate] if (rate := round(float(_RATES[func].of(args, kwargs)), DIGITS)) else []
        return func(*args, **kwargs)


def rates(step: Callable[[], Any]) -> list[float]:
    """Rates of all dropout functions that a step calls and that drop, sorted; of compiled code its plain version's.

    Code that was captured calls none.
    """
    with eagerly(), (seen := _Seen()):
        step()
    return sorted(seen.rates)


def silence(model: nn.Module) -> None:
    """Rates that modules hold become 0 too, for kernels that read them there: of dropout, of whole layers (stochastic
    depth), inside attention and recurrent layers."""
    for module in model.modules():
        kind = type(module).__name__.lower()
        for name, value in vars(module).items():
            dropping = "drop" in name or (name == "p" and ("drop" in kind or "stochastic" in kind))
            if dropping and isinstance(value, float):
                setattr(module, name, 0.0)
