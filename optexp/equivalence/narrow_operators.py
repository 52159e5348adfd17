"""Operators that take some of their numbers in float32 alone, for a reference that computes in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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


NARROW: dict[Any, Callable[..., Any]] = {
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
    torch._amp_update_scale_: _update_scale,
    torch.fake_quantize_per_channel_affine: _quantized_by_channel,
    torch.fused_moving_avg_obs_fake_quant: _observed_and_quantized,
}
