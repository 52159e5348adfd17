"""NaN in all memory that a step ought not to read: what it never wrote, or freed, shows in its results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random

import torch
from torch import Tensor

from optexp.support import sparse
from optexp.support.reading import read

SMALL = 2**20  # bytes; the allocator takes requests up to this size from other segments than larger ones
HOLD = 10_000_000  # cycles, some 5 ms: longer than most steps take to be asked for
_chance = Random()  # not seeded: no program can predict it
_sleep: Callable[[int], None] = getattr(torch._C, "_cuda_sleep", lambda cycles: None)  # below torch.cuda._sleep


def poison(device: torch.device) -> None:
    """Fill the free blocks of the caching allocator, as far as a plain request can reach them."""
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":  # others do not tell what they hold
        return
    stream, index = torch.cuda.current_stream(device).cuda_stream, torch.cuda.current_stream(device).device_index
    sizes = [
        size
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and segment["stream"] == stream
        if tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
        for block in segment["blocks"]
        if block["state"] == "inactive"
        for size in _requests(block["size"], segment["segment_type"] == "small")
    ]
    # The largest first: the best fit of each request is then the block that it was made for.
    held = [torch.empty(size, dtype=torch.uint8, device=device) for size in sorted(sizes, reverse=True)]
    for memory in held:
        memory.fill_(0xFF)  # NaN in every floating-point format, −1 in integers


def stain(device: torch.device, sizes: Sequence[int]) -> None:
    """Let the caching allocator hold free blocks of these sizes, for `poison` to fill: a process that has given back
    what it cached gets memory from the driver, in which the results of an earlier step may still stand."""
    if device.type == "cuda":
        held = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        held.clear()


def _requests(block: int, small: bool) -> list[int]:
    """Sizes of requests that take a free block: all of it, or, of a segment for small requests, as many as fill it."""
    if not small:
        return [block] if block > SMALL else []
    whole, rest = divmod(block, SMALL)
    return [SMALL] * whole + [rest] * (rest > 0)


def hold(device: torch.device) -> None:
    """Every other time, let the device begin what its current stream is asked for next only some milliseconds later.

    Work on another stream that no one waits for is then not done by the time the step's results are read,
    though the host may be slow, and they are what `poison` left. Not every time: a stream that does not wait for the
    step's own either would be done by then.
    """
    if device.type == "cuda" and _chance.random() < 0.5:
        with torch.cuda.device(device):
            _sleep(HOLD)


def scribble(results: Iterable[Tensor], spared: Iterable[Tensor]) -> None:
    """Overwrite what a step returned, except memory that it shares with `spared`: its inputs and its state."""
    kept = {sparse.place(read(tensor)) for tensor in spared}
    for tensor in map(read, results):
        if tensor._is_zerotensor():  # without memory
            continue
        if tensor.layout is torch.strided and tensor.is_floating_point() and sparse.place(tensor) not in kept:
            with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
                tensor.fill_(torch.nan)
