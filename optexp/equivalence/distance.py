"""How far two runs of one step are from each other: whether they computed the same thing at all, not how exactly."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import torch
from torch import Tensor

from optexp.equivalence.tensor_math import chunks

Results = Mapping[str, Tensor]  # outputs as out/<name>, gradients as grad/<name>


def farthest(one: Results, other: Results) -> float:
    """The largest distance of an output, or of all gradients together: RMS(a−b) in units of the RMS of `other`.

    Of integers, the share of elements that differ. Infinite where names or shapes differ. NaN and Inf count as 0.
    """
    if {name: t.shape for name, t in one.items()} != {name: t.shape for name, t in other.items()}:
        return inf
    slopes = [name for name in other if name.startswith("grad/")]
    groups = [[name] for name in other if name not in slopes] + [slopes]
    return max(_distance(one, other, names) for names in groups)


def _distance(one: Results, other: Results, names: list[str]) -> float:
    squares = torch.zeros(2, dtype=torch.float64)
    for name in names:
        for _, (a, b) in chunks(one[name], other[name]):
            real = b.is_floating_point() or b.is_complex()
            apart, size = (a - b, b) if real else (a != b, torch.ones_like(b))
            squares += torch.stack([_square(apart), _square(size)]).cpu()
    off, size_of_all = squares.sqrt().tolist()
    return off / size_of_all if size_of_all else off and inf


def _square(tensor: Tensor) -> Tensor:
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).nan_to_num(0, 0, 0)
    return wide.abs().square().sum()
