"""TorchScript: a model traced once, whose graph torch's older compiler optimizes after it has seen a few calls."""

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
    """A call as a module, so that what it reads of the model is traced as parameters and not as constants.

    names:  of the last of its arguments
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
    """A call of the model, traced the first time. In inference the graph is frozen: parameters become constants.

    What a trace cannot see, as a branch on values, stays as it was at that call.
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
    """A trace leaves out that a model switches them off: what it makes would have gradients where there were none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.is_grad_enabled():
            raise RuntimeError("its forward switches gradients off for a while, which a trace would leave out")
        return func(*args, **(kwargs or {}))


def fused_groups() -> int:
    """How many groups of operations became one kernel in the graph that ran last."""
    return sum(node.kind() in FUSED for node in nodes(torch.jit.last_executed_optimized_graph()))  # type: ignore[attr-defined]


def nodes(graph: Any) -> Iterator[Any]:
    """Of a graph, and of what is inside its nodes, fused groups aside."""
    for node in graph.nodes():
        yield node
        for block in node.blocks():
            yield from nodes(block)
        if node.hasAttribute("Subgraph") and node.kind() not in FUSED:
            yield from nodes(node.g("Subgraph"))
