"""A step recorded operator by operator under fake tensors, which compute nothing and take no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count

from optexp.profiling.necessary_work import Gemm, Kind, Operation, Read, Value, combined_rank, layout

LINEAR = """
add sub rsub neg clone _to_copy copy sum mean cumsum div_scalar mul_scalar lerp addcmul addcdiv native_dropout
native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm
native_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm
cudnn_batch_norm_backward _batch_norm_with_update _batch_norm_no_update batch_norm_backward _fused_rms_norm
_fused_rms_norm_backward avg_pool1d avg_pool2d avg_pool3d avg_pool2d_backward adaptive_avg_pool1d
_adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
"""
PRODUCTS = """
mul div pow square mse_loss mse_loss_backward gelu_backward silu_backward threshold_backward tanh_backward
sigmoid_backward elu_backward leaky_relu_backward softplus_backward hardtanh_backward hardswish_backward mish_backward
_softmax_backward_data _log_softmax_backward_data native_dropout_backward
"""
NONLINEAR = """
gelu relu silu tanh sigmoid exp exp2 log log1p log2 softplus elu leaky_relu hardtanh hardswish hardsigmoid mish
sin cos erf sqrt rsqrt reciprocal abs _softmax _log_softmax log_sigmoid_forward max_pool2d_with_indices amax amin
"""
KINDS: dict[str, Kind] = {
    **dict.fromkeys(LINEAR.split(), Kind.LINEAR),
    **dict.fromkeys(PRODUCTS.split(), Kind.PRODUCT),
    **dict.fromkeys(NONLINEAR.split(), Kind.NONLINEAR),
}
ADDITIVE = {"add", "sub", "rsub"}
OVERWRITE = {"copy", "fill", "zero"}
MATRIX = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "linear": ("input", "weight")}
MATRIX |= {"addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2"), "_addmm_activation": ("mat1", "mat2")}
CONVOLUTIONS = {"convolution", "convolution_backward"}
RANDOM = {"bernoulli", "rand", "randn", "rand_like", "randn_like", "uniform", "normal"}
NO_OPERATOR = {"profiler", "prim"}  # namespaces


class Recorder(TorchDispatchMode):
    """Records the operators of a step. Enter it inside of a `FakeTensorMode`.

    rounded: float32 products may be rounded to TensorFloat-32
    """

    def __init__(self, rounded: bool) -> None:
        super().__init__()
        self.rounded = rounded
        self.operations: list[Operation] = []
        self.current: dict[int, Value] = {}  # by storage
        self.labels: dict[int, Any] = {}  # true values of integer inputs, by storage
        self.counters: set[int] = set()  # storages of step counts, which an optimizer reads on the host
        self.alive: list[Any] = []  # storages: their addresses are keys, and must not be reused

    def leaf(self, fake: Tensor, kind: str, rank: float = inf, varies: bool = True) -> Value:
        """Register a tensor that exists before the step."""
        key = self._key(fake)
        if key not in self.current:
            self.current[key] = Value(elements(fake), fake.element_size(), rank, varies, kind)
        return self.current[key]

    def label(self, fake: Tensor, true: Tensor) -> None:
        """Register the true values of an integer input."""
        self.labels[self._key(fake)] = true.detach().cpu().numpy()

    def count(self, fake: Tensor) -> None:
        """Register a step count, which the host may read."""
        self.counters.add(self._key(fake))

    def value(self, tensor: Tensor) -> Value:
        """The present content of a tensor's storage; an unknown storage holds a constant of unknown structure."""
        key = self._key(tensor)
        if key not in self.current:
            self.current[key] = Value(elements(tensor), tensor.element_size(), 0.0, False)
        return self.current[key]

    def read(self, tensor: Tensor) -> Read:
        value = self.value(tensor)
        size = value.numel * value.itemsize // tensor.element_size()  # a view of another dtype counts its own elements
        where, expanded = layout(tensor.shape, tensor.stride(), int(tensor.storage_offset()), size)
        return Read(value, tensor.numel(), where if where[2] and size == value.numel else None, expanded)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = arguments(func, args, kwargs or {})
        if func is torch.ops.aten._local_scalar_dense.default and self._key(args[0]) in self.counters:
            return 1.0
        if func.namespace in NO_OPERATOR:
            return func(*args, **(kwargs or {}))
        operands = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor)]
        reads = {id(tensor): self.read(tensor) for tensor in operands}
        returned = func(*args, **(kwargs or {}))
        self._record(func, named, operands, reads, [t for t in tree_leaves(returned) if isinstance(t, Tensor)])
        return returned

    def _record(
        self,
        func: Any,
        named: Mapping[str, Any],
        operands: Sequence[Tensor],
        reads: Mapping[int, Read],
        returned: Sequence[Tensor],
    ) -> None:
        """Add an operator that ran, and note the new content of each storage that it wrote or made.

        reads: the operands as they were before the operator ran, by id
        """
        name = func.overloadpacket.__name__
        plain = name if name.startswith("_foreach") else name.rstrip("_")
        written = written_by(func, named)
        before = {self._key(tensor) for tensor in operands}
        made = [tensor for tensor in returned if self._key(tensor) not in before]
        if not made and not written:
            return  # a view
        written_reads = [reads[id(tensor)] for tensor in written if id(tensor) in reads]
        writes_part = any(read.numel < read.value.numel for read in written_reads)
        # The rest of the storage keeps its old content, so the structure of the whole is unknown.
        kind = Kind.SELECTION if writes_part else kind_of(plain, named)
        # What is overwritten as a whole is no input: its old content does not matter.
        overwritten = {id(tensor) for tensor in written} if plain in OVERWRITE and not writes_part else set()
        inputs = [reads[id(tensor)] for tensor in operands if id(tensor) not in overwritten]
        if kind is Kind.SELECTION:
            for read in inputs:
                read.value.selected = True
        targets = [*written, *made]
        results = [self._result(tensor, kind, plain, inputs) for tensor in targets]
        multiplied = factors(plain, kind, named, reads)
        gemms: list[Gemm] = []
        if kind is Kind.GEMM:
            gemms = self._gemms(plain, named, reads, made) if made and not written else []
            _rank_products(plain, multiplied, gemms, targets, results)
        if not any(read.value.varies for read in inputs):
            gemms = []  # a constant result may be cached
        self._losses(plain, named, reads, results)
        self.operations.append(Operation(plain, kind, inputs, results, gemms, multiplied))
        for tensor, value in zip(targets, results, strict=True):
            self.current[self._key(tensor)] = value

    def _result(self, tensor: Tensor, kind: Kind, name: str, reads: Sequence[Read]) -> Value:
        rank = combined_rank(kind, name in ADDITIVE, reads, tensor.numel())
        varies = any(read.value.varies for read in reads)
        mixes = name == "_softmax" or (kind is Kind.LINEAR and any(read.value.mixes for read in reads))
        if name in RANDOM:
            rank, varies = inf, True
        return Value(elements(tensor), tensor.element_size(), rank, varies, mixes=mixes)

    def _losses(self, name: str, named: Mapping[str, Any], reads: Mapping[int, Read], results: Sequence[Value]) -> None:
        """Mark gradients of a cross entropy as dense where no label is ignored."""
        if name == "nll_loss_backward":
            labels = self.labels.get(self._key(named["target"]))
            unweighted = labels is not None and named.get("weight") is None
            results[0].every_row = bool(unweighted and (labels != named["ignore_index"]).all())
        elif name == "_log_softmax_backward_data" and reads[id(named["grad_output"])].value.every_row:
            results[0].rank = inf

    def _gemms(
        self, name: str, named: Mapping[str, Any], reads: Mapping[int, Read], made: Sequence[Tensor]
    ) -> list[Gemm]:
        dtype = str(made[0].dtype).removeprefix("torch.")
        on_gpu = made[0].device.type == "cuda"  # tensor cores round to TF32
        dtype = "tf32" if dtype == "float32" and on_gpu and (self.rounded or name in CONVOLUTIONS) else dtype

        def of(tensor: Tensor) -> Read:
            return reads[id(tensor)]

        if name in MATRIX:
            left, right = (named[key] for key in MATRIX[name])
            found = [_product(left, right, made[0], of, dtype)]
        elif name == "convolution":
            found = [_convolution(named, named["input"], named["weight"], made[0].shape, of, dtype)]
        elif name == "convolution_backward":
            found = list(_convolution_backward(named, of, dtype))
        else:
            found = list(_attention(name, named, of, dtype))
        return [gemm for gemm in found if gemm.flops and gemm.result < len(made)]

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self.alive.append(storage)
        return int(storage._cdata)


