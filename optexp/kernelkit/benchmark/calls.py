"""Calls to time: forward and backward passes, each with memory of its own, and copies of the same size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from optexp.kernelkit.kernel import Case, ceil_div
from optexp.support.card_memory import l2_bytes

Call = Callable[[], Any]

COPIES = ("copy engine", "copy kernel")
ALIGNED = 512  # bytes, as the allocator's blocks: copies of other sizes are slower


def argument_sets(case: Case, dtype: torch.dtype, device: torch.device, cold: bool) -> list[tuple[Any, ...]]:
    """Sets of the case's arguments: one set; if `cold`, enough sets that the first has left L2 at its next turn."""
    generator = torch.Generator(device).manual_seed(0)

    def fill(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    first = case.arguments(fill)
    if not cold or device.type != "cuda":
        return [first]
    count = max(2, math.ceil(flushing_bytes(device) / bytes_of(first)))
    return [first, *(case.arguments(fill) for _ in range(min(count, 64) - 1))]


def flushing_bytes(device: torch.device) -> int:
    """Bytes of accesses that evict all earlier data from L2."""
    return 4 * l2_bytes(device)


def outgrows_cache(args: Sequence[Any], device: torch.device) -> bool:
    """Whether these arguments are larger than `flushing_bytes`, and so cold in any case."""
    return device.type == "cuda" and bytes_of(args) >= flushing_bytes(device)


def bytes_of(args: Sequence[Any]) -> int:
    """Bytes of the tensors among these arguments."""
    return sum(arg.nbytes for arg in args if isinstance(arg, Tensor))


def copying(moved: int | None, device: torch.device, count: int = 1) -> dict[str, list[Call]]:
    """Copies that read and write `moved` bytes, by the copy engine and by a kernel; none where `moved` is None.

    At some sizes one kind takes 1.5 times as long as the other.

    count:  number of copies of each kind, each with memory of its own
    """
    if moved is None:
        return {}
    numbers = ceil_div(moved, 2 * ALIGNED) * ALIGNED // 4
    sources = [torch.empty(numbers, dtype=torch.int32, device=device).random_() for _ in range(count)]
    return {
        COPIES[0]: [partial(torch.empty_like(source).copy_, source) for source in sources],
        COPIES[1]: [partial(torch.neg, source, out=torch.empty_like(source)) for source in sources],
    }


def with_lower_bound(times: dict[str, float | None]) -> dict[str, float | None]:
    """The times, with the faster of both copies as the lower bound."""
    copies = [us for name in COPIES if (us := times.get(name))]
    others = {name: us for name, us in times.items() if name not in COPIES}
    return others | ({"lower_bound": min(copies)} if copies else {})


def forward_passes(function: Callable[..., Tensor], sets: Sequence[Sequence[Any]]) -> list[Call]:
    """Forward passes under no_grad; each pass has memory of its own for its result."""
    return [torch.no_grad()(partial(hold, [], partial(function, *args))) for args in sets]


def passes(
    function: Callable[..., Tensor], sets: Sequence[Sequence[Any]], dys: Sequence[Tensor], apart: bool = False
) -> list[Call]:
    """All forward passes, then all backward passes.

    apart:  whether gradients have memory of their own too
    """
    pairs = [differentiated(function, args, dy) for args, dy in zip(sets, dys, strict=True)]
    return [begin for begin, _ in pairs] + [partial(hold, [], end) if apart else end for _, end in pairs]


def hold(held: list[Any], call: Call) -> Any:
    """The call's result; `held` keeps it alive until the next call."""
    held.clear()  # before the call: an older result would tie leaves to its stream, which breaks a capture
    held.append(call())
    return held[0]


def differentiated(function: Callable[..., Tensor], args: Sequence[Any], dy: Tensor) -> tuple[Call, Call]:
    """The forward pass, and the backward pass that must follow it: the gradients of all tensors among `args`."""
    leaves = [arg.detach().requires_grad_() if isinstance(arg, Tensor) else arg for arg in args]
    wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    made: list[Tensor] = []

    def end() -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(made.pop(), wanted, dy, allow_unused=True)

    return partial(hold, made, partial(function, *leaves)), end


def in_turn(calls: Sequence[Call]) -> None:
    """Make all of these calls."""
    for call in calls:
        call()
