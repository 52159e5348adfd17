"""Resources of a step's kernels: the trace's launches joined with compiled code and the device's limits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Protocol

from optexp.profiling.occupancy import occupancy
from optexp.records.compiler import DeviceLimits, KernelResources
from optexp.trace import Kernel, Trace, short_name

WARP = 32  # threads


class Code(Protocol):
    """Compiled code of a kernel, as an arm reports it."""

    @property
    def name(self) -> str: ...
    @property
    def origin(self) -> str: ...
    @property
    def warps(self) -> int: ...
    @property
    def registers(self) -> int | None: ...
    @property
    def spills(self) -> int | None: ...
    @property
    def shared(self) -> int | None: ...
    @property
    def files(self) -> Mapping[str, str]: ...


def ran(trace: Trace) -> list[tuple[str, int]]:
    """Name and warps per block of each kernel, those with most time first."""
    times = defaultdict[tuple[str, int], float](float)
    for kernel in trace.kernels:
        if kernel.block:
            times[kernel.name, _warps(kernel)] += kernel.duration
    return sorted(times, key=lambda key: -times[key])


def kernel_resources(
    trace: Trace, codes: Sequence[Code], limits: DeviceLimits | None, folder: str, most: int
) -> list[KernelResources]:
    """Kernels by name, grid and block, those with most time first.

    folder: folder of the code's files, as the record names it;  most: at most so many rows
    """
    known = {(code.name, code.warps): code for code in codes}
    alike = defaultdict[tuple[object, ...], list[Kernel]](list)
    for kernel in trace.kernels:
        if kernel.block:
            alike[kernel.name, kernel.grid, kernel.block, kernel.registers, kernel.shared_bytes].append(kernel)
    groups = sorted(alike.values(), key=lambda kernels: -sum(kernel.duration for kernel in kernels))
    return [
        _row(
            kernels[0],
            len(kernels) / len(trace.steps),
            known.get((kernels[0].name, _warps(kernels[0]))),
            limits,
            folder,
        )
        for kernels in groups[:most]
    ]


def _row(kernel: Kernel, calls: float, code: Code | None, limits: DeviceLimits | None, folder: str) -> KernelResources:
    registers = _first(kernel.registers, code.registers if code else None)
    shared = _first(kernel.shared_bytes, code.shared if code else None)
    found = None
    if limits is not None and registers is not None and shared is not None:
        found = occupancy(limits, prod(kernel.block), registers, shared)
    origin = code.origin if code else "CUDA C++" if "optexp::" in kernel.name else "library"
    return KernelResources(
        short_name(kernel.name),
        origin,
        _text(kernel.grid),
        _text(kernel.block),
        calls,
        registers,
        code.spills if code else None,
        shared,
        found.share if found else None,
        found.limited_by if found else "",
        found.blocks_per_sm if found else None,
        kernel.blocks / (found.blocks_per_sm * limits.multiprocessors) if found and limits and kernel.blocks else None,
        {kind: f"{folder}/{name}" for kind, name in code.files.items()} if code else {},
    )


def _warps(kernel: Kernel) -> int:
    return -(-prod(kernel.block) // WARP)


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _text(size: Sequence[int]) -> str:
    return "×".join(map(str, size))
