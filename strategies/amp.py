"""Automatic mixed precision: GEMMs and convolutions in 16 bits, for tensor cores and half the memory traffic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from optexp.errors import NotCovered, refusing
from optexp.program import Program, preserved, to_device
from optexp.schema import choice
from optexp.strategy import Contract, Counters, Evidence, Notes, Remedy, Stage, Strategy, UserFile, precision
from optexp.support.compiler_errors import of_compiler
from optexp.support.eagerly import EagerMode, is_view, name_of
from optexp.trace import MATRIX_OPS, Trace

if TYPE_CHECKING:
    from optexp.profiling.bounds import Bound
    from optexp.profiling.view import View
    from optexp.records.profile import Calibration

FAILED, ADVICE = "model and loss do not run under autocast", "cast what fails to float32 there, or leave amp out"
MODEL_FAILED = "the model does not run under autocast"
STEP_FAILED = "train_step does not run where only the model's own call is under autocast"
STEP_ADVICE = "call parts of the model inside its forward, or cast in train_step what they are given"


@dataclass
class Amp(Strategy):
    """torch.autocast around model and loss; for float16 the loss is scaled, else gradients would underflow."""

    stage = Stage.PRECISION
    variants = ({"dtype": "float16"},)

    dtype: str = choice("bfloat16", "float16")

    @property
    def contract(self) -> Contract:
        return precision(self.dtype)

    @property
    def remedies(self) -> tuple[Remedy, ...]:
        return (Remedy("compute_bound"), Remedy("memory_bound", rank=2))

    def helps(self, trace: Trace, calibration: Calibration | None) -> bool:
        """Whether a GEMM still computes in a wider dtype, and the device computes faster in this dtype.

        A graph hides operators, so a step in a graph counts as float32. CPUs without bfloat16 units emulate bfloat16.
        """
        dtypes = trace.op_dtypes(MATRIX_OPS)
        if {"bfloat16", "float16"} & dtypes.keys() or not (dtypes or any(kernel.in_graph for kernel in trace.kernels)):
            return False
        if trace.kernels:
            return True
        if calibration is None:  # an unknown CPU
            return False
        return calibration.matrix.get(self.dtype, 0.0) > calibration.matrix.get("float32", 0.0)

    def bound(self, view: View, ceilings: Calibration | None) -> Bound | None:
        """GEMMs at the card's ceiling, all other float32 work in half of its bytes, and casts for free."""
        from optexp.profiling.lower_precision import in_16_bits

        step = view.parts(ceilings)
        rate = ceilings.matrix.get(self.dtype) if ceilings else None
        if not step.on_gpu or not rate:
            return None
        saved = step.saved_us(lambda piece: in_16_bits(step, piece, self.dtype))
        text = (
            f"float32 products at this card's {rate / 1e12:.3g} TFLOP/s of {self.dtype}, all else in half of its bytes"
        )
        return step.less(text, device=saved)

    def limit(self, error: Exception) -> str | None:
        if failure := of_compiler(error):  # of a loop, whose dtypes must stay the same
            return f"{FAILED} ({failure}): {ADVICE}"
        return None

    def unsupported(self, program: Program, device: torch.device) -> str | None:
        types = {p.dtype for p in program.model.parameters() if p.is_floating_point()}
        if types and torch.float32 not in types:
            found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))
            return f"autocast lowers float32 operations, and this model computes in {found}: use dtype=float32"
        native = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
        if self.dtype == "bfloat16" and not native:
            return f"{torch.cuda.get_device_name(device)} has no bfloat16 units: use strategy.amp.dtype=float16"
        return None

    def apply(self, program: Program) -> tuple[Program, Notes]:
        device, dtype = program.device, getattr(torch, self.dtype)
        learns = program.loss is not None or program.optimizer is not None
        optimized = replace(
            program,
            forward=under_autocast(program.call, device, dtype),
            loss=program.loss and under_autocast(program.loss, device, dtype),
            scaler=grad_scaler(device) if learns and dtype is torch.float16 else program.scaler,
        )
        batch = to_device(program.feed.next(), device)
        probe = OperationsIn(dtype)  # as traces show no operations inside compiled regions or graphs
        if program.loss is None and program.optimizer is not None:  # a user's own step, which calls the model itself
            forward = inside(probe, refused(optimized.call))
            with refusing(STEP_FAILED, STEP_ADVICE), preserved(program):
                optimized.step(replace(optimized, forward=forward), batch)
        else:
            with refusing(FAILED, ADVICE), preserved(program), torch.set_grad_enabled(program.trains):
                with probe:
                    output = optimized.predict(batch)
                if optimized.loss is not None:
                    optimized.loss(output, batch)
        notes = {"operations": dict(probe.seen), "called": probe.entered, "loss_scaling": optimized.scaler is not None}
        return optimized, notes

    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        if not notes["operations"]:
            why = (
                "the model has no operation that autocast lowers"
                if notes["called"]
                else "the step never calls model(...)"
            )
            return Evidence(False, f"nothing ran in {self.dtype}: {why}")
        traced = after.op_dtypes(MATRIX_OPS)
        if traced and self.dtype not in traced:
            return Evidence(False, f"every matrix product of the profiled step ran in {', '.join(sorted(traced))}")
        operations = ", ".join(f"{count} {name}" for name, count in sorted(notes["operations"].items()))
        scaling = ", loss scaled" if notes["loss_scaling"] else ""
        return Evidence(True, f"in {self.dtype}: {operations}{scaling}")

    def recipe(self, notes: Notes) -> str:
        lines = [f"forward = under_autocast(forward, device, torch.{self.dtype})"]
        lines += [f"loss_fn = loss_fn and under_autocast(loss_fn, device, torch.{self.dtype})"]
        lines += ["scaler = grad_scaler(device)"] if notes["loss_scaling"] else []
        return "\n".join(lines)

    def patch(self, notes: Notes, file: UserFile) -> str:
        if notes["loss_scaling"]:
            raise NotCovered("float16 needs a loss scale, and the file has no step that could hold one: use bfloat16")
        lines = [f"{call} = under_autocast({call})" for call in file.calls]
        return PATCH.format(device=file.device, dtype=self.dtype) + "\n".join(lines)


