"""The reference must compute in float64 throughout, also where a model's own code asks for float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}
_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}


class InFloat64(TorchFunctionMode):
    """Inside, every explicit request for a narrower float (`dtype=`, `.float()`, `.to(...)`, ...) means float64."""

    def __enter__(self) -> InFloat64:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._default)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CASTS:
            return Tensor.double(*args, **kwargs)
        if func is Tensor.view:  # reinterprets bits: not a request for precision
            return func(*args, **kwargs)
        return func(*(_wider(a) for a in args), **{name: _wider(a) for name, a in kwargs.items()})


def _wider(argument: Any) -> Any:
    if isinstance(argument, torch.dtype):
        return _WIDER.get(argument, argument)
    if isinstance(argument, str) and argument.endswith(("torch.FloatTensor", "cuda.FloatTensor")):
        return argument.replace("FloatTensor", "DoubleTensor")
    return argument
