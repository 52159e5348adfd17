"""The contract of a kernel file, the registration of its ops, and the checks and decisions that kernels share."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.compiler import assume_constant_result, is_compiling
from torch.cuda import is_current_stream_capturing
from torch.nn import Parameter
from triton.runtime import KernelInterface

from optexp.kernelkit.launching import INTERPRETED, current_stream
from optexp.kernelkit.recording import rehearsal, rehearsals
from optexp.kernelkit.small_calls import quick

if TYPE_CHECKING:
    from optexp.kernelkit.extension import Source

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SUPPORTED = (*DTYPES, torch.float64)  # float64 is for accuracy, not for speed

Fill = Callable[..., Tensor]  # fill(*shape) -> standard normal tensor of a case's dtype and device


@dataclass(frozen=True)
class Case:
    """One call of a kernel: `arguments(fill)` are its positional arguments.

    goal:  most time of forward, in lower bounds; None: the time of the fastest alternative
    """

    name: str
    arguments: Callable[[Fill], tuple[Any, ...]]
    goal: float | None = None


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The contract of `kernels/<name>.py`: its `KERNEL`. Tests, benchmark and rewriting follow it.

    function:       users call it; raises ValueError for arguments that it cannot serve
    reference:      the same in plain PyTorch, in any dtype and on any device
    plain:          the textbook kernel, forward only, for studies
    cuda:           `function` in CUDA C++; calls that CUDA C++ cannot serve go to torch
    sources:        the CUDA C++ that it launches, each with the capability that it needs
    cases:          calls that are worth a test: tails, one row, many
    large:          a call whose first tensor has more than 2³¹ elements
    invalid_cases:  calls that must raise ValueError
    benchmarks:     calls that are worth timing
    sweep:          `sweep(fill, size)`: arguments of a call whose first tensor has about `size` elements
    patterns:       the forms in which models write it: functions with the parameters of `function`
    saved_bytes:    bytes that forward saves for backward; 0, or None: backward needs only the arguments
    worthwhile:     whether the kernel can be faster in a model, given (fake) arguments
    lower_bound:    a call that no implementation beats: the bare GEMM; None: a copy of the bytes that must move
    best_library:   the best known library call, if it differs from `reference`
    """

    function: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    cases: Sequence[Case]
    large: Case
    invalid_cases: Sequence[Case]
    benchmarks: Sequence[Case]
    sweep: Callable[..., tuple[Any, ...]]
    patterns: Sequence[Callable[..., Any]]
    plain: Callable[..., Tensor] | None = None
    cuda: Callable[..., Tensor] | None = None
    sources: Sequence[Source] = ()
    saved_bytes: Callable[..., int] | None = None
    worthwhile: Callable[..., bool] = lambda *_: True
    lower_bound: Callable[..., Tensor] | None = None
    best_library: Callable[..., Tensor] | None = None

    @property
    def name(self) -> str:
        return self.function.__module__.rpartition(".")[2]


