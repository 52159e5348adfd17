"""TorchScript: a model is traced once, and torch's older compiler optimizes the graph after a few calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

FUSED = ("prim::TensorExprGroup", "prim::TensorExprDynamicGroup", "prim::FusionGroup", "prim::CudaFusionGroup")
CALLS_TO_SETTLE = 3  # two that are profiled, one that is optimized


class Called(nn.Module):
    """A call as a module, so that the model's tensors are traced as parameters instead of constants.

    names:  names of the last arguments, which are passed by keyword
    """

    def __init__(self, model: nn.Module, call: Callable[..., Any], names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.called = (call,)  # in a tuple: a model must not be registered twice
        self.names = tuple(names)
        self.training = model.training

    def forward(self, *values: Any) -> Any:
        first = len(values) - len(self.names)
        return self.called[0](*values[:first], **dict(zip(self.names, values[first:], strict=True)))


class Scripted:
    """A call of the model, traced at its first use. In inference the graph is frozen: parameters become constants.

    Control flow that a trace cannot see, such as a branch on values, stays as in that first call.
    """

    def __init__(self, model: nn.Module, call: Callable[..., Any], trains: bool) -> None:
        self.model, self.call, self.trains = model, call, trains
        self.traced: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *(kwargs[name] for name in sorted(kwargs)))
        if self.traced is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it is deprecated
                self.traced = self.trace(values, sorted(kwargs))
        return self.traced(*values)

    def trace(self, values: tuple[Any, ...], names: Sequence[str]) -> Any:
        with GradientsStayOn() if self.trains else nullcontext():
            traced = torch.jit.trace(Called(self.model, self.call, names), values, check_trace=False)
        frozen = not self.trains and not any(module.training for module in self.model.modules())
        return torch.jit.freeze(traced) if frozen else traced  # type: ignore[no-untyped-call]


class GradientsStayOn(TorchFunctionMode):
    """Refuses a model that switches gradients off: a trace omits the switch, and its results would have gradients."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.is_grad_enabled():
            raise RuntimeError("its forward switches gradients off for a while, which a trace would leave out")
        return func(*args, **(kwargs or {}))


def fused_groups() -> int:
    """Number of fused groups of operations in the graph that ran last."""
    return sum(node.kind() in FUSED for node in nodes(torch.jit.last_executed_optimized_graph()))  # type: ignore[attr-defined]


def nodes(graph: Any) -> Iterator[Any]:
    """Nodes of a graph and of graphs inside its nodes, without the content of fused groups."""
    for node in graph.nodes():
        yield node
        for block in node.blocks():
            yield from nodes(block)
        if node.hasAttribute("Subgraph") and node.kind() not in FUSED:
            yield from nodes(node.g("Subgraph"))
