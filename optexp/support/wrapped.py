"""Tensors around others, as quantised weights of torchao: they have no memory of their own, and their parts have."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from optexp.support import sparse


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor lists the tensors that it is made of (`__tensor_flatten__`)."""
    return is_traceable_wrapper_subclass(tensor)


def is_wrapper(kind: type) -> bool:
    """Whether a class is one of such tensors, and none of torch's own."""
    own = kind.__module__.partition(".")[0] == "torch"
    return issubclass(kind, Tensor) and hasattr(kind, "__tensor_flatten__") and not own


def parts(tensor: Tensor, name: str = "") -> dict[str, Tensor]:
    """The dense parts of any tensor, in its own memory: an inner tensor is `name.attribute`."""
    if not is_wrapped(tensor):
        return sparse.parts(tensor, name)
    found = dict[str, Tensor]()
    for key, inner in _inner(tensor):
        found |= parts(inner.detach(), f"{name}.{key}")
    return found


def nbytes(tensor: Tensor) -> int:
    """Bytes of its parts."""
    return sum(part.nbytes for part in parts(tensor).values())


def rebuilt(tensor: Tensor, made: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor around `made(inner)` for each of its inner ones."""
    inner = {key: made(part) for key, part in _inner(tensor)}
    _, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    whole = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())  # type: ignore[attr-defined]
    assert isinstance(whole, Tensor)
    return whole


def _inner(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        yield name, getattr(tensor, name)