# `torch.autocast(...)(call)` enters one object again where the model holds another of its class, and never leaves it.
PATCH = """\
import functools

def under_autocast(call):
    @functools.wraps(call)
    def lower(*args, **kwargs):
        with torch.autocast("{device}", torch.{dtype}):
            return call(*args, **kwargs)

    return lower


"""


def under_autocast(call: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> Callable[..., Any]:
    """`call` under autocast. Autocast's cache of cast weights is emptied at its end, so no later graph captures it."""

    def autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype):
            return call(*args, **kwargs)

    return autocast


def refused(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call of a model, whose errors are not those of a step around it.

    Raises:
        Unsupported: The call failed.
    """

    def tried(*args: Any, **kwargs: Any) -> Any:
        with refusing(MODEL_FAILED, ADVICE):
            return call(*args, **kwargs)

    return tried


def inside(mode: EagerMode, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call under a dispatch mode, which sees nothing of what the step does beside it."""

    def watched(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return call(*args, **kwargs)

    return watched


def grad_scaler(device: torch.device) -> torch.amp.GradScaler:
    """A GradScaler with its scale allocated: the scale is then restorable state, and capture allocates nothing."""
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale(torch.zeros((), device=device))
    return scaler


class OperationsIn(EagerMode):
    """Counts the operations that compute in `dtype`: all their floating-point operands have it, casts aside."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.seen: Counter[str] = Counter()
        self.entered = False

    def __enter__(self) -> Self:
        self.entered = True
        super().__enter__()
        return self

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        leaves = tree_leaves((args, kwargs))
        operands = {t.dtype for t in leaves if isinstance(t, Tensor) and t.is_floating_point()}
        if operands == {self.dtype} and not is_view(func):
            self.seen[name_of(func)] += 1
        return func(*args, **kwargs)