Of = Callable[[Tensor], Read]


def kind_of(name: str, named: Mapping[str, Any]) -> Kind:
    """The kind of an operator by its name. Multiplication by 0 is a selection: its operand is not needed."""
    if name in MATRIX or name in CONVOLUTIONS or "scaled_dot_product" in name:
        return Kind.GEMM
    if name == "mul" and not isinstance(factor := named.get("other"), Tensor):
        return Kind.LINEAR if factor else Kind.SELECTION
    if name.startswith(("_foreach_", "_fused_adam", "_fused_sgd")):
        return Kind.PRODUCT
    return KINDS.get(name, Kind.SELECTION)


def arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operator by their names in its schema, defaults included."""
    known = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    return known | dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)


def written_by(func: Any, named: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that the operator writes to."""
    names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [leaf for name in names for leaf in tree_leaves(named.get(name)) if isinstance(leaf, Tensor)]


def factors(name: str, kind: Kind, named: Mapping[str, Any], reads: Mapping[int, Read]) -> list[Read]:
    """Operands that the operator multiplies with each other."""
    if kind is Kind.PRODUCT:
        return list(reads.values())
    if kind is not Kind.GEMM:
        return []
    names = MATRIX.get(name, ("input", "weight", "query", "key", "value", "attn_mask", "attn_bias", "grad_output"))
    chosen = [*names, "grad_out", "grad_out_"]
    return [reads[id(named[key])] for key in chosen if id(named.get(key)) in reads]


