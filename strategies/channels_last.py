"""Channels-last memory format: tensor cores read it directly, without a transpose before each convolution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from optexp.errors import NotCovered
from optexp.program import Batch, Program, ResidentFeed, map_batch, preserved, to_device
from optexp.program.offered import Place
from optexp.strategy import Counters, Evidence, Notes, Stage, Strategy, UserFile
from optexp.support.eagerly import EagerMode

if TYPE_CHECKING:
    from optexp.profiling.bounds import Bound
    from optexp.profiling.view import View
    from optexp.records.profile import Calibration
    from optexp.trace import Trace


@dataclass
class ChannelsLast(Strategy):
    """Weights, optimizer state and inputs with four dimensions in channels-last; convolutions propagate the format.

    Batches on the device are laid out before the clock starts; batches from the host are converted at the model's call.
    """

    stage = Stage.LAYOUT

    def bound(self, view: View, ceilings: Calibration | None) -> Bound | None:
        """Convolutions and normalizations of images at the card's ceilings, and no transposes; None on a CPU."""
        from optexp.profiling.image_layout import with_images_last

        step = view.parts(ceilings)
        if not step.on_gpu:
            return None
        text = "convolutions and normalizations of images at this card's ceilings, and no transposes"
        return step.less(text, device=step.saved_us(lambda piece: with_images_last(step, piece)))

    def unsupported(self, program: Program, device: torch.device) -> str | None:
        if not any(p.dim() == 4 for p in program.model.parameters()):
            return "the model has no weights of convolutions over images: leave channels_last out"
        return None

    def apply(self, program: Program) -> tuple[Program, Notes]:
        before = layouts(program)
        lay_out(program.model)
        if program.optimizer is not None:
            for state in program.optimizer.state.values():
                state.update({name: last(value) for name, value in state.items()})
        resident = type(program.feed) is ResidentFeed
        optimized = replace(
            program,
            forward=with_images_last(program.call),
            feed=ImagesLast(program.device) if resident else program.feed,
        )
        return optimized, {"before": before, "after": layouts(program, optimized), "resident": resident}

    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        was, now = notes["before"], notes["after"]
        total = sum(now.values())
        if was["last"] >= now["last"]:
            return Evidence(False, f"{now['last']} of {total} convolutions return channels-last, as many as before")
        text = f"{now['last']} of {total} convolutions return channels-last ({was['last']} before)"
        turned = [sum("nchwToNhwc" in k.name for k in trace.kernels) / len(trace.steps) for trace in (before, after)]
        return Evidence(True, text + (f", {turned[0]:g} transposes a step became {turned[1]:g}" if any(turned) else ""))

    def recipe(self, notes: Notes) -> str:
        lines = "lay_out(model)\nforward = with_images_last(forward)\n"
        if notes["resident"]:
            lines += "batches = itertools.cycle([tuple(map(last, batch)) for batch in itertools.islice(batches, 4)])\n"
        return "import itertools\n\n" + lines

    def patch(self, notes: Notes, file: UserFile) -> str:
        if file.forward == file.model:
            raise NotCovered(f"{file.model} is a function, which has no weights to lay out")
        return PATCH.format(model=file.model)


PATCH = """\
import functools

def images_last(value):
    is_image = isinstance(value, torch.Tensor) and value.dim() == 4
    return value.contiguous(memory_format=torch.channels_last) if is_image else value


@functools.wraps({model}.__init__)
def with_weights_last(self, *args, plain={model}.__init__, **kwargs):
    plain(self, *args, **kwargs)
    for tensor in (*self.parameters(), *self.buffers()):
        tensor.data = images_last(tensor.data)


@functools.wraps({model}.forward)
def on_images_last(self, *args, plain={model}.forward, **kwargs):
    kwargs = {{name: images_last(value) for name, value in kwargs.items()}}
    return plain(self, *map(images_last, args), **kwargs)


{model}.__init__, {model}.forward = with_weights_last, on_images_last
"""


def last(value: Any) -> Any:
    """A tensor with four dimensions in channels-last; any other value unchanged."""
    if isinstance(value, Tensor) and value.dim() == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value


def lay_out(model: nn.Module) -> None:
    """`model.to(memory_format=torch.channels_last)` that also works for models with five-dimensional weights."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.to(memory_format=torch.channels_last)


def with_images_last(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` on inputs in channels-last."""

    def converted(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(last, (args, kwargs))
        return call(*args, **kwargs)

    return converted


class ImagesLast(ResidentFeed):
    """Batches on the device, in channels-last before the clock starts."""

    @property
    def place(self) -> Place:
        return Place(self.device, images_last=True)

    def bring(self, batch: Batch) -> Batch:
        return map_batch(last, super().bring(batch))


def layouts(program: Program, optimized: Program | None = None) -> dict[str, int]:
    """Number of convolutions in a forward pass by the layout of their result; the program's state is restored."""
    with preserved(program), torch.set_grad_enabled(program.trains), Convolutions() as seen:
        (optimized or program).rehearse(to_device(program.feed.next(), program.device))
    return {layout: seen.layouts[layout] for layout in ("last", "first", "either")}


class Convolutions(EagerMode):
    """Counts the layouts of convolutions' results ("either" for one channel or one pixel)."""

    def __init__(self) -> None:
        super().__init__()
        self.layouts: Counter[str] = Counter()

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if func is torch.ops.aten.convolution.default and result.dim() == 4:
            is_last = result.is_contiguous(memory_format=torch.channels_last)
            self.layouts["either" if is_last and result.is_contiguous() else "last" if is_last else "first"] += 1
        return result
