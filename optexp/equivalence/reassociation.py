"""Runs of the baseline that compute the same formulas in another order: what REASSOCIATES allows, as numbers.

Inside, every reduction (sum, mean, norm, softmax, product, convolution, loss) is decomposed and added up in other
chunks, one after the other, and every result of arithmetic may round to a neighbour, as other kernels round it. So one
sees how far honest implementations lie apart, where the baseline by itself may have been right by luck.
(Stochastic rounding as a measure of rounding errors: Parker, Monte Carlo Arithmetic, 1997.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from optexp.equivalence import reordered_products, reordered_scatters, reordered_sums, reordered_ties, tf32_operands
from optexp.equivalence.rounding_steps import BITS, NARROW, RoundingSteps
from optexp.support.eagerly import EagerMode

RUNS = 4
ROUNDED_AT_ONCE = 2**21  # elements of a piece whose results are rounded otherwise
_POINTWISE = """
    add sub rsub mul div true_divide reciprocal sqrt rsqrt exp exp2 expm1 log log2 log10 log1p pow square sin cos
    tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh erf erfc erfinv lgamma digamma sigmoid silu gelu elu
    celu selu mish softplus logit log_sigmoid_forward hardswish hardsigmoid addcmul addcdiv lerp logaddexp xlogy
    sinc hypot tanh_backward sigmoid_backward silu_backward gelu_backward elu_backward mish_backward
    softplus_backward log_sigmoid_backward hardswish_backward hardsigmoid_backward special_erfcx special_log_ndtr
    i0 cumsum cumprod logcumsumexp prod avg_pool1d avg_pool2d avg_pool3d avg_pool2d_backward avg_pool3d_backward
    _adaptive_avg_pool2d _adaptive_avg_pool3d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward
    upsample_bilinear2d upsample_bicubic2d upsample_linear1d upsample_trilinear3d upsample_bilinear2d_backward
    upsample_linear1d_backward upsample_bicubic2d_backward upsample_trilinear3d_backward _to_copy
"""
_ROUNDS = frozenset(_POINTWISE.split())
# What is one algorithm inside: its error is that of inputs which differ by a rounding (backward error).
_WHOLE = (
    *("linalg_", "_linalg", "_fft", "cholesky", "triangular_solve", "lu_", "ormqr", "geqrf", "_cdist", "_pdist"),
    *("grid_sampler", "_cudnn_rnn", "mkldnn_rnn", "_thnn", "miopen_rnn", "lstm", "gru", "_ctc_loss", "_cudnn_ctc"),
    *("_scaled_dot_product", "_efficient_attention", "_flash_attention", "segment_reduce", "_segment_reduce"),
)
# Factorizations of their first argument: exact for a matrix that is off by a few u of its norm, however small an
# element is. LAPACK's in float32: Cholesky and LU for one that is off by 1 to 2 u, QR 2 to 7, eigh and SVD 5 to 20.
_FACTORIZATIONS = """
    linalg_inv_ex _linalg_solve_ex linalg_cholesky_ex _linalg_eigh linalg_eig _linalg_eigvals _linalg_svd linalg_qr
    linalg_lu_factor_ex linalg_lu linalg_lstsq linalg_matrix_exp _linalg_det _linalg_slogdet linalg_ldl_factor_ex
    linalg_pinv geqrf
"""
_FACTORED = frozenset(_FACTORIZATIONS.split())
BACKWARD = 4.0  # u of the RMS of a matrix: Gaussian noise in its elements
_COMPOSITE = """
    native_batch_norm native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward
    _batch_norm_with_update _batch_norm_no_update batch_norm_backward _native_batch_norm_legit native_layer_norm
    native_layer_norm_backward native_group_norm native_group_norm_backward _fused_rms_norm
    _fused_rms_norm_backward _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data mse_loss
    mse_loss_backward nll_loss_forward nll_loss2d_forward smooth_l1_loss huber_loss soft_margin_loss
    binary_cross_entropy binary_cross_entropy_with_logits linalg_vector_norm norm logsumexp _weight_norm_interface
    addmm addmv baddbmm
