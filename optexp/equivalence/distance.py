"""Distance between the results of two runs of one step, which tells another result from rounding."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import torch
from torch import Tensor

from optexp.equivalence.tensor_math import chunks

Results = Mapping[str, Tensor]  # outputs as out/<name>, gradients as grad/<name>


def farthest(one: Results, other: Results) -> float:
    """The largest distance of an output, or of all gradients together: RMS(a−b) in units of the RMS of `other`.

    Of integers, the share of elements that differ. Infinite where names or shapes differ. NaN and Inf are taken as 0.
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
            if b.is_floating_point():
                value, size = (part.to(torch.float64).nan_to_num(0, 0, 0) for part in (a, b))
                apart = value - size
            else:
                apart, size = (a != b).to(torch.float64), torch.ones_like(b, dtype=torch.float64)
            squares += torch.stack([apart.square().sum(), size.square().sum()]).cpu()
    off, size_of_all = squares.sqrt().tolist()
    return off / size_of_all if size_of_all else off and inf
