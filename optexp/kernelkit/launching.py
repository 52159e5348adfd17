"""Kernel launches: on the tensors' device, visible to a profiler, with PDL from Hopper on, cached by arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler
from triton import knobs
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from optexp.kernelkit import capability

CUDA = torch.backends.cuda.is_built()  # in a build without CUDA, fake tensors may still have a CUDA device
NVIDIA = CUDA and torch.version.hip is None
INTERPRETED: bool = knobs.runtime.interpret  # TRITON_INTERPRET=1: Triton runs kernels in Python, on the CPU

current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream if CUDA else lambda device: 0
_current_device: Callable[[], int] = torch._C._cuda_getDevice if NVIDIA and not INTERPRETED else lambda: -1


class Ready(NamedTuple):
    """A kernel that Triton has compiled, and the names of its parameters after the positional ones."""

    compiled: CompiledKernel
    names: Sequence[str]

    def run(self, programs: int, args: Sequence[Any], constants: dict[str, Any]) -> None:
        rest = [constants.get(name) for name in self.names]  # values of constexprs are ignored: they are compiled in
        how = (self.compiled.function, self.compiled.packed_metadata, None, None, None)
        self.compiled.run(programs, 1, 1, current_stream(-1), *how, *args, *rest)


MOST = 4096  # most cached launches
_ready: dict[tuple[Any, ...], Ready] = {}


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Run a Triton kernel on the device of its first tensor; nothing where there are no programs to run.

    kernel:     a function compiled by `triton.jit`
    programs:   size of the one-dimensional grid
    args:       tensors and numbers, by position
    constants:  constexprs, compiler options (`num_warps`, `maxnreg`), and numbers by name

    From Hopper on, a kernel with the constexpr PDL is launched by programmatic dependent launch (PDL): it starts while
    the previous kernel still runs, and waits for it on the device (`kernelkit.elementwise.begin`). `without_pdl=True`
    asks for a normal launch: after a kernel that never triggers dependents (all of torch's), it is 0.2 µs faster than
    PDL. The kernel itself triggers its dependents in either case.

    Triton takes 10 µs to find the compiled variant for the arguments. So launches are cached by every property that
    Triton distinguishes, and repeated without Triton.
    """
    if programs == 0:
        return
    key = _key(kernel, args, constants)
    ready = None if key is None or _is_hooked() else _ready.get(key)
    if ready is not None and not profiler._is_profiler_enabled:
        ready.run(programs, args, constants)
        return
    device = next(getattr(arg, "base", arg).device for arg in args if isinstance(arg, (Tensor, TensorDescriptor)))
    with launching(kernel.__name__, device, args):
        if ready is not None:
            ready.run(programs, args, constants)
            return
        without_pdl = constants.pop("without_pdl", False)
        pdl = _pdl(device, without_pdl) if "PDL" in kernel.arg_names else {}
        compiled = kernel[(programs,)](*args, **constants, **pdl)
    if key is not None and device.index == _current_device() and isinstance(compiled, CompiledKernel):
        if len(_ready) >= MOST:
            _ready.clear()
        _ready[key] = Ready(compiled, kernel.arg_names[len(args) :])


def _is_hooked() -> bool:
    """Whether a launch hook of Triton's is set."""
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        if getattr(hook, "calls", hook):
            return True
    return False


def _key(kernel: Any, args: Sequence[Any], constants: dict[str, Any]) -> tuple[Any, ...] | None:
    """The cache's key: dtypes, 16-byte alignment, and all numbers. None for TMA descriptors, which are not cached."""
    key = [kernel.fn, _current_device(), *constants.items(), *map(type, constants.values())]
    for arg in args:
        if isinstance(arg, Tensor):
            key += (arg.dtype, arg.get_device(), arg.data_ptr() % 16 == 0)
        elif isinstance(arg, TensorDescriptor):
            return None
        else:
            key += (type(arg), arg)
    return tuple(key)


@cache
def _pdl(device: torch.device, without: bool) -> dict[str, bool]:
    """Programmatic dependent launch, from Hopper on:
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization"""
    possible = NVIDIA and device.type == "cuda" and capability.PDL.met_by(device)
    return {"PDL": True, "launch_pdl": not without} if possible else {"PDL": False}


def launching(name: str, device: torch.device, args: Sequence[Any]) -> AbstractContextManager[Any]:
    """Inside the block, launches go to this device, and a profiler sees an operator `optexp.<name>`."""
    if profiler._is_profiler_enabled:
        return _shown(name, device, [getattr(arg, "base", arg) for arg in args])
    here = device.type != "cuda" or device.index == _current_device()
    return nullcontext() if here else torch.cuda.device(device)


@contextmanager
def _shown(name: str, device: torch.device, args: Sequence[Any]) -> Iterator[None]:
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    with (
        torch._C._profiler._RecordFunctionFast(f"optexp.{name}", tensors),
        torch.cuda.device(device if device.type == "cuda" else -1),
    ):
        yield
