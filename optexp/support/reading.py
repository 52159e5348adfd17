"""Safe reading of a candidate's tensors, with torch's own functions, bound before any strategy's code is imported.

A tensor's attribute hides the method of the same name: with `output.detach = compute`, a call of `output.detach()`
computes. So no method of a candidate's tensor is called by name; `read` gives an alias whose methods are all torch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

COMPILER = "_dynamo_"  # prefix of attributes that torch.compile sets on tensors, such as varying sizes
PLAIN = (Tensor, nn.Parameter)  # a model may return a parameter itself
read = Tensor.detach


def read_all(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: read(tensor) for name, tensor in tensors.items()}


def attributes(tensor: Tensor) -> list[str]:
    """Names of a tensor's own attributes, without the compiler's."""
    return sorted(name for name in vars(tensor) if not name.startswith(COMPILER))


def hidden(tensor: Tensor) -> list[str]:
    """Names of torch.Tensor that attributes of this tensor hide, but for the parts of a tensor around others."""
    listed: Iterable[str] = tensor.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(tensor) else ()
    inner = {name for name in listed if type(vars(tensor).get(name)) in PLAIN}
    return [name for name in attributes(tensor) if hasattr(Tensor, name) and name not in inner]


def unlike(kind: str, tensors: Iterable[Tensor]) -> list[str]:
    """Phrases on tensors that may compute when they are read: of a subclass, or with attributes of their own."""
    phrases = set[str]()
    for tensor in tensors:
        if type(tensor) not in PLAIN:
            phrases.add(f"{kind} ({type(tensor).__name__})")
        elif own := attributes(tensor):
            phrases.add(f"{kind} (with attribute {', '.join(own)} of its own)")
    return sorted(phrases)
