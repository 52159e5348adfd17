"""Global state that a candidate may leave changed: settings of torch and of Python, and what results are read by."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from optexp.program import Program
from optexp.support.reading import hidden
from optexp.support.reading import unlike as not_plain

Settings = dict[str, str]
MODES = "the modes that every operator of torch passes through"
# What tensors are read and compared by, and what parameters and buffers are found by.
_READERS: list[tuple[Any, str]] = [
    *((Tensor, name) for name in ("detach", "clone", "copy_", "to", "tolist", "item", "data")),
    *((Tensor, name) for name in ("__eq__", "eq", "reshape", "view", "contiguous", "is_floating_point", "data_ptr")),
    *((torch, name) for name in ("equal", "allclose", "isclose", "clone", "manual_seed", "randn", "rand", "randint")),
    (torch.testing, "assert_close"),
    (torch.cuda, "manual_seed_all"),
    *((nn.Module, name) for name in ("named_parameters", "named_buffers", "named_modules", "_named_members")),
]


def originals() -> list[Any]:
    """The functions that results are read by, as they are now: before a strategy is applied."""
    return [getattr(owner, name) for owner, name in _READERS]


def _is(now: Any, original: Any) -> bool:
    """The same function, or torch's own wrapper around it: torch._dynamo wraps `torch.manual_seed` when it is imported,
    which may be later."""
    if now is original:
        return True
    wrapper = torch._disable_dynamo(original)  # type: ignore[attr-defined]
    ours = getattr(now, "__code__", None) is wrapper.__code__
    return ours and any(cell.cell_contents is original for cell in now.__closure__)


class History(NamedTuple):
    """Settings of an arm's process before it was set up, right after that, and later."""

    before: Settings
    ready: Settings
    now: Settings


def settings() -> Settings:
    """torch's present defaults, by the name under which a user would set them."""
    backends: Any = torch.backends
    readers: dict[str, Callable[[], Any]] = {
        "torch.get_default_dtype": torch.get_default_dtype,
        "torch.get_num_threads": torch.get_num_threads,
        "torch.get_float32_matmul_precision": torch.get_float32_matmul_precision,
        "torch.is_grad_enabled": torch.is_grad_enabled,
        "torch.is_inference_mode_enabled": torch.is_inference_mode_enabled,
        "torch.is_autocast_enabled": lambda: [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "torch.are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled,
        "torch.set_flush_denormal": lambda: sys.float_info.min / 2 == 0,  # of this thread; torch has no getter
        "torch.is_anomaly_enabled": torch.is_anomaly_enabled,
        "torch.backends.mkldnn.enabled": lambda: backends.mkldnn.enabled,
        "torch.backends.cudnn.enabled": lambda: backends.cudnn.enabled,
        "torch.backends.cudnn.benchmark": lambda: backends.cudnn.benchmark,
        "torch.backends.cudnn.deterministic": lambda: backends.cudnn.deterministic,
        "torch.backends.cudnn.conv.fp32_precision": lambda: backends.cudnn.conv.fp32_precision,
        "torch.backends.cuda.matmul.fp32_precision": lambda: backends.cuda.matmul.fp32_precision,
        **{
            f"torch.backends.cuda.matmul.{name}": partial(getattr, backends.cuda.matmul, name)
            for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
        },
        **{f"torch.backends.cuda.{name}": getattr(backends.cuda, name) for name in _ATTENTION},
        "torch.cuda.current_stream": lambda: torch.cuda.current_stream().cuda_stream if _started() else 0,
        "gc.isenabled": gc.isenabled,
        "os.getpriority": partial(os.getpriority, os.PRIO_PROCESS, 0),
        "the hooks of every module": _hooks,
        MODES: _modes,
    }
    return {name: _read(reader) for name, reader in readers.items()}


_started = torch.cuda.is_initialized  # asking for a stream would start CUDA
_ATTENTION = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")


def undeclared(candidate: History, baseline: History, declared: Iterable[str]) -> Mapping[str, str]:
    """Settings that the candidate's arm has changed since its start, that the baseline's did not change when it was set
    up, and that no strategy says it changes: old and new, in words."""
    theirs = {name for name, value in baseline.ready.items() if value != baseline.before[name]}
    return {
        name: f"{before} → {candidate.now[name]}"
        for name, before in candidate.before.items()
        if candidate.now[name] != before and name not in theirs | set(declared)
    }


def tampered(program: Program, before: Sequence[Any]) -> list[str]:
    """Functions that read results, where they are a program's own: work could wait there until after the clock."""
    found = {
        f"{owner.__name__}.{name}"
        for (owner, name), original in zip(_READERS, before, strict=True)
        if not _is(getattr(owner, name), original)
    }
    for part in program.model.modules():
        found |= {
            f"{type(part).__name__}.{name}"
            for owner, name in _READERS
            if owner is nn.Module and (getattr(type(part), name) is not getattr(owner, name) or name in vars(part))
        }
    for kind, tensors in (("a parameter", program.model.parameters()), ("a buffer", program.model.buffers())):
        found |= {f"{name} of {kind}" for tensor in tensors for name in hidden(tensor)}
    if program.trains:
        kinds = {type(parameter) for parameter in program.model.parameters()}
        found |= {f"the parameters ({kind.__name__})" for kind in kinds - {nn.Parameter}}
    return sorted(found)


def unlike(outputs: Any, program: Program) -> list[str]:
    """Outputs and gradients of a step that may be computed only when they are read."""
    if type(outputs) is not dict:
        return [f"the dict of outputs ({type(outputs).__name__})"]
    gradients = [p.grad for p in program.model.parameters() if p.grad is not None] if program.trains else []
    return not_plain("an output", outputs.values()) + not_plain("a gradient", gradients)


def _modes() -> list[str]:
    """A default device is none of them."""
    stacks = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
    return [type(mode).__name__ for mode in stacks if not isinstance(mode, DeviceContext)]


def _hooks() -> int:
    """Kept in dicts, but for one flag."""
    return sum(len(hooks) for name, hooks in vars(module).items() if name[:7] == "_global" and isinstance(hooks, dict))


def _read(reader: Callable[[], Any]) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return str(reader())
    except RuntimeError as error:  # old and new ways to set a precision were mixed
        return str(error).splitlines()[0]
