"""The reference must compute in float64 throughout, also where a model's own code asks for float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from optexp.support.eagerly import eagerly
from optexp.support.float32_draws import DRAWS, drawn
from optexp.support.narrow_operators import NARROW, in_float32, quantizes
from optexp.support.wrapper_classes import WrapperClasses

_WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}
_NARROWER = {torch.float32: torch.complex64}
_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}
_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]  # getter of the attribute


class InFloat64(TorchFunctionMode):
    """Inside, every explicit request for a narrower float (`dtype=`, `.float()`, `.to(...)`, ...) means float64.

    So it does in the code of a tensor around others, which torch runs outside of any mode: that enters the mode again.

    narrow: dtype of the arms, which `x.dtype` is then: a branch on it, and `torch.finfo` of it, are part of the formula
    """

    def __init__(self, narrow: torch.dtype = torch.float64) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.narrow = narrow
        self._wrapped = WrapperClasses(self)
        self._seen = {torch.float64: narrow, torch.complex128: _NARROWER.get(narrow, torch.complex128)}

    def __enter__(self) -> InFloat64:
        import torch._dynamo  # an optimizer's first step imports it, and it would keep the replaced finfo

        self._default, self._finfo = torch.get_default_dtype(), torch.finfo
        torch.set_default_dtype(torch.float64)
        torch.finfo = self._constants  # type: ignore[misc,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        self._eagerly = eagerly()  # compiled attention has no float64
        self._eagerly.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._wrapped.put_back()
        self._eagerly.__exit__(*error)
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._default)
        torch.finfo = self._finfo  # type: ignore[misc]

    def _constants(self, dtype: torch.dtype | None = None) -> torch.finfo:
        """Of the dtype that the same line of the model sees in the arms."""
        asked = torch.float64 if dtype is None else dtype
        return self._finfo(self.narrow if asked in (torch.float64, torch.complex128) else asked)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._wrapped.meet(*args, *kwargs.values())
        if func in _CASTS:
            return Tensor.double(*args, **kwargs)
        if func == _DTYPE:
            found = func(*args, **kwargs)
            return self._seen.get(found, found)
        if func in NARROW:
            return NARROW[func](*args, **kwargs)
        if func in DRAWS:
            return drawn(func, args, kwargs)  # the arms' numbers, as those that a network begins with
        if quantizes(func):
            return in_float32(func, args, kwargs)
        if func is Tensor.view and not (args[0].is_floating_point() or args[0].is_complex()):
            return func(*args, **kwargs)  # reinterprets bits: not a request for precision
        args, kwargs = tuple(map(_wider, args)), {name: _wider(a) for name, a in kwargs.items()}
        try:
            return func(*args, **kwargs)
        except RuntimeError:  # a constant tensor of the model's, which is no buffer, stayed as narrow as it was made
            if not any(map(_narrow, (*args, *kwargs.values()))):
                raise
            return func(*map(_widened, args), **{name: _widened(a) for name, a in kwargs.items()})


def is_wide(tensor: Tensor) -> bool:
    """Whether a tensor's storage is float64. Inside `InFloat64`, `dtype` returns the arms' dtype."""
    with torch._C.DisableTorchFunction():
        return tensor.dtype is torch.float64


def widened(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on a device, in float64 or complex128 where it has such numbers."""
    wide = torch.float64 if tensor.is_floating_point() else torch.complex128 if tensor.is_complex() else tensor.dtype
    return tensor.to(device, wide, copy=True)


def _narrow(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.dtype in _WIDER


def _widened(argument: Any) -> Any:
    return argument.to(_WIDER[argument.dtype]) if _narrow(argument) else argument


def _wider(argument: Any) -> Any:
    if isinstance(argument, torch.dtype):
        return _WIDER.get(argument, argument)
    if isinstance(argument, str) and argument.endswith(("torch.FloatTensor", "cuda.FloatTensor")):
        return argument.replace("FloatTensor", "DoubleTensor")
    return argument