def for_graphs(kernel: Kernel) -> Kernel:
    """The kernel for a CUDA graph: it also serves small calls, as do the steps before capture, which race configs."""

    def in_graph(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():  # no call counts as small then
                return function(*args, **kwargs)
            with rehearsal():
                return function(*args, **kwargs)

        return call

    return replace(kernel, function=in_graph(kernel.function), worthwhile=in_graph(kernel.worthwhile))


@cache
def kernels() -> dict[str, Kernel]:
    """Every kernel of the folder, by the name of its file; files that begin with an underscore are parts of kernels."""
    folder = importlib.import_module("optexp.kernels").__path__
    names = sorted(module.name for module in pkgutil.iter_modules(folder) if not module.name.startswith("_"))
    return {name: importlib.import_module(f"optexp.kernels.{name}").KERNEL for name in names}


def symbols() -> frozenset[str]:
    """The names by which a trace shows our Triton kernels on the GPU."""
    return frozenset(function.__name__ for function in compiled_functions())


def compiled_functions() -> Iterator[Any]:
    """Every Triton function of kernel files and of the kit."""
    kernels()  # which imports all of these
    for name, module in sorted(sys.modules.copy().items()):
        if name.startswith(("optexp.kernels.", "optexp.kernelkit.")):
            for value in vars(module).values():
                if isinstance(value, KernelInterface) and value.fn.__module__ == name:
                    yield value


# --- ops ---------------------------------------------------------------------------------------------------------


def operation(
    name: str,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
    setup: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    reference: Callable[..., Any] | None = None,
    inference: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register `forward` as the op `optexp::<name>` and return what calls it.

    forward:          launches kernels on real tensors; its annotations are the op's schema
    fake:             the same for tensors without data
    setup, backward:  as `torch.library.register_autograd` takes them; without them the op has no gradient
    reference:        for an op without a gradient: the op in plain PyTorch, which runs where a caller differentiates it
                      all the same, as for the gradient of a gradient
    inference:        `forward` without the work for the gradient, for eager calls that need none

    torch.compile and make_fx see the op. A plain eager call skips the dispatcher, which would cost more host time than
    a small kernel. Inside torch.func's transforms only references run (see `runs_on`).
    """
    op = torch.library.custom_op(f"optexp::{name}", forward, mutates_args=())
    op.register_fake(fake)
    if backward is None or setup is None:

        def call(*args: Any) -> Any:
            if reference is not None and (needs_gradient(args) or is_legacy_batchedtensor(args[0])):
                return reference(*args)
            return op(*args) if is_traced(args) or needs_gradient(args) else forward(*args)

        return call

    op.register_autograd(backward, setup_context=setup)

    def remembered(ctx: Any, *args: Any) -> Any:
        """Forward and setup in one function: with two, torch matches arguments to a signature in every call."""
        result = forward(*args)
        setup(ctx, args, result)
        return result

    methods = {"forward": staticmethod(remembered), "backward": staticmethod(backward)}
    direct: Any = type(f"optexp_{name}", (torch.autograd.Function,), methods)

    def differentiable(*args: Any) -> Any:
        if is_traced(args):
            return op(*args)
        return direct.apply(*args) if needs_gradient(args) else (inference or forward)(*args)

    return differentiable


def is_differentiated(dy: Tensor) -> bool:
    """Whether plain PyTorch must compute a gradient: it will be differentiated in turn, or is one of several at once
    (`is_grads_batched`), whose tensors have no memory for a kernel to read."""
    return torch.is_grad_enabled() or is_legacy_batchedtensor(dy)


def derived(function: Callable[..., Tensor], inputs: Sequence[Tensor | None], dy: Tensor) -> tuple[Any, ...]:
    """Gradients of a plain PyTorch function's inputs for `dy`, which can be differentiated again."""
    with torch.enable_grad():
        leaves = [x if x is None or x.requires_grad else x.detach().requires_grad_() for x in inputs]
        wanted = [leaf for leaf in leaves if leaf is not None]
        found = iter(torch.autograd.grad(function(*leaves), wanted, dy, create_graph=True))
        return tuple(None if leaf is None else next(found) for leaf in leaves)


def is_traced(args: Sequence[Any]) -> bool:
    """Whether a tracer, a mode or a tensor subclass, beside eager autograd, must see the op."""
    if (
        is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return True
    for arg in args:  # with `any`, a generator would take three times as long
        kind = type(arg)
        if kind is not Tensor and kind is not Parameter and isinstance(arg, Tensor):
            return True
    return False


def needs_gradient(args: Sequence[Any]) -> bool:
    if torch.is_grad_enabled():
        for arg in args:
            if isinstance(arg, Tensor) and arg.requires_grad:
                return True
    return False


# --- arguments ---------------------------------------------------------------------------------------------------


def check_tensors(name: str, *tensors: Tensor | None) -> None:
    """Check that all tensors have a supported dtype and lie on the first one's device.

    Raises:
        ValueError: They do not; the message names the kernel and the remedy.
    """
    device = None
    for tensor in tensors:
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} takes tensors, and was given {tensor!r}")
        if tensor.dtype not in SUPPORTED:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUPPORTED)
            raise ValueError(f"{name} takes tensors of {names}, and was given {tensor.dtype}: convert it with .to()")
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            raise ValueError(f"{name} was given tensors on {device} and on {tensor.device}: move them to one device")


def check_row(name: str, x: Tensor, what: str, row: Tensor) -> None:
    """Check that `row` has one element for each column of `x`, … × n.

    Raises:
        ValueError: It does not.
    """
    shape = x.shape
    if not shape or row.shape != (shape[-1],):
        columns = f"shape [{shape[-1]}]" if shape else "an input with at least one dimension"
        raise ValueError(
            f"{name}: the {what} of shape {list(row.shape)} does not fit an input of shape {list(x.shape)}:"
            f" it needs {columns}"
        )


def lowered(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The operands of a GEMM in autocast's dtype, where autocast is on."""
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def laid_out_like(tensor: Tensor, other: Tensor) -> Tensor:
    """The tensor where its strides are those of `other`, which has the same shape; else a copy with those strides."""
    if tensor.stride() == other.stride():
        return tensor
    return torch.empty_strided(other.shape, other.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


# --- where kernels run -------------------------------------------------------------------------------------------


def runs_on(device: torch.device) -> bool:
    """Whether our kernels run on the device. Elsewhere their functions compute the reference, so models run anywhere.

    The reference also runs inside torch.func's transforms and forward-mode differentiation, which our ops do not
    support.
    """
    return (device.type == "cuda" or (device.type == "cpu" and INTERPRETED)) and not is_transformed()


def is_transformed() -> bool:
    """Whether torch.func.grad, jvp, vmap and the like, or a level of forward-mode differentiation, are active."""
    return forward_ad._current_level >= 0 or _has_interpreter()


@assume_constant_result  # torch.compile guards the result; without this it would trace any result as true
def _has_interpreter() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


REFUSED = (RuntimeError, TypeError, ValueError, IndexError)  # what torch raises where it cannot serve its arguments

# Elements × operations. A smaller call costs the host time of its launches, and torch's launches are the cheapest.
# With gradients, Python also runs in backward, so the limit is LEARNING times as high.
SMALL = 2**24
LEARNING = 2


def pays(x: Tensor, operations: float = 1) -> bool:
    """Whether our kernel pays in place of so many torch operations; a call of ours costs the host three of torch's."""
    return not is_small(x, operations) and runs_on(x.device)


@quick
def is_small(x: Any, operations: float = 1, /) -> bool:
    """Whether launches dominate the call's time. Then torch's op is called first, and our checks run only if it raises.

    In Python each property of a tensor takes 50 ns, and the question whether a stream is captured 500 ns, of 6 µs for
    the whole call: cheap questions come first. During capture no call is small: in a graph launches cost only device
    time, and ours cost no more than torch's.
    """
    if not isinstance(x, Tensor) or is_compiling() or x.dtype not in SUPPORTED:
        return False
    device = x.get_device()
    if device < 0:  # a GPU of any kind is served: where our kernels do not run, torch's op is the reference
        return False
    elements = x.numel() * operations
    if elements >= SMALL and (elements >= LEARNING * SMALL or not needs_gradient((x,))):
        return False
    if rehearsals:
        return False
    capturing = current_stream(device) and is_current_stream_capturing()  # the default stream, 0, is never captured
    return not capturing


@quick
def is_small_with_row(x: Any, row: Any, operations: float, /) -> bool:
    """`is_small` for an x, … × n, and a row, n; false for rows that torch accepts but our checks refuse."""
    return is_small(x, operations) and _is_of(row, x.dtype, x.shape[-1:])


@quick
def are_small_alike(a: Any, b: Any, operations: float, /) -> bool:
    """`is_small` for two tensors of one shape and dtype; false for scalars, which may lie on two devices."""
    return is_small(a, operations) and _is_of(b, a.dtype, a.shape)


def _is_of(tensor: Any, dtype: torch.dtype, shape: Sequence[int]) -> bool:
    """Whether a value is a tensor of this dtype and shape, with at least one dimension."""
    return isinstance(tensor, Tensor) and tensor.dtype is dtype and len(shape) > 0 and tensor.shape == shape


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the GPU; 1 under the interpreter, so that persistent programs loop there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def ceil_div(count: int, size: int) -> int:
    """⌈count / size⌉; `triton.cdiv` takes 1.5 µs."""
    return -(-count // size)


def power_of_two(count: int) -> int:
    """The least power of two that is at least `count`; `triton.next_power_of_2` takes 1.5 µs."""
    return 1 << (count - 1).bit_length() if count > 1 else 1
