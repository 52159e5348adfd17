"""Work of an operator by its shapes: bytes read and written, floating-point operations, and both as formulas.

A trace has the shapes and dtypes of an operator's inputs, but neither outputs nor addresses. So outputs are estimated
(the broadcast of the inputs, m×n of a GEMM), a tensor passed twice counts twice, and caches are ignored. Where an
estimate would be a guess, the result is None.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch.utils.flop_counter import conv_flop_count, sdpa_backward_flop_count, sdpa_flop_count

from optexp.trace import Op

_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}  # others: 1
MATRIX = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::_addmm_activation": 1}
_CONVOLUTIONS = {  # positions of the arguments stride, padding and dilation
    "aten::cudnn_convolution": (3, 2, 4),
    "aten::cudnn_convolution_relu": (3, 4, 5),
    "aten::mkldnn_convolution": (4, 3, 5),
    "aten::_conv_depthwise2d": (4, 5, 6),
}
_ATTENTION = {  # position of the argument for a causal mask, and its value without one
    "aten::_efficient_attention_forward": (9, "0"),
    "aten::_efficient_attention_backward": (14, "0"),
    "aten::_flash_attention_forward": (8, "False"),
    "aten::_flash_attention_backward": (11, "False"),
}
# Our GEMMs are known by name: `linear` in a kernel's name, or `_gemm` ending a function's or a CUDA C++ source's name.
OUR_GEMMS = re.compile(r"optexp\.(\w*linear\w*_forward$|\w+_gemm(\.|$))")
_SHAPE_KEEPING = re.compile(
    r"add|sub|rsub|mul|div|neg|reciprocal|abs|sign|pow|square|r?sqrt|exp2?|log|log1p|erf|sin|cos|relu|elu|mish"
    r"|(threshold|gelu|silu|tanh|sigmoid|leaky_relu|hardtanh|softplus)(_backward)?|clamp(_min|_max)?|maximum|minimum"
    r"|where|lerp|addcmul|addcdiv|masked_fill|copy|fill|zero|eq|ne|lt|le|gt|ge|logical_\w+|bitwise_\w+|floor|ceil|round"
    r"|_(log_)?softmax(_backward_data)?|native_(layer_norm|dropout)(_backward)?|bernoulli"
)
_REDUCING = re.compile(r"sum|mean|amax|amin|max|min|std|var|prod|any|all|norm|linalg_vector_norm|mse_loss")

Tensor = tuple[str, tuple[int, ...]]  # dtype and shape


@dataclass(frozen=True)
class Work:
    """Work of one call.

    read, written: tensors, each as often as it is moved
    flops:         floating-point operations
    formula:       formula of `flops` with its numbers; empty where there are none
    """

    read: Sequence[Tensor]
    written: Sequence[Tensor]
    flops: float = 0.0
    formula: str = ""

    @property
    def bytes(self) -> float:
        return float(sum(size(*tensor) for tensor in (*self.read, *self.written)))

    def traffic(self) -> str:
        """Bytes as formula and number: "reads float32[64, 32] + float32[32], writes float32[64, 32]: 4·2048 + …"."""
        every = [*self.read, *self.written]
        sizes: dict[int, list[str]] = {}
        for dtype, shape in every:
            sizes.setdefault(_itemsize(dtype), []).append(str(prod(shape)))
        terms = [f"{size}·({' + '.join(counts)})" for size, counts in sizes.items()]
        moved = [
            f"{verb} {' + '.join(map(named, tensors))}"
            for verb, tensors in (("reads", self.read), ("writes", self.written))
            if tensors
        ]
        return f"{', '.join(moved)}: {' + '.join(terms)} B = {amount(self.bytes)}B"

    def arithmetic(self) -> str:
        """Flops as formula and number; empty where there are none."""
        return f"{self.formula} = {amount(self.flops)}FLOP" if self.flops else ""


def named(tensor: Tensor) -> str:
    """A tensor as people write it: float32[64, 32]."""
    return f"{tensor[0]}{list(tensor[1])}"


def amount(value: float) -> str:
    """A number with the prefix of its unit, decimal: "37.7 M"."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "


def work_of(op: Op) -> tuple[float, float] | None:
    """Bytes read and written, and floating-point operations, of one call; None where the trace does not show them."""
    found = work(op)
    return None if found is None else (found.bytes, found.flops)


