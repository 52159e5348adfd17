"""Capture of CUDA graphs: of a whole step, or of a model's forward and backward."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from optexp.errors import Uncapturable, Unsupported
from optexp.kernelkit.recording import rehearsal
from optexp.program import Batch, Outputs, Program, clear_gradients, map_batch, preserved, tensors_of
from optexp.support.shortage import is_shortage

WAITS = "a graph cannot hold what waits for the GPU (.item(), .cpu(), a branch on a tensor)"
HELD = "the autograd graph of an earlier step may still be held, as by a loss that is kept: keep loss.detach()"


class OtherShape(Unsupported, ValueError):
    """A batch differs in shape or dtype from the captured one."""


@dataclass
class CapturedStep:
    """Replays one captured step on any batch of the captured shapes.

    Addresses are fixed at capture: a batch is copied to `inputs`, and results appear in `outputs` and `gradients`.
    """

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: Outputs
    gradients: Sequence[tuple[Tensor, Tensor]]
    rates: Sequence[Tensor] = ()

    def __call__(self, program: Program, batch: Batch) -> Outputs:
        self._load(list(tensors_of(batch).values()))
        if self.rates and program.optimizer is not None:
            self._follow_rates(program.optimizer)
        self.graph.replay()
        if self.gradients and self.gradients[0][0].grad is not self.gradients[0][1]:
            for parameter, gradient in self.gradients:  # gradients were cleared since the last replay
                parameter.grad = gradient
        return dict(self.outputs)

    def _load(self, tensors: list[Tensor]) -> None:
        require_same(self.inputs, tensors)
        for captured, tensor in zip(self.inputs, tensors, strict=True):
            captured.copy_(tensor, non_blocking=True)  # not foreach: its kernel costs more than a few plain copies

    def _follow_rates(self, optimizer: Optimizer) -> None:
        """Copy newly assigned learning rates to the tensors that the graph reads."""
        for group, rate in zip(optimizer.param_groups, self.rates, strict=True):
            if group["lr"] is not rate:
                rate.fill_(group["lr"])
                group["lr"] = rate


def capture(program: Program, warmup: int, rates: Sequence[Tensor] = ()) -> CapturedStep:
    """Capture the program's step on a copy of its next batch; the program's state is restored.

    warmup: steps before the capture
    rates:  learning rate tensor of each parameter group, if the captured step includes an optimizer
    """
    batch = map_batch(torch.clone, program.feed.next())
    program.feed.pause()  # a loader's thread that pins memory would disturb the capture
    numbers = RandomNumbers(program)
    # On a side stream: lazily created objects must not belong to the default stream, which cannot be captured.
    current, side = torch.cuda.current_stream(program.device), torch.cuda.Stream(program.device)
    side.wait_stream(current)
    with torch.cuda.stream(side), preserved(program), rehearsal():
        for _ in range(warmup):
            program.step(program, batch)
        drawn = numbers.drawn()  # before `preserved` restores the generators
    current.wait_stream(side)
    clear_gradients(program.model)  # so that backward allocates gradients in the graph's memory
    graph = torch.cuda.CUDAGraph()
    for generator in drawn:  # torch registers the default generator itself
        graph.register_generator_state(generator)
    known = set(program.state())
    with recording("the step", program) as pool, torch.cuda.graph(graph, pool=pool):
        outputs = program.step(program, batch)
    if set(program.state()) > known:
        fill(program, graph, known)
    gradients = [(p, p.grad) for p in program.model.parameters() if p.grad is not None]
    return CapturedStep(graph, list(tensors_of(batch).values()), outputs, gradients, rates)


@torch.no_grad()
def fill(program: Program, graph: torch.cuda.CUDAGraph, known: set[str]) -> None:
    """Compute what the captured step registers, which holds nothing before a replay; all other state is put back."""
    values = {name: tensor.clone() for name, tensor in program.state().items() if name in known}
    graph.replay()
    program.put(values)


class RandomNumbers:
    """GPU generators in modules' attributes: a graph that does not know them would repeat its dropout masks."""

    def __init__(self, program: Program) -> None:
        values = chain.from_iterable(vars(module).values() for module in program.model.modules())
        own = (v for v in values if isinstance(v, torch.Generator) and v.device.type == program.device.type)
        self.states = {generator: generator.get_state() for generator in own}

    def drawn(self) -> list[torch.Generator]:
        """The generators whose state has changed since construction."""
        return [generator for generator, state in self.states.items() if not torch.equal(generator.get_state(), state)]


# --- a model alone -----------------------------------------------------------------------------------------------


