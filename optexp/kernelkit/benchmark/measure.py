"""Rows of the kernel benchmark: every case in both passes, cold and warm, with all alternatives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optexp.kernelkit.benchmark.calls import (
    argument_sets,
    bytes_of,
    copying,
    differentiated,
    forward_passes,
    outgrows_cache,
    passes,
    with_lower_bound,
)
from optexp.kernelkit.benchmark.race import race
from optexp.kernelkit.benchmark.rows import Row
from optexp.kernelkit.kernel import Case, Kernel

COMPILED = {"none": (), "default": ("default",), "all": ("default", "max-autotune-no-cudagraphs")}
BACKWARD = 1.10  # goal of a memory-bound backward pass, in lower bounds


@dataclass(frozen=True)
class Settings:
    """The choices of a run.

    compile:   key of `COMPILED`: modes of torch.compile to time
    dtypes:    names of torch's dtypes
    shapes:    substring of the names of cases to time; None: all
    forward:   whether backward is left out
    quick:     whether three rounds of 1 ms per candidate replace nine rounds of 3 ms
    """

    compile: str = "default"
    dtypes: Sequence[str] = ("float32", "bfloat16")
    shapes: str | None = None
    forward: bool = False
    quick: bool = False

    @property
    def timing(self) -> tuple[int, float]:
        """Rounds, and seconds of a block."""
        return (3, 1e-3) if self.quick else (9, 3e-3)


def measure(chosen: Sequence[Kernel], device: torch.device, settings: Settings) -> Iterator[Row]:
    """Rows in the order of the table, as they are found."""
    for kernel in chosen:
        for case in kernel.benchmarks:
            if settings.shapes and settings.shapes not in case.name:
                continue
            for dtype in settings.dtypes:
                for cache in ("cold", "warm"):
                    yield from rows_of(kernel, case, dtype, cache, device, settings)
                torch._dynamo.reset()  # else the next shape would be compiled as a dynamic one
                if device.type == "cuda":
                    torch.cuda.empty_cache()


def rows_of(
    kernel: Kernel, case: Case, dtype: str, cache: str, device: torch.device, settings: Settings
) -> Iterator[Row]:
    """The case's row of the forward pass and, if ours has a gradient, of the backward pass (GEMMs: of both passes).

    dtype:  a name of torch's
    cache:  "cold" or "warm"; no warm row where the arguments outgrow L2
    """
    sets = argument_sets(case, getattr(torch, dtype), device, cold=cache == "cold")
    if cache == "warm" and outgrows_cache(sets[0], device):
        return  # the cold row covers it
    candidates = functions(kernel, COMPILED[settings.compile])
    with torch.no_grad():
        dy = torch.randn_like(kernel.reference(*sets[0]))
        calls = {name: forward_passes(f, sets) for name, f in candidates.items()}
        moved = None if kernel.lower_bound else bytes_of(sets[0]) + dy.nbytes
        calls |= copying(moved, device, len(sets))
        if kernel.plain is not None:
            calls["plain"] = forward_passes(kernel.plain, sets)
        forward = with_lower_bound(race(calls, device, *settings.timing))
    yield Row(kernel.name, case.name, dtype, "forward", cache, moved, forward, case.goal)
    begin, end = differentiated(kernel.reference, sets[0], dy)
    begin()
    if settings.forward or all(grad is None or grad.data_ptr() == dy.data_ptr() for grad in end()):
        return  # backward returns dy itself
    saved = 2 * kernel.saved_bytes(*sets[0]) if kernel.saved_bytes is not None else 0  # written, too
    moved = (saved or bytes_of(sets[0])) + bytes_of(sets[0]) + dy.nbytes  # read; gradients; dy
    if cache == "warm":  # enough calls that the device takes longer than the host
        sets *= max(4, min(64, 2**28 // moved))
    dys = [dy if cache == "warm" else torch.randn_like(dy) for _ in sets]
    both = {name: passes(f, sets, dys, apart=cache == "cold") for name, f in candidates.items()}
    if kernel.lower_bound is not None:
        times = {name: us and 2 * us for name, us in race(both, device, *settings.timing).items()}
        yield Row(kernel.name, case.name, dtype, "both passes", cache, None, times)
        return
    # Forward again in the same race: a difference needs equal conditions, and warm there are now more sets.
    first = {f"{name}, forward": forward_passes(f, sets) for name, f in candidates.items()}
    copies = copying(moved, device, 1 if cache == "warm" else len(sets))
    found = race(both | first | copies, device, *settings.timing)
    backward = {name: second_pass(found[name], found[f"{name}, forward"]) for name in both}
    backward |= with_lower_bound({name: found[name] for name in copies})
    goal = BACKWARD if moved > 2**25 else None  # launches bound smaller calls
    yield Row(kernel.name, case.name, dtype, "backward", cache, moved, backward, goal)


def second_pass(mean_us: float | None, first_us: float | None) -> float | None:
    """µs of the second of two passes, from their mean and the first; None where scatter makes it negative."""
    return None if mean_us is None or first_us is None or 2 * mean_us <= first_us else 2 * mean_us - first_us


def functions(kernel: Kernel, modes: Sequence[str]) -> dict[str, Callable[..., Tensor]]:
    """The candidates by column name.  modes: modes of torch.compile"""
    found: dict[str, Callable[..., Tensor]] = {"eager": kernel.reference}
    for mode in modes:
        compiled = torch.compile(kernel.reference, mode=mode, dynamic=False)
        found["compile" if mode == "default" else "max-autotune"] = compiled
    if kernel.best_library is not None:
        found["best_library"] = kernel.best_library
    if kernel.lower_bound is not None:
        found["lower_bound"] = kernel.lower_bound
    if kernel.cuda is not None:
        found["cuda"] = kernel.cuda
    return {**found, "ours": kernel.function}


def sweep(kernel: Kernel, device: torch.device) -> list[Row]:
    """Forward in bfloat16 at sizes from 4 K elements to 256 M, cold where that is possible."""
    settings = Settings(compile="none", forward=True, quick=True)
    rows: list[Row] = []
    for power in range(12, 29, 2):
        case = Case(str(2**power), lambda fill, size=2**power: kernel.sweep(fill, size))  # type: ignore[misc]
        rows += rows_of(kernel, case, "bfloat16", "cold", device, settings)
    return rows
