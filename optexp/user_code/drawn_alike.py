"""Random numbers of a step, drawn so that arms can be compared: from one seed, and in float64 the float32 ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from optexp.equivalence.dropout import NoDropout
from optexp.errors import Unsupported
from optexp.support import random_state
from optexp.support.float32_draws import DRAWS, drawn
from optexp.support.float64 import is_wide


class Drawn32(TorchFunctionMode):
    """Inside, random numbers of float64 are those that the same call draws in float32."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return drawn(func, args, kwargs or {}) if func in DRAWS else func(*args, **(kwargs or {}))


def _state(device: torch.device) -> list[Tensor]:
    """States of the generators that a step may draw from: the CPU's, and the device's."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _put(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


class Seeded:
    """A training step whose random numbers are seeded by the number of its calls.

    calls: so far; state of the step
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, model: Any, batch: Any, optimizer: Any) -> Any:
        some = next(model.parameters(), torch.empty(0))
        self.calls += 1
        with seeded(self.calls, some.device, is_wide(some)):
            return self.function(model, batch, optimizer)

    def put(self, calls: int) -> None:
        self.calls = calls


def compiled_code_draws_alike() -> str:
    """Let compiled code draw the random numbers that eager code draws. Returns a note."""
    import torch._inductor.config

    torch._inductor.config.fallback_random = True
    return "the step draws random numbers: its seed is set before each step, so that arms draw the same"


@contextmanager
def seeded(seed: int, device: torch.device, wide: bool) -> Iterator[None]:
    """Inside, torch's generators start from a seed; afterwards they are as before.

    Args:
        wide: The step computes in float64.

    Raises:
        Unsupported: a CUDA graph is being captured, which can hold no seed.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise Unsupported(
            "the step draws random numbers, which are seeded before each step so that arms can be compared, and a CUDA"
            " graph holds no seed: draw them outside the step"
        )
    before = _state(device)
    random_state.seed(seed)
    try:
        with Drawn32() if wide else nullcontext():
            yield
    finally:
        _put(before, device)


def draws(step: Callable[[], object], device: torch.device) -> bool:
    """Whether a step draws random numbers of torch's, and none of them for a dropout."""
    before = _state(device)
    ends = []
    for mode in (nullcontext(), NoDropout()):
        _put(before, device)
        with mode:
            step()
        ends.append(_state(device))
    _put(before, device)
    plain, silent = ends
    drew = not all(map(torch.equal, before, silent))
    return drew and all(map(torch.equal, plain, silent))
