"""A script's batches, however nested, as tensors by name; and back into the script's form."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optexp.errors import ConfigError
from optexp.program import Batch
from optexp.user_code.adapters import kind

NUMBERS = (bool, int, float)
DEPTH = 5  # of data in objects: there is one tensor for each kind of node, or edge, of a graph


@dataclass(frozen=True)
class BatchForm:
    """The form of a batch: lists, dicts and objects with tensors and numbers in them.

    first: a batch, without whose tensors the form is known
    held:  its tensors are the script's own, which take a batch's values
    """

    first: Any
    held: bool = False

    def pack(self, given: Any) -> Batch:
        """Tensors of a batch by dotted name; a tuple of tensors stays one.

        Raises:
            ConfigError: the batch holds no tensor.
        """
        found = dict(_leaves(given, ""))
        if not found:
            raise ConfigError(f"a batch is {kind(given)}: there is no tensor in it")
        return found

    def unpack(self, batch: Batch) -> Any:
        """The batch in the script's form."""
        assert isinstance(batch, Mapping)
        if self.held:
            with torch.no_grad():
                for name, tensor in _leaves(self.first, ""):
                    tensor.copy_(batch[name])
            return self.first
        return _rebuilt(self.first, "", batch)


def is_nested(given: Any) -> bool:
    """Whether a batch is an object with tensors, or has entries that hold some."""
    if isinstance(given, (Tensor, numpy.ndarray)):
        return False
    if not isinstance(given, (Mapping, list, tuple)):
        return _holds(given)
    return any(_holds(inner) for _, inner in _items(given) if not isinstance(inner, (Tensor, numpy.ndarray)))


def _holds(value: Any) -> bool:
    return isinstance(value, (Tensor, numpy.ndarray)) or any(_holds(inner) for _, inner in _items(value))


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name or "0", value.detach()
    elif isinstance(value, numpy.ndarray) and value.dtype != object:
        yield name or "0", torch.from_numpy(value)
    elif isinstance(value, NUMBERS):
        yield name or "0", torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    else:
        for key, inner in _items(value):
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if _is_object(value):
        return [(key, inner) for key, inner in vars(value).items() if not key.startswith("__")]
    return []


def tensors_of_data(value: Any, around: tuple[Any, ...] = ()) -> list[Tensor]:
    """Tensors of an object of a class that holds data and nothing else; of others none.

    Args:
        around: Objects that hold the value.

    Raises:
        TypeError: it holds a module or an optimizer, or itself.
    """
    if isinstance(value, (nn.Module, Optimizer)) or any(value is other for other in around) or len(around) > DEPTH:
        raise TypeError(kind(value))
    if isinstance(value, Tensor):
        return [value]
    return [tensor for _, inner in _items(value) for tensor in tensors_of_data(inner, (*around, value))]


def _is_object(value: Any) -> bool:
    """Whether it is an object of a class that holds data, as a batch of graphs is."""
    return hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value)


def _rebuilt(form: Any, name: str, batch: Mapping[str, Tensor]) -> Any:
    if isinstance(form, Tensor):
        given = batch[name or "0"]
        return given.detach().requires_grad_() if form.requires_grad and form.is_leaf else given
    if isinstance(form, numpy.ndarray) and form.dtype != object:
        return batch[name or "0"].cpu().numpy()
    if isinstance(form, NUMBERS):
        return type(form)(batch[name or "0"].item())
    front = f"{name}." if name else ""
    if isinstance(form, Mapping):
        made = {key: _rebuilt(inner, f"{front}{key}", batch) for key, inner in form.items()}
        return made if type(form) is dict else _like(form, made)
    if isinstance(form, (list, tuple)):
        count = _count(form, front, batch)
        made_list = [_rebuilt(form[min(i, len(form) - 1)], f"{front}{i}", batch) for i in range(count)]
        if isinstance(form, list):
            return made_list
        return type(form)(*made_list) if hasattr(form, "_fields") else tuple(made_list)
    if _is_object(form) and dict(_leaves(form, "")):
        other = copy.copy(form)
        for key, inner in _items(form):
            other.__dict__[key] = _rebuilt(inner, f"{front}{key}", batch)
        return other
    return form


def _like(form: Mapping[str, Any], made: dict[str, Any]) -> Any:
    """A mapping of the form's own type, which may hold more than its entries."""
    other: Any = copy.copy(form)
    for key, value in made.items():
        other[key] = value
    return other


def _count(form: Any, front: str, batch: Mapping[str, Tensor]) -> int:
    """The length of a list: a last batch may have fewer entries than the first, if all hold tensors or numbers."""
    if not isinstance(form, list) or not all(any(True for _ in _leaves(entry, "")) for entry in form):
        return len(form)
    indices = {key.removeprefix(front).partition(".")[0] for key in batch if key.startswith(front)}
    return len(indices) if indices else len(form)
