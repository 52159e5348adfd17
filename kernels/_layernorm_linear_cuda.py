"""LayerNorm and the linear layer after it in CUDA C++: three sources and the calls of their functions.

On Hopper, γ is multiplied to x on its way into the GEMM (`hopper_gemm.cu`), and w is only summed over. For few rows,
blocks normalise the rows that they multiply (`few_rows_gemm.cu`). `layernorm_linear.cu` has the norm alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from optexp.kernelkit import extension
from optexp.kernelkit.capability import WGMMA
from optexp.kernelkit.gemm import in_rows, in_shape
from optexp.kernelkit.kernel import ceil_div
from optexp.kernels.linear_gelu import HOPPER_GEMM

SOURCE = extension.Source("layernorm_linear")
FEW_ROWS_GEMM = extension.Source("few_rows_gemm", needs=WGMMA)


def by_hopper(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    beside: bool | None = None,
    apart: bool | None = None,
    max_polls: int = 1000,
) -> Tensor:
    """The result, m × n, of matrices that `hopper.takes`: x passes through registers, where it is multiplied by γ.

    Mean and deviation are summed beside the GEMM. The bits do not depend on which block sums first.

    x:            m × k
    gamma, beta:  k, or None
    weight:       n × k
    bias:         n, or None
    beside:       whether some blocks sum over w beside the GEMM, instead of a kernel before it; None: where they have
                  time
    apart:        whether the stats warps sum over x, in their own order, for up to 32768 rows; None: where they keep up
    max_polls:    polls of the workspace for another block's sum before a block sums itself; 0: none

    Raises:
        RuntimeError: The source does not compile, or a launch fails.
    """
    (m, k), n = x.shape, weight.shape[0]
    columns = weight.new_empty(ceil_div(n, 256) * 256, 4)  # padded to whole tiles of 256 columns
    y = x.new_empty(m, n)
    parameters = (0 if p is None else p for p in (gamma, beta, weight, bias))
    choices = (-1 if choice is None else choice for choice in (beside, apart))
    sizes = (m, n, k, x.stride(0), weight.stride(0), eps, *choices, max_polls)
    HOPPER_GEMM.run("layernorm_linear", x, *parameters, columns, y, *sizes)
    return y


def few_blocks(rows: int, outputs: int) -> int:
    """The blocks that `by_few` launches for y, rows × outputs."""
    return 2 * ceil_div(rows, 32) * ceil_div(outputs, 64)


def by_few(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """The result, m × n, in one launch.

    x:            m × k that `hopper.takes`, with k up to 2048
    gamma, beta:  k, or None
    weight:       n × k
    bias:         n, or None

    Raises:
        RuntimeError: The source does not compile, or the launch fails.
    """
    (m, k), n = x.shape, weight.shape[0]
    y = x.new_empty(m, n)
    parameters = (0 if p is None else p for p in (gamma, beta, weight, bias))
    sizes = (m, n, k, x.stride(0), weight.stride(0), eps, x.dtype)
    FEW_ROWS_GEMM.run("layernorm_linear", x, *parameters, y, *sizes)
    return y


def norm_then_library(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The norm in CUDA C++, the GEMM by the library.

    x:     … × k
    save:  whether backward follows

    Returns y (… × n); for backward the normalised rows (m × k), and mean and 1/deviation of each row (m), else empty
    tensors.
    """
    rows = in_rows(x).contiguous()
    normal = weight.new_empty(rows.shape)
    mean = x.new_empty(len(rows), dtype=torch.float32)
    scale = torch.empty_like(mean)
    if rows.numel():
        given = [p for p in (gamma, beta) if p is not None]
        dtype = x.dtype if all(p.dtype == x.dtype for p in given) else torch.float32
        parameters = (0 if p is None else p.to(dtype).contiguous() for p in (gamma, beta))
        sizes = (*rows.shape, eps, dtype, weight.dtype, x.dtype)
        SOURCE.run("forward", rows, *parameters, normal, mean, scale, *sizes)
    y = in_shape(F.linear(normal, weight, bias), x)
    return (y, normal, mean, scale) if save else (y, x.new_empty(0), x.new_empty(0), x.new_empty(0))


def cuda_plain(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    gamma: Tensor,
    beta: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-5,
) -> Tensor:
    """The textbook kernel in CUDA C++: a block normalises a row, and each of its threads has outputs of its own."""
    y = x.new_empty(x.shape[0], weight.shape[0])
    operands = (x, gamma.float(), beta.float(), weight, bias, y)
    SOURCE.run("plain", *operands, *x.shape, weight.shape[0], float(eps), x.dtype)
    return y
