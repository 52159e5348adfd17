"""Random numbers in float64 that are those of the same call in float32: generators draw others else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

NEW = {torch.randn, torch.rand}
LIKE = {torch.randn_like, torch.rand_like}
IN_PLACE = {
    Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.cauchy_, Tensor.log_normal_, Tensor.bernoulli_,
}  # fmt: skip
OF_TENSORS = {
    torch.normal, torch.bernoulli, torch.multinomial, torch.poisson, torch.binomial, Tensor.bernoulli,
    Tensor.multinomial, torch._standard_gamma, torch._sample_dirichlet,
}  # fmt: skip
INITS = {nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_}  # of layers; others call what is above
DRAWS = NEW | LIKE | IN_PLACE | OF_TENSORS | INITS


def drawn(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Results of a call of one of `DRAWS`, drawn in float32, or in the dtype that the call names, and widened."""
    with torch._C.DisableTorchFunction():
        if func in IN_PLACE:
            values = func(_empty(args[0]), *map(_narrow, args[1:]), **kwargs)
            return args[0].detach().copy_(values) if args[0].requires_grad else args[0].copy_(values)
        if func in INITS:
            kwargs["tensor"].detach().copy_(func(**{**kwargs, "tensor": _empty(kwargs["tensor"])}))
            return kwargs["tensor"]
        if func in OF_TENSORS:
            found = func(*map(_narrow, args), **{key: _narrow(value) for key, value in kwargs.items()})
        else:
            kind = kwargs.get("dtype") or (_kind(args[0]) if func in LIKE else torch.float32)
            found = func(*args, **{**kwargs, "dtype": kind})
        return (
            found.to(torch.complex128) if found.is_complex() else found.double() if found.is_floating_point() else found
        )


def _kind(wide: Tensor) -> torch.dtype:
    return torch.complex64 if wide.is_complex() else torch.float32


def _empty(wide: Tensor) -> Tensor:
    return torch.empty_like(wide, dtype=_kind(wide), requires_grad=False)


def _narrow(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype is torch.float64 else value
