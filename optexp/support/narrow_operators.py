"""Operators that take some of their numbers in float32 alone, for a reference that computes in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.utils import _pytree as pytree


def _unscale(gradients: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """As a GradScaler asks for it."""
    found = found_inf.to(torch.float32)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.ones_like(found))
    found_inf.copy_(found)
    torch._foreach_mul_(gradients, inv_scale)


def _update_scale(scale: Tensor, growth_tracker: Tensor, found_inf: Tensor, *rates: Any) -> Tensor:
    narrow = scale.to(torch.float32)
    torch._amp_update_scale_(narrow, growth_tracker, found_inf.to(torch.float32), *rates)
    return scale.copy_(narrow)


def _quantized_by_channel(x: Tensor, scale: Tensor, zero_point: Tensor, *range_: int, **named: Any) -> Tensor:
    return torch.fake_quantize_per_channel_affine(x, scale.to(torch.float32), zero_point, *range_, **named)


def _observed_and_quantized(
    x: Tensor,
    observes: Tensor,
    quantizes: Tensor,
    least: Tensor,
    most: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    share: float,
    low: int,
    high: int,
    axis: int = -1,
    by_channel: bool = False,
    symmetric: bool = False,
) -> Tensor:
    """Ranges and scales in float32, and what they quantize in float64."""
    wide = least, most, scale
    seen, ranges = x.detach().to(torch.float32), [tensor.to(torch.float32) for tensor in wide]
    options = zero_point, share, low, high, axis, by_channel, symmetric
    torch.fused_moving_avg_obs_fake_quant(seen, observes, quantizes, *ranges, *options)  # type: ignore[arg-type,call-arg]
    for tensor, narrow in zip(wide, ranges, strict=True):
        tensor.resize_(narrow.shape).copy_(narrow)
    if not quantizes.item():
        return x
    if by_channel:
        return _quantized_by_channel(x, scale, zero_point, axis, low, high)
    return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, low, high)


def _grouped(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """A product for each group, as of the experts of a mixture. `offs` are the ends of groups along the dimension that
    they share out: rows of `a`, columns of `b`, or what the product sums over."""
    if a.dim() == b.dim() == 3:
        product = torch.bmm(a, b)
    else:
        assert offs is not None
        sizes = offs.diff(prepend=offs.new_zeros(1)).tolist()
        if b.dim() == 3:
            parts = [*a.split([*sizes, len(a) - sum(sizes)])]
            product = torch.cat([*map(torch.mm, parts, b), parts[-1].new_zeros(len(parts[-1]), b.shape[-1])])
        elif a.dim() == 3:
            parts = [*b.split([*sizes, b.shape[1] - sum(sizes)], 1)]
            product = torch.cat([*map(torch.mm, a, parts), parts[-1].new_zeros(a.shape[1], parts[-1].shape[1])], 1)
        else:
            left, right = a[:, : sum(sizes)].split(sizes, 1), b[: sum(sizes)].split(sizes)
            product = torch.stack([*map(torch.mm, left, right)])
    return product if bias is None else product + bias


_QUANTIZE = (torch.quantize_per_tensor, torch.quantize_per_channel, torch.quantize_per_tensor_dynamic)
_DEQUANTIZE = (torch.dequantize, Tensor.dequantize)
_RECURRENT = ("quantized_lstm", "quantized_gru")


def quantizes(func: Callable[..., Any]) -> bool:
    """Whether a function is one of torch's operators for quantized models."""
    if not isinstance(func, OpOverloadPacket):
        return func in _QUANTIZE or func in _DEQUANTIZE
    namespace, _, name = func._qualified_op_name.partition("::")
    return namespace == "quantized" or name in _RECURRENT


def in_float32(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A call with numbers of float32, whose results are float64: of quantized numbers rounding to float32 is little."""
    args, kwargs = pytree.tree_map_only(Tensor, _narrow, (args, kwargs))
    return pytree.tree_map_only(Tensor, _wide, func(*args, **kwargs))


def _narrow(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.dtype is torch.float64 else tensor


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64) if tensor.dtype is torch.float32 else tensor


NARROW: dict[Any, Callable[..., Any]] = {
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
    torch._amp_update_scale_: _update_scale,
    torch._grouped_mm: _grouped,
    torch.fake_quantize_per_channel_affine: _quantized_by_channel,
    torch.fused_moving_avg_obs_fake_quant: _observed_and_quantized,
}
