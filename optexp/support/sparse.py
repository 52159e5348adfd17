"""Sparse tensors as their dense parts: sparse tensors have no storage, strides or `equal` in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
LAYOUTS = {torch.sparse_coo, *COMPRESSED}


def is_sparse(tensor: Tensor) -> bool:
    """Whether a tensor has a sparse layout (`Tensor.is_sparse` is true for COO only)."""
    return tensor.layout in LAYOUTS


def parts(tensor: Tensor, name: str = "") -> dict[str, Tensor]:
    """The tensor's dense parts, in its own memory: values as `name`, indices as `name.indices` and the like."""
    if not is_sparse(tensor):
        return {name: tensor}
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return {name: tensor._values(), f"{name}.indices": tensor._indices()}
    indices = {f"{name}.{kind}": getattr(tensor, kind)() for kind in COMPRESSED[tensor.layout]}
    return {name: tensor.values(), **indices}


def like(tensor: Tensor, made: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor of the same layout and indices, with values `made(values)`."""
    if not is_sparse(tensor):
        return made(tensor)
    values, *indices = parts(tensor).values()
    return assembled(tensor.layout, tuple(tensor.shape), [made(values), *indices], coalesced(tensor))


def assembled(layout: torch.layout, shape: tuple[int, ...], pieces: list[Tensor], coalesced: bool) -> Tensor:
    """The sparse tensor of these `parts`."""
    values, *indices = pieces
    if layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(indices[0], values, shape, is_coalesced=coalesced, check_invariants=False)
    return torch.sparse_compressed_tensor(indices[0], indices[1], values, shape, layout=layout, check_invariants=False)


def fits(place: Tensor, value: Tensor) -> bool:
    """Whether a tensor can be copied into another's memory."""
    ours, theirs = parts(place), parts(value)
    return place.layout is value.layout and [t.shape for t in ours.values()] == [t.shape for t in theirs.values()]


def fill(place: Tensor, value: Tensor) -> Tensor:
    """Copy into the memory of a tensor that `fits`."""
    for ours, theirs in zip(parts(place).values(), parts(value).values(), strict=True):
        ours.copy_(theirs)
    return place


def equal(a: Tensor, b: Tensor, same: Callable[[Tensor, Tensor], bool] = torch.equal) -> bool:
    """Whether two tensors have the same layout, shape and, by `same`, the same parts."""
    if a.layout is not b.layout or a.shape != b.shape:
        return False
    return all(same(x, y) for x, y in zip(parts(a).values(), parts(b).values(), strict=True))


def nbytes(tensor: Tensor) -> int:
    """Bytes of its values and indices."""
    return sum(part.nbytes for part in parts(tensor).values())


def place(tensor: Tensor) -> int:
    """Address of the tensor's values; a unique number for a tensor without memory."""
    values = next(iter(parts(tensor).values()))
    return id(tensor) if values._is_zerotensor() else values.untyped_storage().data_ptr() or id(tensor)


def coalesced(tensor: Tensor) -> bool:
    """Whether its indices are sorted and without duplicates, as a COO tensor says of itself."""
    return tensor.layout is torch.sparse_coo and tensor.is_coalesced()
