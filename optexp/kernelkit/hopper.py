"""Whether a GEMM can go to what multiplies with what only Hopper has: hopper_gemm.cu, few_rows_gemm.cu."""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

from optexp.kernelkit import extension


def takes(x: Tensor, *parameters: Tensor | None, source: str = "hopper_gemm") -> bool:
    """Whether that source multiplies, on this card, matrices that `gemm.takes`.

    Parameters are read as the dtype of x, 16 bytes at a time.
    """
    given = [p for p in parameters if p is not None]
    return (
        x.is_cuda
        and x.shape[1] % 8 == 0
        and all(p.dtype == x.dtype and p.is_contiguous() and p.data_ptr() % 16 == 0 for p in given)
        and _runs(x.device, source)
    )


@cache
def _runs(device: torch.device, source: str) -> bool:
    if torch.cuda.get_device_capability(device) != (9, 0) or extension.why_not(device) is not None:
        return False
    try:
        extension.library(source, device.index)
    except (RuntimeError, OSError) as error:  # a compiler that is too old, say: there are other configs
        warnings.warn(f"{source}.cu could not be built: {error}", stacklevel=2)
        return False
    return True