"""
DECOMPOSED = frozenset(_COMPOSITE.split())
REORDERED = {**reordered_sums.REORDERED, **reordered_products.REORDERED, **reordered_scatters.REORDERED}

_ATTENTION = ("flex_attention", "flex_attention_backward")  # operators of operators


class Reassociated(EagerMode):
    """Inside, reductions take another order and results another rounding, by `seed` (1, 2, ...).

    changed:  how many operators were
    ties:     how many elements of selections took the place of equal ones
    coarsest: the largest eps of a dtype or arithmetic (TF32) that something was computed in
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.order = seed, Random(seed)
        self.steps = RoundingSteps(seed)
        self.changed, self.ties, self.coarsest = 0, 0, 0.0

    def __enter__(self) -> Reassociated:
        self._attention = sdpa_kernel(SDPBackend.MATH)  # whose products and softmax are seen here
        self._attention.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._attention.__exit__(*error)

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if (selection := reordered_ties.SELECTIONS.get(func)) is not None and _is_plain(args[0]):
            self.changed += 1
            return selection(self, func, *args, **kwargs)  # values that are selected are not rounded
        real = [tensor for tensor in _tensors((args, [*kwargs.values()])) if tensor.dtype in BITS]
        whole = not isinstance(func, OpOverload) and func.name() in _ATTENTION
        if (func.namespace != "aten" and not whole) or not real or any(not _is_plain(tensor) for tensor in real):
            return func(*args, **kwargs)
        name = "" if whole else func.overloadpacket.__name__
        if (reordered := REORDERED.get(name)) is not None:
            result = reordered(self, func, *args, **kwargs)
        elif name in DECOMPOSED and func in decomposition_table:
            with self.again():
                result = decomposition_table[func](*args, **kwargs)
        elif name.removesuffix("_") in _ROUNDS:
            result = func(*args, **kwargs)
        elif whole or name.startswith(_WHOLE):
            if real[0].is_cuda and "rnn" in name and torch.backends.cudnn.allow_tf32:
                self.met(tf32_operands.TF32)  # inside, where nothing can be seen
            moved = pytree.tree_map(self._neighbour, (args, kwargs))
            result = self._factored(func, *moved) if name in _FACTORED else func(*moved[0], **moved[1])
        else:
            return func(*args, **kwargs)
        self.changed += 1
        if name != "_to_copy" or any(t.dtype in NARROW for t in _real(result)):  # widening loses nothing
            for tensor in _real(result):
                self.round_(tensor)
        return result

    def round_(self, tensor: Tensor) -> None:
        """Move some elements to the next number above or below, in place."""
        kind, exact = BITS[tensor.dtype]
        self.met(torch.finfo(tensor.dtype).eps)
        if not tensor.numel() or not _is_dense(tensor):
            return
        for part in _pieces(tensor):
            bits = part.view(kind)
            bits.add_((bits & exact).ne_(0).mul_(self.steps.like(bits)), alpha=self.steps.sign())

    def in_tf32(self, *operands: Tensor) -> list[Tensor]:
        """Operands of one product as some kernel may take them where torch allows TF32: which kernel a library chooses
        hangs on shapes and the memory format, and is the same program."""
        of_run = tf32_operands.BY_RUN
        taken = self.order.choice(of_run[(self.seed - 1) % len(of_run)])
        return [taken(operand) for operand in operands]

    def order_of_ties(self, count: int, device: torch.device) -> Tensor:
        """Places of `count` elements. The first run turns them around, so that of each two equal ones one is seen in
        the other's place."""
        if self.seed == 1:
            return torch.arange(count - 1, -1, -1, device=device)
        return torch.randperm(count, generator=self.steps.generator(device), device=device)

    def met(self, eps: float) -> None:
        self.coarsest = max(self.coarsest, eps)

    def shuffled(self, count: int) -> list[int]:
        """The numbers below `count` in this run's next order."""
        order = list(range(count))
        self.order.shuffle(order)
        return order

    def _neighbour(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in BITS or not value.numel():
            return value
        moved = value.clone()
        self.round_(moved)
        return moved

    def _factored(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A factorization of matrices that are off by rounding of their norm, where it exists for these."""
        result = func(self._off_by_norm(args[0]), *args[1:], **kwargs) if args[0].dtype in BITS else None
        tells = func._schema.returns[-1].name == "info"  # of one that is not positive definite, or singular
        failed = result is None or (tells and bool(result[-1].any()))
        return func(*args, **kwargs) if failed else result

    def _off_by_norm(self, matrix: Tensor) -> Tensor:
        """Zeros stay: a triangular or a diagonal matrix is one for any algorithm."""
        generator = self.steps.generator(matrix.device)
        noise = torch.randn(matrix.shape, generator=generator, device=matrix.device, dtype=matrix.dtype)
        size = matrix.square().mean((-2, -1), keepdim=True).sqrt() * (BACKWARD * torch.finfo(matrix.dtype).eps / 2)
        return torch.where(matrix == 0, matrix, matrix + noise * size)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta


def _is_dense(tensor: Tensor) -> bool:
    """Whether no element is there twice, as after `expand`."""
    return all(stride or size == 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _real(result: Any) -> list[Tensor]:
    return [tensor for tensor in _tensors((result,)) if tensor.dtype in BITS and _is_plain(tensor)]


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """Of an operator's arguments or results, which are tensors, lists of them, and other things."""
    found = list[Tensor]()
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Views of a tensor, so that what is drawn beside a large one is small."""
    count = -(-tensor.numel() // ROUNDED_AT_ONCE)
    if count == 1 or not tensor.dim():
        yield tensor
    elif tensor.is_contiguous():
        yield from tensor.view(-1).tensor_split(count)
    else:
        yield from tensor.tensor_split(min(count, len(tensor)))
