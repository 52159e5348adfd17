"""Results of a step as tensors by name, whatever a model returns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from numbers import Number
from types import NoneType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from optexp.program.batches import Outputs
from optexp.python_state.records import attributes_of
from optexp.support.nested import rows

UNREADABLE = "(unread "
SEQUENCES, SETS = (list, tuple, deque), (set, frozenset)
LAZY = f"{UNREADABLE}iterator "  # whose entries exist once they are asked for


def flatten(value: Any, name: str = "output") -> Outputs:
    """Tensors of a nested output (tuples, mappings, dataclasses, other objects with tensors) by dotted name.

    A nested tensor is split into its dense parts.
    """
    if isinstance(value, Tensor) and not value.is_nested:  # a fast path, as this runs in timed steps
        return {name: value}
    return _apart((key, leaf) for key, leaf in _leaves(value, name) if isinstance(leaf, Tensor))


def loss_in(value: Any) -> Tensor | None:
    """The loss that a model returns under this name, as those of Hugging Face do."""
    found = value.get("loss") if isinstance(value, Mapping) else getattr(value, "loss", None)
    return found if isinstance(found, Tensor) else None


def others(value: Any, name: str = "output") -> Outputs:
    """Entries of a nested output that are no tensors (numbers, lists of numbers, text, bytes, sets), as tensors on the
    CPU.

    An entry of another type is an empty tensor, with its type in the name.
    """
    return _apart(_read(key, leaf) for key, leaf in _leaves(value, name) if not isinstance(leaf, (Tensor, NoneType)))


def _apart(leaves: Iterable[tuple[str, Tensor]]) -> Outputs:
    """Leaves by name; of keys that read alike, as 1 and "1", each later one gets a prime."""
    found: Outputs = {}
    for name, leaf in leaves:
        while name in found:
            name += "′"
        found[name] = leaf
    return found


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Leaves of a nested output by dotted name. A list of numbers is one leaf."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, Tensor) and value.is_nested:
        whole = rows(value)
        items = enumerate(value.unbind()) if whole is None else zip(("values", "offsets"), whole, strict=True)
    elif isinstance(value, SETS) and value and all(isinstance(item, (str, bytes)) for item in value):
        items = enumerate(sorted(value, key=repr))
    elif isinstance(value, SEQUENCES) and not (value and all(isinstance(item, Number) for item in value)):
        items = zip(getattr(value, "_fields", range(len(value))), value, strict=True)
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        items = ((key, getattr(value, key)) for key in value.__dataclass_fields__)
    elif held := _held(value):
        items = held.items()
    else:
        yield name, value
        return
    for key, item in items:
        yield from _leaves(item, f"{name}.{key}")


def _held(value: Any, depth: int = 4) -> dict[str, Any]:
    """Attributes of an object that hold tensors, as in a key-value cache, and beside those its numbers and texts that
    are public; empty for a module, which is no result."""
    if depth == 0 or isinstance(value, (Tensor, type, nn.Module)):
        return {}
    own = attributes_of(value)
    held = {name: item for name, item in own.items() if _holds(item, depth - 1)}
    plain = {name: item for name, item in own.items() if isinstance(item, (Number, str)) and name[0] != "_"}
    return held | plain if held else {}


def _holds(item: Any, depth: int) -> bool:
    if isinstance(item, Tensor):
        return True
    if isinstance(item, Mapping):
        return any(_holds(part, depth) for part in item.values())
    if isinstance(item, SEQUENCES):
        return any(_holds(each, depth) for each in item)
    return bool(_held(item, depth))


def _read(name: str, leaf: Any) -> tuple[str, Tensor]:
    if isinstance(leaf, str):
        return name, torch.tensor(list(leaf.encode()), dtype=torch.uint8)
    if isinstance(leaf, (bytes, bytearray)):
        return name, torch.tensor(list(leaf), dtype=torch.uint8)
    if isinstance(leaf, SETS) and all(isinstance(item, (int, float)) for item in leaf):
        leaf = sorted(leaf)
    if isinstance(leaf, (Number, *SEQUENCES, numpy.ndarray, numpy.generic)):
        with suppress(TypeError, OverflowError):  # larger than torch's integers, or an array of objects
            return name, torch.as_tensor(numpy.asarray(leaf))  # 64 bits, as Python's own
    kind = LAZY if isinstance(leaf, Iterator) else UNREADABLE
    return f"{name} {kind}{type(leaf).__name__})", torch.empty(0, dtype=torch.uint8)


def unreadable(name: str) -> bool:
    """Whether `name` is of an entry whose value `others` could not read."""
    return UNREADABLE in name


def lazy(name: str) -> bool:
    """Whether `name` is of an entry that may compute its values after the step."""
    return LAZY in name
