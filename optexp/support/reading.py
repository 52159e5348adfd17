"""How tensors of a candidate are read: with torch's own functions, bound before any strategy's code is imported.

An attribute of a tensor hides the method of that name: `output.detach = compute` works whenever the output is read. So
no method of a tensor that a candidate handed out is called by name; `read` gives an alias on which all methods are
torch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

COMPILER = "_dynamo_"  # marks that torch.compile leaves on its inputs and outputs, as which sizes vary
PLAIN = (Tensor, nn.Parameter)  # a model may return a parameter as it is
read = Tensor.detach


def read_all(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: read(tensor) for name, tensor in tensors.items()}


def attributes(tensor: Tensor) -> list[str]:
    """Names of a tensor's own attributes, without the compiler's."""
    return sorted(name for name in vars(tensor) if not name.startswith(COMPILER))


def hidden(tensor: Tensor) -> list[str]:
    """Names of torch.Tensor that attributes of this tensor hide."""
    return [name for name in attributes(tensor) if hasattr(Tensor, name)]


def unlike(kind: str, tensors: Iterable[Tensor]) -> list[str]:
    """In words, tensors of a kind that may compute when they are read: of another type, or with attributes."""
    found = set[str]()
    for tensor in tensors:
        if type(tensor) not in PLAIN:
            found.add(f"{kind} ({type(tensor).__name__})")
        elif own := attributes(tensor):
            found.add(f"{kind} (with attribute {', '.join(own)} of its own)")
    return sorted(found)