def elements(tensor: Tensor) -> int:
    """Number of elements in the tensor's storage."""
    return int(tensor.untyped_storage().nbytes()) // tensor.element_size()


def _product(a: Tensor, b: Tensor, made: Tensor, of: Of, dtype: str) -> Gemm:
    left, right, k = of(a), of(b), a.shape[-1]
    terms = min(k, left.rank, right.rank) * (0.5 if left.value is right.value else 1.0)
    columns = made.shape[-1]
    parameter = "parameter" in (left.value.leaf, right.value.leaf)
    return Gemm(2.0 * made.numel() * terms, 0, k, dtype, columns**2 * made.element_size() * parameter)


def _convolution(
    named: Mapping[str, Any], x: Tensor, weight: Tensor, out: Sequence[int], of: Of, dtype: str, result: int = 0
) -> Gemm:
    """One multiplication per output and pair of channels (Winograd, FFT), times the unpadded taps within a stride."""
    kernel, transposed = weight.shape[2:], bool(named["transposed"])
    steps = zip(kernel, spread(named["stride"], kernel), spread(named["padding"], kernel), strict=True)
    taps = 1 if transposed else prod(1 if padding else min(size, stride) for size, stride, padding in steps)
    whole = conv_flop_count(list(x.shape), list(weight.shape), list(out), transposed=transposed)
    channels = weight.shape[1]
    share = min(1.0, min(of(t).rank for t in (x, weight)) / channels)
    merged = weight.shape[0] ** 2 * weight.element_size()
    return Gemm(float(whole) * taps / prod(kernel) * share, result, channels, dtype, merged)


def _convolution_backward(named: Mapping[str, Any], of: Of, dtype: str) -> Iterable[Gemm]:
    x, weight, gradient = named["input"], named["weight"], named["grad_output"]
    if not of(gradient).rank:
        return
    place = 0
    for wanted in named["output_mask"][:2]:
        if wanted:
            yield _convolution({**named, "padding": [1]}, x, weight, gradient.shape, of, dtype, place)
            place += 1


def _attention(name: str, named: Mapping[str, Any], of: Of, dtype: str) -> Iterable[Gemm]:
    """GEMMs of attention over (batch, heads, length, width); a causal mask halves them, any other mask may skip all."""
    back = name.endswith("backward")
    q, k, v = (named[key] for key in ("query", "key", "value"))
    masks = (named.get(key) for key in ("attn_mask", "attn_bias"))
    if any(isinstance(mask, Tensor) and mask.numel() for mask in masks) or named.get("dropout_p"):
        return
    rows, length, width = prod(q.shape[:-1]), k.shape[-2], q.shape[-1]
    if named.get("is_causal") and q.shape[-2] != length:
        return
    whole = 2.0 * rows * length * (0.5 if named.get("is_causal") else 1.0)
    terms = min(width, of(q).rank, of(k).rank)
    if not back:
        yield Gemm(whole * terms, 0, width, dtype)
        yield Gemm(whole * v.shape[-1] * (of(v).rank > 0), 0, width, dtype)
        return
    gradient = named.get("grad_out", named.get("grad_out_"))
    if gradient is None or not of(gradient).rank or not terms:
        return
    yield Gemm(whole * v.shape[-1], 0, width, dtype)
    for place in range(3):
        yield Gemm(whole * (v.shape[-1] if place == 2 else width), place, width, dtype)


def _rank_products(
    name: str, reads: Sequence[Read], gemms: Sequence[Gemm], made: Sequence[Tensor], results: Sequence[Value]
) -> None:
    """Set the ranks of results of GEMMs. Attention mixes rows; its backward only where every row has a gradient."""
    mixed = any(read.value.mixes for read in reads)
    mixed |= "dot_product" in name and (bool(gemms) or not name.endswith("backward"))
    terms = min([read.rank for read in reads if read.numel > 1] + [gemm.inner for gemm in gemms])
    for tensor, value in zip(made, results, strict=True):
        columns = max(tensor.shape[-1:], default=1)
        whole = terms >= min(columns, value.numel // max(columns, 1))
        value.rank = inf if mixed else 0.0 if not gemms else inf if whole else terms


def spread(values: Sequence[int], dimensions: Sequence[int]) -> list[int]:
    """One value for each dimension."""
    return list(values) if len(values) == len(dimensions) else [values[0]] * len(dimensions)
