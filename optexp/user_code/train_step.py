"""A training step that the user wrote, as a step of a program: strategies and verification still reach in."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from optexp.errors import NoReference, Unsupported
from optexp.program import Batch, Outputs, Program, clear_gradients, flatten, others
from optexp.python_state.variables import records_graphs


@dataclass(frozen=True)
class TrainStep:
    """A step by the user's `function(model, batch, optimizer)`, which returns the loss, other values, or nothing.

    unpack: a batch as the user's own loader gives it
    model:  the model as the function sees it
    """

    function: Callable[..., Any]
    unpack: Callable[[Batch], Any]
    model: Callable[[Program, Optimizer], Any] = lambda program, optimizer: Model(program, optimizer)

    @cached_property
    def replays(self) -> bool:
        """Whether it is an object that records CUDA graphs: a replay calls no optimizer, and steps all the same."""
        return records_graphs(type(self.function))

    def __call__(self, program: Program, batch: Batch) -> Outputs:
        assert program.optimizer is not None
        if program.scaler is not None:
            raise Unsupported(
                "train_step calls backward() itself, where a GradScaler cannot reach: use strategy.amp.dtype=bfloat16"
            )
        clear_gradients(program.model)
        optimizer = Optimizer(program.optimizer)
        with counted_replays(self.replays) as replayed:
            result = self.function(self.model(program, optimizer), self.unpack(batch), optimizer)
        if replayed and not optimizer.steps:
            return self._outputs(result)
        if not optimizer.steps and not _finite(program.model):
            raise NoReference(
                "train_step left its optimizer step out because gradients overflow, as a GradScaler does: let it start"
                " with a smaller scale (init_scale=)"
            )
        if optimizer.steps != 1:
            raise NoReference(
                f"train_step called optimizer.step() {optimizer.steps} times: a call must be one whole optimizer step"
                " (accumulate over parts of the batch inside it; at a mark, every=4 takes four iterations)"
            )
        return self._outputs(result)

    @staticmethod
    def _outputs(result: Any) -> Outputs:
        tensors = {name: tensor.detach() for name, tensor in flatten(result, "loss").items()}
        return tensors | others(result, "loss")


@contextmanager
def counted_replays(possible: bool) -> Iterator[list[None]]:
    """Inside, one entry for each replay of a CUDA graph: only a replay may step without a call of the optimizer."""
    found = list[None]()
    if not possible:
        yield found
        return
    kind: Any = torch.cuda.CUDAGraph
    plain = kind.replay

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        found.append(None)
        plain(graph)

    kind.replay = replay
    try:
        yield found
    finally:
        kind.replay = plain


def _finite(model: torch.nn.Module) -> bool:
    return all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


class Optimizer:
    """The user's optimizer with gradients that stay after its step, for comparison; every step begins without any."""

    __class__ = property(lambda self: type(self.optimizer))  # type: ignore[assignment]  # to isinstance it is that one

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return self.optimizer.step(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not self.steps:
            self.optimizer.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.optimizer, memo)


class Model:
    """A model whose call is what strategies made of it; attributes are the model's."""

    __class__ = property(lambda self: type(self.model))  # type: ignore[assignment]

    def __init__(self, program: Program, optimizer: Optimizer) -> None:
        self.model, self.call, self.zero_grad = program.model, program.call, optimizer.zero_grad

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.model, memo)
