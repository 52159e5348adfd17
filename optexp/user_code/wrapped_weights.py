"""Weights that are tensors around others, as quantised ones of torchao: they have no memory of their own."""

from __future__ import annotations

from itertools import chain

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from optexp.errors import NoReference


def refuse_wrapped(model: nn.Module) -> None:
    """Raises NoReference where a parameter or buffer holds its values in other tensors, which no arm puts back."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_traceable_wrapper_subclass(tensor):
            raise NoReference(
                f"{name} is a {type(tensor).__name__}, a tensor around others, whose values are neither put back nor"
                " compared: hold these as parameters or buffers of a module"
            )
