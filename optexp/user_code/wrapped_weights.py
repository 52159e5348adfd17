"""Weights that are tensors around others, as quantised ones of torchao: their parts are put back and compared."""

from __future__ import annotations

from itertools import chain

from torch import Tensor, nn, strided
from torch.nn.parameter import is_lazy

from optexp.errors import NoReference
from optexp.support.reading import PLAIN
from optexp.support.wrapped import is_wrapped


def refuse_wrapped(model: nn.Module, trains: bool) -> None:
    """Raises NoReference where a weight does not list its parts, or learns: its gradient is no tensor of them."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        what = f"{name} is a {type(tensor).__name__}, a tensor around others"
        if _hides_its_parts(tensor):
            raise NoReference(
                f"{what} without __tensor_flatten__, so that its values are neither put back nor compared: define that"
                " and __tensor_unflatten__, or hold these as parameters or buffers of a module"
            )
        if trains and tensor.requires_grad and is_wrapped(tensor):
            raise NoReference(
                f"{what}, and learns, where its gradient and the optimizer's state are neither put back nor compared"
                " part by part: freeze it (requires_grad=False), or hold these as parameters of a module"
            )


def _hides_its_parts(tensor: Tensor) -> bool:
    """Whether it is of a class of its own, has values and no memory, and does not list its parts."""
    if type(tensor) in PLAIN or is_lazy(tensor) or tensor.is_meta or is_wrapped(tensor):
        return False
    return bool(tensor.numel()) and tensor.layout is strided and not tensor.data_ptr()
