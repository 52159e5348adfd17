"""Whether CUDA C++ for one architecture can compute a GEMM, by its operands, the card and the compiler."""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

from optexp.kernelkit import extension
from optexp.kernelkit.extension import Source


def takes(source: Source, x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether the source multiplies x by matrices that `gemm.takes`, on the card of x.

    source:      CUDA C++ that declares the capability it needs
    x:           m × k; k must be divisible by 8, so that rows consist of 16-byte packs
    parameters:  vectors of x's dtype that the source reads in 16-byte accesses

    A source that cannot be built causes one warning, and takes no GEMM.
    """
    given = [p for p in parameters if p is not None]
    return (
        x.is_cuda
        and x.shape[1] % 8 == 0
        and all(p.dtype == x.dtype and p.is_contiguous() and p.data_ptr() % 16 == 0 for p in given)
        and _runs(x.device, source)
    )


@cache
def _runs(device: torch.device, source: Source) -> bool:
    if source.needs is None or not source.needs.met_by(device) or extension.why_not(device) is not None:
        return False
    try:
        extension.library(source, device.index)
    except (RuntimeError, OSError) as error:  # such as an old compiler: other configs remain
        warnings.warn(f"{source.name}.cu could not be built: {error}", stacklevel=2)
        return False
    return True
