"""Compiled functions run eagerly where a mode looks at operations: Dynamo traces no frame below a mode, refuses a
function of one whole graph there, and would later remember which frames it has left out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from optexp.support.ctc_lengths import CTC, on_one_device
from optexp.support.wrapped import is_wrapper

COMPILING = ("torch._dynamo", "torch.nn.attention.flex_attention")  # which compiles itself


@contextmanager
def eagerly() -> Iterator[None]:
    """A context without compilation, in which conditions and loops run as Python's; no compiler is imported for it."""
    compiling = any(name in sys.modules for name in COMPILING)
    with torch.compiler.set_stance("force_eager") if compiling else nullcontext(), InPython():
        yield


class EagerMode(TorchDispatchMode):
    """A dispatch mode that sees the operations of compiled functions, of conditions and loops, those on the parts of
    tensors around others, and, in inference mode, those that others consist of."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._around: list[ExitStack] = []

    def __enter__(self) -> Self:
        with ExitStack() as around:
            around.enter_context(eagerly())
            super().__enter__()
            self._around.append(around.pop_all())
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._around.pop().close()

    @contextmanager
    def again(self) -> Iterator[None]:
        """The same mode for what it calls itself while it handles an operation."""
        TorchDispatchMode.__enter__(self)
        try:
            yield
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented  # its own code runs, and the mode sees the operations on its parts
        if isinstance(func, OpOverload) and torch.is_inference_mode_enabled():
            with self.again():
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        return self.operation(func, args, kwargs or {})

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Handle one operation. One of functions, as attention by them, is a HigherOrderOperator."""
        raise NotImplementedError


class InPython(TorchFunctionMode):
    """Conditions and loops run as Python's: torch traces their functions for gradients, where no mode may look. A CTC
    loss takes lengths on its own device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in CTC:
            args, kwargs = on_one_device(args, kwargs or {})
        in_python = IN_PYTHON.get(func.__name__) if isinstance(func, HigherOrderOperator) else None
        if in_python is None:
            return func(*args, **(kwargs or {}))
        with self:
            return in_python(*args, **(kwargs or {}))


Function = Callable[..., Any]


def _cond(chosen: Any, true: Function, false: Function, operands: Sequence[Any]) -> Any:
    return true(*operands) if chosen else false(*operands)


def _while_loop(goes_on: Function, body: Function, carried: Sequence[Any], others: Sequence[Any], **_: Any) -> Any:
    while goes_on(*tree_leaves(carried), *others):
        carried = body(*tree_leaves(carried), *others)
    return tuple(carried)


def _scan(combine: Function, carried: Sequence[Any], xs: Sequence[Any], others: Sequence[Any]) -> Any:
    nested, count, outs = isinstance(combine, partial), len(carried), []  # nested: as the user wrote it
    for row in _rows(xs):
        found = combine(*tree_leaves(carried), *row, *others)
        carried, out = found if nested else (found[:count], found[count:])
        outs.append(out)
    return (carried, _stacked(outs)) if nested else (*carried, *_stacked(outs))


def _map(function: Function, xs: Sequence[Any], others: Sequence[Any]) -> Any:
    return _stacked([function(*row, *others) for row in _rows(xs)])


def _rows(xs: Sequence[Any]) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(x.unbind() for x in xs), strict=True)


def _stacked(outs: Sequence[Any]) -> Any:
    return tree_map(lambda *parts: torch.stack(parts) if isinstance(parts[0], Tensor) else parts[0], *outs)


IN_PYTHON: dict[str, Function] = {"cond": _cond, "while_loop": _while_loop, "scan": _scan, "map_impl": _map}


def name_of(func: Any) -> str:
    """Name of an operation, without its overload."""
    name: str = getattr(func, "overloadpacket", func).__name__
    return name


def is_view(func: Any) -> bool:
    """Whether an operation only looks at its operand in another way."""
    return bool(getattr(func, "is_view", False))