class Held(nn.Module):
    """A function as a module that owns the model, so that the backward graph computes the model's gradients."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


@dataclass
class GraphedModel:
    """A callable in place of the model, for calls with the captured number, shapes and kinds of arguments."""

    graphed: Callable[..., Any]
    inputs: list[Tensor]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        require_same(self.inputs, tensors)
        return self.graphed(*tensors)


def graph_model(program: Program, warmup: int) -> GraphedModel:
    """Capture forward and, if the program trains, backward of the model, each as a separate graph."""
    drawn: list[torch.Generator] = []
    args, kwargs = call_of(program, drawn)
    if drawn:
        raise Unsupported(
            "the model draws random numbers from a generator of its own, which torch.cuda.make_graphed_callables does"
            " not make known to its graphs: capture more (strategy.cuda_graph.scope=forward_backward or step), or draw"
            " from torch's default generator"
        )
    leaves, spec = tree_flatten((args, kwargs))
    sample = [t.detach().clone().requires_grad_(t.requires_grad) for t in leaves if isinstance(t, Tensor)]
    call, trains = program.call, program.trains

    def on_tensors(*tensors: Tensor) -> Any:
        given = iter(tensors)
        args, kwargs = tree_unflatten([next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        with torch.set_grad_enabled(trains):  # for inference there is no backward pass to record
            output = call(*args, **kwargs)
        if others := sorted({type(leaf).__name__ for leaf in tree_flatten(output)[0] if not isinstance(leaf, Tensor)}):
            raise Unsupported(
                f"the model returns {', '.join(others)}, and its graph holds tensors alone: capture the whole step"
            )
        return output

    program.feed.pause()
    with preserved(program), recording("the model", program) as pool, rehearsal():
        graphed = torch.cuda.make_graphed_callables(
            Held(program.model, on_tensors),
            tuple(sample),
            num_warmup_iters=warmup,
            allow_unused_input=True,
            pool=pool,
        )
    return GraphedModel(graphed, sample)


def call_of(program: Program, drawn: list[torch.Generator] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step's single call of the model.

    drawn: a list to which the model's own generators that the step draws from are added
        Unsupported: The step calls the model more or less than once.
    """
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return program.call(*args, **kwargs)

    numbers = RandomNumbers(program)
    with preserved(program):
        replace(program, forward=recorded).run()
        if drawn is not None:
            drawn += numbers.drawn()
    if len(calls) != 1:
        raise Unsupported(
            f"the step calls the model {len(calls)} times, and a graph holds the values of one call:"
            " capture the whole step"
        )
    return calls[0]


# --- small things ------------------------------------------------------------------------------------------------


def require_same(captured: Iterable[Tensor], given: Iterable[Tensor]) -> None:
    """Raises OtherShape where `copy_` would broadcast or convert."""
    for ours, theirs in zip(captured, given, strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise OtherShape(
                f"captured for {tuple(ours.shape)} {ours.dtype}, got {tuple(theirs.shape)} {theirs.dtype}:"
                " pad batches to one size, or leave a smaller last one out (drop_last=True of a DataLoader)"
            )


@contextmanager
def recording(what: str, program: Program) -> Iterator[Any]:
    """Yields the memory pool for a capture inside the block, and cleans up after a capture that fails.

    what: the captured object, for the message

    Raises:
        Uncapturable: The capture failed; the message names the line that cannot be captured.
    """
    here = torch.cuda.current_stream(program.device)
    pool = torch.cuda.graph_pool_handle() if program.pool is None else program.pool.id
    try:
        yield pool
    except RuntimeError as error:
        cause = first(error)
        if is_shortage(cause):
            raise cause from None
        why = HELD if "legacy stream" in str(cause) else WAITS
        raise Uncapturable(f"{what} cannot be captured: {culprit(cause)}; {why}") from error
    finally:
        if torch.cuda.current_stream(program.device) != here:  # torch failed to end the capture
            torch.cuda.set_stream(here)
            abandon(pool, program)


def abandon(pool: Any, program: Program) -> None:
    """Undo an unfinished capture: stop allocations from its pool, and reset generators that count for its graph."""
    backend, index = torch._C, torch.cuda.current_device()
    with suppress(RuntimeError):  # the capture did not begin to allocate, or has ended that already
        backend._cuda_endAllocateToPool(index, pool)
        backend._cuda_releasePool(index, pool)
    for generator in (torch.cuda.default_generators[index], *RandomNumbers(program).states):
        generator.graphsafe_set_state(generator.clone_state())


def first(error: BaseException) -> BaseException:
    """The first error: ending a failed capture raises further ones."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return error


def culprit(error: BaseException) -> str:
    """The line of the step at which a capture failed, and the error's first line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(str(Path(torch.__file__).parent))]
    frame = own[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}: {frame.line} ({str(error).splitlines()[0]})"
