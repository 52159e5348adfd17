"""Code of tensors around others, in which a mode goes on: torch runs it outside of the mode that met the tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch._C import _disabled_torch_dispatch_impl, _disabled_torch_function_impl
from torch.overrides import TorchFunctionMode

from optexp.support.wrapped import is_wrapper

CODE = ("__torch_function__", "__torch_dispatch__")
_TENSORS = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
_DISABLED = (_disabled_torch_dispatch_impl, _disabled_torch_function_impl)


class WrapperClasses:
    """Classes whose `__torch_function__` and `__torch_dispatch__` enter a mode again, until they are put back."""

    def __init__(self, mode: TorchFunctionMode) -> None:
        self._mode, self._own = mode, dict[type, dict[str, Any]]()

    def meet(self, *arguments: Any) -> None:
        """Let the classes of these arguments enter the mode."""
        for argument in arguments:
            kind = type(argument)
            if is_wrapper(kind) and kind not in self._own:
                self._own[kind] = {name: vars(kind).get(name) for name in CODE if _has_own(kind, name)}
                for name in self._own[kind]:
                    setattr(kind, name, partial(self._run, getattr(kind, name)))

    def put_back(self) -> None:
        for kind, members in self._own.items():
            for name, member in members.items():
                delattr(kind, name) if member is None else setattr(kind, name, member)
        self._own = {}

    def _run(self, code: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        TorchFunctionMode.__enter__(self._mode)
        try:
            return code(*args, **kwargs)
        finally:
            TorchFunctionMode.__exit__(self._mode, None, None, None)


def _has_own(kind: type, name: str) -> bool:
    code = getattr(kind, name)
    return code not in _DISABLED and getattr(code, "__func__", None) is not _TENSORS
