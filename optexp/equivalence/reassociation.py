"""Runs of the baseline that compute the same formulas in another order: what REASSOCIATES allows, as numbers.

Inside, every reduction (sum, mean, norm, softmax, product, convolution, loss) is decomposed and added up in other
chunks, one after the other, and every result of arithmetic may round to a neighbour, as other kernels round it. So one
sees how far honest implementations lie apart, where the baseline by itself may have been right by luck.
(Stochastic rounding as a measure of rounding errors: Parker, Monte Carlo Arithmetic, 1997.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from random import Random
from typing import Any

import numpy
import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from optexp.equivalence.rounding_steps import RoundingSteps
from optexp.support.eagerly import EagerMode

RUNS = 4
# Running sums side by side, by run, where rows are added up on a CPU. One alone is the least exact, and what compiled
# loops have: most runs have it, since the error of a few sums differs from run to run and from batch to batch.
LANES = (1, 1, 1, 16)
LANES_OF_ALL = (16, 8, 16, 32)  # where everything is one sum, which nobody adds up in one lane
CHUNKS = 32  # of a sum, one after the other; on a GPU each takes a launch
PRODUCT_CHUNKS, PRODUCT_CHUNK = 16, 16  # at most so many of a product's terms, of at least so many each
WHOLE = 2**26  # elements: larger tensors are copied by chunks only
ROUNDED_AT_ONCE = 2**21  # elements of a piece whose results are rounded otherwise
TF32 = 2.0**-10  # its eps
_NARROW = {torch.bfloat16, torch.float16}
# Of results whose last bits are zero nothing was lost: counts, masks, indices stay what they are.
_BITS = {
    torch.float64: (torch.int64, 2**20 - 1),
    torch.float32: (torch.int32, 2**8 - 1),
    torch.bfloat16: (torch.int16, 2**3 - 1),
    torch.float16: (torch.int16, 2**4 - 1),
}
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


_ATTENTION = ("flex_attention", "flex_attention_backward")  # operators of operators


class Reassociated(EagerMode):
    """Inside, reductions take another order and results another rounding, by `seed` (1, 2, ...).

    changed:  how many operators were
    coarsest: the largest eps of a dtype or arithmetic (TF32) that something was computed in
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.order = seed, Random(seed)
        self.steps = RoundingSteps(seed)
        self.changed, self.coarsest = 0, 0.0

    def __enter__(self) -> Reassociated:
        self._attention = sdpa_kernel(SDPBackend.MATH)  # whose products and softmax are seen here
        self._attention.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._attention.__exit__(*error)

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        real = [tensor for tensor in _tensors((args, [*kwargs.values()])) if tensor.dtype in _BITS]
        whole = not isinstance(func, OpOverload) and func.name() in _ATTENTION
        if (func.namespace != "aten" and not whole) or not real or any(not _is_plain(tensor) for tensor in real):
            return func(*args, **kwargs)
        name = "" if whole else func.overloadpacket.__name__
        if (reordered := _REORDERED.get(name)) is not None:
            result = reordered(self, func, *args, **kwargs)
        elif name in DECOMPOSED and func in decomposition_table:
            with self.again():
                result = decomposition_table[func](*args, **kwargs)
        elif name.removesuffix("_") in _ROUNDS:
            result = func(*args, **kwargs)
        elif whole or name.startswith(_WHOLE):
            if real[0].is_cuda and "rnn" in name and torch.backends.cudnn.allow_tf32:
                self.met(TF32)  # inside, where nothing can be seen
            moved = pytree.tree_map(self._neighbour, (args, kwargs))
            result = func(*moved[0], **moved[1])
        else:
            return func(*args, **kwargs)
        self.changed += 1
        if name != "_to_copy" or any(t.dtype in _NARROW for t in _real(result)):  # widening loses nothing
            for tensor in _real(result):
                self.round_(tensor)
        return result

    def round_(self, tensor: Tensor) -> None:
        """Move some elements to the next number above or below, in place."""
        kind, exact = _BITS[tensor.dtype]
        self.met(torch.finfo(tensor.dtype).eps)
        if not tensor.numel() or not _is_dense(tensor):
            return
        for part in _pieces(tensor):
            bits = part.view(kind)
            bits.add_((bits & exact).ne_(0).mul_(self.steps.like(bits)), alpha=self.steps.sign())

    def in_tf32(self, *operands: Tensor) -> list[Tensor]:
        """Operands of one product as some kernel may take them where torch allows TF32: which kernel a library chooses
        hangs on shapes and the memory format, and is the same program."""
        taken = self.order.choice(TF32_BY_RUN[(self.seed - 1) % RUNS])
        return [taken(operand) for operand in operands]

    def met(self, eps: float) -> None:
        self.coarsest = max(self.coarsest, eps)

    def shuffled(self, count: int) -> list[int]:
        """The numbers below `count` in this run's next order."""
        order = list(range(count))
        self.order.shuffle(order)
        return order

    def _neighbour(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in _BITS or not value.numel():
            return value
        moved = value.clone()
        self.round_(moved)
        return moved


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta


def _is_dense(tensor: Tensor) -> bool:
    """Whether no element is there twice, as after `expand`."""
    return all(stride or size == 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _real(result: Any) -> list[Tensor]:
    return [tensor for tensor in _tensors((result,)) if tensor.dtype in _BITS and _is_plain(tensor)]


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


# --- sums --------------------------------------------------------------------------------------------------------


def _sum(mode: Reassociated, func: Any, x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    dtype = kwargs.get("dtype") or x.dtype
    if dtype not in _BITS or x.dtype not in _BITS or not x.numel():
        return func(x, *(() if dim is None else (dim, keepdim)), **kwargs)  # type: ignore[no-any-return]
    return added(mode, x, _axes(x, dim), keepdim).to(dtype)


def _mean(mode: Reassociated, func: Any, x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    dtype = kwargs.get("dtype") or x.dtype
    if dtype not in _BITS or x.dtype not in _BITS or not x.numel():
        return func(x, *(() if dim is None else (dim, keepdim)), **kwargs)  # type: ignore[no-any-return]
    axes = _axes(x, dim)
    return (added(mode, x, axes, keepdim) / prod(x.shape[axis] for axis in axes)).to(dtype)


def _var_mean(mode: Reassociated, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Mean first, then the squares of what is left, as every implementation that is exact enough for float32."""
    given = dict(zip((argument.name for argument in func._schema.arguments[1:]), args, strict=False)) | kwargs
    dim, keepdim = given.get("dim"), given.get("keepdim", False)
    correction = given.get("correction", int(given.get("unbiased", True)))
    if not x.numel() or x.dtype not in _BITS:
        return func(x, *args, **kwargs)
    axes = _axes(x, dim)
    count = prod(x.shape[axis] for axis in axes)
    mean = added(mode, x, axes, keepdim=True) / count
    mode.round_(mean)
    squares = (x - mean).square_()
    mode.round_(squares)
    freedom = max(count - (1 if correction is None else correction), 0)
    var = added(mode, squares, axes, keepdim=True) / freedom if freedom else squares.sum(axes, keepdim=True) / 0
    mean, var = (found if keepdim else found.squeeze(axes) for found in (mean.to(x.dtype), var.to(x.dtype)))
    name = func.overloadpacket.__name__
    found = var.sqrt() if name.startswith("std") else var
    return (found, mean) if name.endswith("_mean") else found


def _axes(x: Tensor, dim: Any) -> list[int]:
    if dim is None or dim == []:
        return list(range(x.dim()))
    return sorted({axis % max(x.dim(), 1) for axis in ([dim] if isinstance(dim, int) else dim)})


def added(mode: Reassociated, x: Tensor, axes: Sequence[int], keepdim: bool = False) -> Tensor:
    """The sum over some dimensions; of narrow numbers in float32, as everybody adds them up."""
    if not axes or not x.dim():
        return x.float() if x.dtype in _NARROW else x.clone()
    wide = torch.float32 if x.dtype in _NARROW else x.dtype
    if x.device.type == "cpu" and x.numel() <= WHOLE:
        total = _in_a_row(mode, x.to(wide), axes)
    else:
        longest = max(axes, key=lambda axis: x.shape[axis])
        pieces = x.tensor_split(min(CHUNKS, x.shape[longest]), longest)
        total = x.new_zeros((), dtype=wide)
        for at in mode.shuffled(len(pieces)):
            total = total + pieces[at].sum(tuple(axes), dtype=wide)
    return total.reshape([1 if axis in axes else size for axis, size in enumerate(x.shape)]) if keepdim else total


def _in_a_row(mode: Reassociated, x: Tensor, axes: Sequence[int]) -> Tensor:
    """One after the other, as compiled loops do: numpy adds up rows in no tree. What lies side by side in memory is
    added up in several lanes."""
    others = [axis for axis in range(x.dim()) if axis not in axes]
    rows = x.detach().permute(*axes, *others)
    shape = [x.shape[axis] for axis in others]
    count, width = prod(x.shape[axis] for axis in axes), prod(shape)
    values = rows.reshape(count, width).numpy()
    if mode.seed % 2 == 0:
        values = values[::-1]
    inner = x.dim() - 1 in axes
    lanes = (LANES_OF_ALL if width == 1 else LANES)[(mode.seed - 1) % RUNS] if inner or width == 1 else 1
    lanes = min(lanes, count)
    if lanes > 1 or width == 1:
        whole = count - count % lanes
        lines = numpy.add.reduce(values[:whole].reshape(whole // lanes, lanes * width), axis=0)
        values = numpy.concatenate([lines.reshape(lanes, width), values[whole:]])
        total = values[0].copy()
        for line in values[1:]:
            total += line
    else:
        total = numpy.add.reduce(values, axis=0)
    return torch.from_numpy(numpy.ascontiguousarray(total)).reshape(shape)


def _cumsum(mode: Reassociated, func: Any, x: Tensor, dim: int, **kwargs: Any) -> Tensor:
    """In blocks, each of which begins with the sum of those before it."""
    dtype = kwargs.get("dtype") or x.dtype
    if not x.dim() or x.shape[dim] < 2 or dtype not in _BITS:
        return func(x, dim, **kwargs)  # type: ignore[no-any-return]
    wide = torch.float32 if dtype in _NARROW else dtype
    blocks, before = list[Tensor](), None
    for piece in x.to(wide).tensor_split(min(CHUNKS // mode.seed + 1, x.shape[dim]), dim):
        sums = piece.cumsum(dim) if before is None else piece.cumsum(dim) + before
        blocks.append(sums)
        before = sums.narrow(dim, sums.shape[dim] - 1, 1)
    return torch.cat(blocks, dim).to(dtype)


# --- products ----------------------------------------------------------------------------------------------------


def _mm(mode: Reassociated, func: Any, a: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
    return _in_chunks(mode, func, a, b, a.dim() - 1, max(b.dim() - 2, 0), **kwargs)


def _in_chunks(mode: Reassociated, func: Any, a: Tensor, b: Tensor, of_a: int, of_b: int, **kwargs: Any) -> Tensor:
    """A product, its terms in groups one after the other; of narrow numbers in float32, as tensor cores add them up."""
    if tf32 := _tf32_products(a):
        a, b = mode.in_tf32(a, b)
    mode.met(TF32 * tf32)
    terms, dtype = a.shape[of_a], a.dtype
    count = min(PRODUCT_CHUNKS, terms // PRODUCT_CHUNK)
    if count < 2 or kwargs:
        return func(a, b, **kwargs)  # type: ignore[no-any-return]
    wide = torch.float32 if dtype in _NARROW else dtype
    if a.numel() + b.numel() <= WHOLE:
        a, b = a.to(wide), b.to(wide)
    pairs = list(zip(a.tensor_split(count, of_a), b.tensor_split(count, of_b), strict=True))
    return sum_of((func(pairs[at][0].to(wide), pairs[at][1].to(wide)) for at in mode.shuffled(count)), dtype)


def _tf32_products(a: Tensor) -> bool:
    backends: Any = torch.backends
    return a.is_cuda and a.dtype is torch.float32 and bool(backends.cuda.matmul.fp32_precision == "tf32")


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def _nearest(tensor: Tensor) -> Tensor:
    """Rounded to TF32's 10 bits, as cuDNN and cuBLAS do."""
    return ((tensor.view(torch.int32) + 2**12) & -(2**13)).view(torch.float32)


def _cut(tensor: Tensor) -> Tensor:
    """The first 10 bits, which tensor cores read of a float32 that nobody rounds, as in Triton: smaller by 3e-4 in the
    mean, in all elements alike."""
    return (tensor.view(torch.int32) & -(2**13)).view(torch.float32)


TF32_BY_RUN = ((_nearest,), (_cut,), (_whole, _nearest, _cut), (_whole, _nearest, _cut))


def _convolution(mode: Reassociated, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """Input channels in groups, one after the other."""
    if tf32 := _tf32_convolutions(x):
        x, weight = mode.in_tf32(x, weight)
    mode.met(TF32 * tf32)
    transposed, groups = rest[3], rest[5]
    channels, dtype = x.shape[1] if x.dim() == weight.dim() else 0, x.dtype
    count = min(PRODUCT_CHUNKS, channels) if groups == 1 else 1
    if count < 2:
        return func(x, weight, bias, *rest)  # type: ignore[no-any-return]
    wide = torch.float32 if dtype in _NARROW else dtype
    pairs = list(zip(x.tensor_split(count, 1), weight.tensor_split(count, 0 if transposed else 1), strict=True))
    parts = (func(pairs[at][0].to(wide), pairs[at][1].to(wide), None, *rest) for at in mode.shuffled(count))
    total = sum_of(parts, wide)
    if bias is not None:
        total.add_(bias.to(wide).reshape(-1, *[1] * (total.dim() - 2)))
    return total.to(dtype)


def _convolution_backward(
    mode: Reassociated, func: Any, slope: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any
) -> tuple[Tensor | None, ...]:
    """Of inputs the output channels in groups, of weights the batch, of a bias all."""
    if tf32 := _tf32_convolutions(x):
        slope, x, weight = mode.in_tf32(slope, x, weight)
    mode.met(TF32 * tf32)
    *how, (to_x, to_weight, to_bias) = rest
    transposed, groups = how[3], how[5]
    wide = torch.float32 if x.dtype in _NARROW else x.dtype

    def part(slope: Tensor, x: Tensor, weight: Tensor, at: int) -> Tensor:
        mask = [index == at for index in range(3)]
        found: Tensor = func(slope.to(wide), x.to(wide), weight.to(wide), None, *how, mask)[at]
        return found

    found: list[Tensor | None] = [None, None, None]
    if to_x:
        count = min(PRODUCT_CHUNKS, slope.shape[1]) if groups == 1 else 1
        of = list(zip(slope.tensor_split(count, 1), weight.tensor_split(count, 1 if transposed else 0), strict=True))
        found[0] = sum_of((part(of[at][0], x, of[at][1], 0) for at in mode.shuffled(count)), x.dtype)
    if to_weight:
        count = min(PRODUCT_CHUNKS, len(x))
        rows = list(zip(slope.tensor_split(count), x.tensor_split(count), strict=True))
        found[1] = sum_of((part(*rows[at], weight, 1) for at in mode.shuffled(count)), weight.dtype)
    if to_bias:
        found[2] = added(mode, slope, [axis for axis in range(slope.dim()) if axis != 1]).to(slope.dtype)
    return tuple(found)


def sum_of(parts: Iterator[Tensor], dtype: torch.dtype) -> Tensor:
    total = next(parts)
    for part in parts:
        total.add_(part)
    return total.to(dtype)


def _tf32_convolutions(x: Tensor) -> bool:
    backends: Any = torch.backends
    return x.is_cuda and x.dtype is torch.float32 and bool(backends.cudnn.conv.fp32_precision == "tf32")


# --- sums at places ----------------------------------------------------------------------------------------------


def _index_add(mode: Reassociated, func: Any, x: Tensor, dim: int, index: Tensor, source: Tensor, **kw: Any) -> Tensor:
    order = _permutation(mode, index.numel(), index.device)
    if not source.dim():
        return func(x, dim, index, source, **kw)  # type: ignore[no-any-return]
    return func(x, dim, index.reshape(-1)[order], source.index_select(dim, order), **kw)  # type: ignore[no-any-return]


def _scatter_add(mode: Reassociated, func: Any, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    if not index.dim():
        return func(x, dim, index, source)  # type: ignore[no-any-return]
    order = _permutation(mode, index.shape[dim], index.device)
    source = source.narrow(dim, 0, index.shape[dim])
    return func(x, dim, index.index_select(dim, order), source.index_select(dim, order))  # type: ignore[no-any-return]


def _index_put(mode: Reassociated, func: Any, x: Tensor, indices: Any, values: Tensor, *rest: Any) -> Any:
    rows = [i for i in indices if i is not None]
    in_rows = all(i.dim() == 1 and i.dtype is torch.int64 and len(i) == len(rows[0]) for i in rows)
    if not (rest and rest[0] and in_rows and indices[0] is not None and values.shape[:1] == rows[0].shape):
        return func(x, indices, values, *rest)
    order = _permutation(mode, len(values), values.device)
    return func(x, [i if i is None else i[order] for i in indices], values[order], *rest)


def _embedding_backward(mode: Reassociated, func: Any, slope: Tensor, indices: Tensor, *rest: Any) -> Tensor:
    order = _permutation(mode, indices.numel(), indices.device)
    rows = slope.reshape(-1, slope.shape[-1])[order]
    return func(rows, indices.reshape(-1)[order], *rest)  # type: ignore[no-any-return]


def _permutation(mode: Reassociated, count: int, device: torch.device) -> Tensor:
    return torch.randperm(count, generator=mode.steps.generator(device), device=device)


_REORDERED: dict[str, Callable[..., Any]] = {
    "sum": _sum,
    "mean": _mean,
    "var": _var_mean,
    "var_mean": _var_mean,
    "std": _var_mean,
    "std_mean": _var_mean,
    "cumsum": _cumsum,
    "mm": _mm,
    "bmm": _mm,
    "mv": _mm,
    "dot": _mm,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "index_add": _index_add,
    "index_add_": _index_add,
    "scatter_add": _scatter_add,
    "scatter_add_": _scatter_add,
    "index_put": _index_put,
    "index_put_": _index_put,
    "_index_put_impl_": _index_put,
    "embedding_dense_backward": _embedding_backward,
}