def work(op: Op) -> Work | None:
    """Tensors that one call moves, and its arithmetic; None where the trace does not show them."""
    inputs = op.inputs
    if not inputs or any(dtype == "" for dtype, _ in inputs):
        return None
    if op.name in MATRIX:
        return _matrix(op)
    if op.written and (op.name in _CONVOLUTIONS or op.name == "aten::convolution_backward"):
        return _convolution(op)
    if op.name in _ATTENTION:
        return _attention(op)
    if OUR_GEMMS.match(op.name):
        return _our_gemm(op)
    if op.name.startswith(("triton_", "optexp.")) and not re.match(r"triton_(tem|mm)", op.name):
        return Work(inputs, ())  # outputs are among the arguments
    name = op.name.removeprefix("aten::")
    plain = name.rstrip("_")
    if _REDUCING.fullmatch(plain):
        return Work(inputs, ())
    if not _SHAPE_KEEPING.fullmatch(plain):
        return None
    if plain in ("copy", "fill", "zero"):  # the first tensor is only written
        return Work(inputs[1:], inputs[:1])
    if name.endswith("_"):
        return Work(inputs, inputs[:1])
    shape = _broadcast([shape for _, shape in inputs])
    if shape is None:
        return None
    return Work(inputs, ((max((dtype for dtype, _ in inputs), key=_itemsize), shape),))


def _matrix(op: Op) -> Work | None:
    matrices = op.inputs[MATRIX[op.name] :][:2]
    if len(matrices) < 2:
        return None
    (dtype, left), (_, right) = matrices
    shape = (*left[:-1], right[-1])
    formula = f"2·{'·'.join(map(str, (*shape, left[-1])))}"
    return Work(op.inputs, ((dtype, shape),), 2.0 * prod(shape) * left[-1], formula)


def _our_gemm(op: Op) -> Work:
    """The work of one of our GEMMs, x·wᵀ: each element of x is multiplied once for each column of y.

    x may be passed as its transpose; y may have more rows, in whole tiles, for sums in several parts (split-k). Triton
    kernels take x, w and y as their last three matrices; CUDA C++ takes x as the first matrix and y as the last.
    """
    matrices = [shape for _, shape in op.inputs if len(shape) == 2]
    if len(matrices) < 3:
        return Work(op.inputs, ())
    x, y = matrices[-3 if re.fullmatch(r"optexp\.\w+", op.name) else 0], matrices[-1]
    return Work(op.inputs, (), 2.0 * prod(x) * y[1], f"2·{x[0]}·{x[1]}·{y[1]}")


def _convolution(op: Op) -> Work | None:
    dtype, (first, second) = op.inputs[0][0], (shape for _, shape in op.inputs[:2])
    if op.name in _CONVOLUTIONS:
        stride, padding, dilation = (literal_eval(op.written[place]) for place in _CONVOLUTIONS[op.name])
        dimensions = zip(first[2:], second[2:], stride, padding, dilation, strict=True)
        out = [first[0], second[0], *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in dimensions)]
        flops = float(conv_flop_count(list(first), list(second), out))
        return Work(op.inputs, ((dtype, tuple(out)),), flops, _taps(out, second))
    if op.written[7] == "True":  # transposed
        return None
    weight, made = op.inputs[2][1], literal_eval(op.written[10])[:2]
    written = [(dtype, shape) for shape, wanted in zip((second, weight), made, strict=True) if wanted]
    flops = float(sum(made) * conv_flop_count(list(second), list(weight), list(first)))
    return Work(op.inputs, written, flops, f"{sum(made)}·{_taps(first, weight)}")


def _taps(out: Sequence[int], weight: Sequence[int]) -> str:
    """The formula of a convolution: one multiplication for each element of the output and of one filter."""
    return f"2·{'·'.join(map(str, (*out, *weight[1:])))}"


def _attention(op: Op) -> Work | None:
    place, unmasked = _ATTENTION[op.name]
    if op.written[place : place + 1] != (unmasked,) or any(len(shape) != 4 for _, shape in op.inputs[:3]):
        return None
    back, dtype = op.name.endswith("backward"), op.inputs[0][0]
    # (batch, sequence, heads, width) here, and torch counts (batch, heads, sequence, width)
    shapes = [(b, h, s, d) for _, (b, s, h, d) in op.inputs[: 4 if back else 3]]
    (b, h, s, d), (_, _, keys, _), width = shapes[-3], shapes[-2], shapes[-1][3]
    if back:
        written = [(dtype, shape) for shape in shapes[1:]]
        flops = float(sdpa_backward_flop_count(*shapes))
        return Work(op.inputs, written, flops, f"2·{b}·{h}·{s}·{keys}·(3·{d} + 2·{width})")
    flops = float(sdpa_flop_count(*shapes))
    return Work(op.inputs, ((dtype, (b, h, s, width)),), flops, f"2·{b}·{h}·{s}·{keys}·({d} + {width})")


def _itemsize(dtype: str) -> int:
    return _BYTES.get(dtype, 1)


def size(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor that has each element once."""
    return prod(shape) * _itemsize(dtype)


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...] | None:
    rank = max(len(shape) for shape in shapes)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    result = tuple(max(sizes) for sizes in zip(*padded, strict=True))
    fits = all(size in (1, whole) for shape in padded for size, whole in zip(shape, result, strict=True))
    return result if fits else None
