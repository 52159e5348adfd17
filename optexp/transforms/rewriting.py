"""Rewriting of a captured graph: patterns of operations, however they are spelled, are replaced by our kernels.

The graph is torch.compile's, before autograd, so a kernel must bring its own gradient.
"""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from optexp.kernelkit.kernel import Kernel, for_graphs

Terms = tuple[str, tuple[Any, ...]]  # canonical name of an operation, and its operands in canonical order


@dataclass
class Rewriter:
    """Replaces patterns in graphs by these kernels.

    replaced:  number of replacements by kernel
    refused:   number of matches that were not replaced, by reason
    """

    kernels: Sequence[Kernel]
    replaced: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def run(self, graph: fx.Graph) -> None:
        name_formulas(graph)
        patterns = [(kernel, pattern) for kernel in self.kernels for pattern in map(graph_of, kernel.patterns)]
        for kernel, pattern in sorted(patterns, key=lambda pair: -len(pair[1].nodes)):  # the longest first
            for node in list(graph.nodes):
                self.try_at(node, kernel, result(pattern))

    def try_at(self, node: fx.Node, kernel: Kernel, pattern: Any) -> None:
        """Replace the pattern if the node is its result; either operand of a sum may be the bias."""
        reasons = []
        for match in (Match(), Match(swapped=True)):
            if not match.value(pattern, node) or not match.is_closed(node):
                continue
            args = match.arguments(kernel.function)
            reason = why_not(kernel, args, node)
            if reason is None:
                replace(node, match.nodes, kernel.function, args)
                self.replaced[kernel.name] += 1
                return
            reasons.append(f"{kernel.name}: {reason}")
        self.refused.update(reasons[:1])


def replace(root: fx.Node, nodes: set[fx.Node], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Replace these nodes, of which the root is the last, by a call of the function."""
    with root.graph.inserting_before(root):
        new = root.graph.call_function(function, args)
    new.meta = dict(root.meta)
    root.replace_all_uses_with(new)
    for node in sorted(nodes, reverse=True):
        root.graph.erase_node(node)


def backend(rewriter: Rewriter) -> Callable[..., Callable[..., Any]]:
    """A back end for torch.compile: rewrites each graph, runs it eagerly, and updates torch's counters."""

    def compile(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._dynamo.utils import counters

        before = Counter(rewriter.replaced), Counter(rewriter.refused)
        rewriter.run(module.graph)
        counters["replaced"].update(rewriter.replaced - before[0])
        counters["refused"].update(rewriter.refused - before[1])
        module.recompile()
        return module

    return compile


def why_not(kernel: Kernel, args: Sequence[Any], node: fx.Node) -> str | None:
    """Why the kernel cannot replace the node; asks the kernel with fake tensors, in the autocast state at the node."""
    expected = value_of(node)
    fakes = [value_of(arg) for arg in args]
    if not isinstance(expected, Tensor):
        return "its shapes are not known"
    with ExitStack() as stack:
        if mode := getattr(expected, "fake_mode", None):
            stack.enter_context(mode)
        for arguments in autocast_at(node):
            device, dtype, enabled, cached = arguments
            stack.enter_context(torch.autocast(device, dtype, enabled, cached))
        try:
            ours = kernel.function(*fakes)
            with patch("torch.compiler._is_compiling_flag", False):  # the rewritten graph runs eagerly
                if not kernel.worthwhile(*fakes):
                    in_graph = for_graphs(kernel).worthwhile(*fakes)
                    return "its launches would not pay: add cuda_graph" if in_graph else "it would not pay"
        except ValueError as error:
            return str(error)
        except GuardOnDataDependentSymNode:
            return "its size depends on data"
    for aspect in ("shape", "dtype", "device"):
        if getattr(ours, aspect) != getattr(expected, aspect):
            return f"its result has {aspect} {getattr(ours, aspect)} instead of {getattr(expected, aspect)}"
    if expected.requires_grad and is_written_later([fake for fake in fakes if isinstance(fake, Tensor)], node):
        return "what it reads is written to later, and its gradient wants it as it was"
    return None


def is_written_later(tensors: Sequence[Tensor], node: fx.Node) -> bool:
    """Whether an operation after the node writes to the memory of one of these tensors.

    Writing operations write to their first positional argument or to keyword arguments.
    """
    memory = {tensor.untyped_storage()._cdata for tensor in tensors}
    written: list[fx.Node] = []
    while (node := node.next).op != "output":
        if has_side_effects(node):
            fx.node.map_arg((node.args[:1], node.kwargs), written.append)
    values = map(value_of, written)
    return any(isinstance(value, Tensor) and value.untyped_storage()._cdata in memory for value in values)


# --- matching ----------------------------------------------------------------------------------------------------


@cache
def graph_of(pattern: Callable[..., Any]) -> fx.Graph:
    return fx.symbolic_trace(pattern).graph


def result(pattern: fx.Graph) -> Any:
    return next(node for node in pattern.nodes if node.op == "output").args[0]


@dataclass
class Match:
    """A match of a pattern.

    bound:    values of the pattern's parameters, by name
    nodes:    nodes that the pattern covers
    swapped:  whether operands of sums and products are tried in the other order first
    """

    bound: dict[str, Any] = field(default_factory=dict)
    nodes: set[fx.Node] = field(default_factory=set)
    swapped: bool = False

    def value(self, pattern: Any, value: Any) -> bool:
        """Whether the value matches the pattern; a failed attempt does not change `bound` and `nodes`."""
        if not isinstance(pattern, fx.Node):
            return type(pattern) is type(value) and bool(pattern == value)
        if pattern.op == "placeholder":
            return self.parameter(str(pattern.target), value)
        if not isinstance(value, fx.Node):
            return False
        wanted, found = terms(pattern), terms(value)
        if wanted is None or found is None:
            return False
        (wanted_name, wanted_operands), (name, operands) = wanted, found
        if wanted_name != name or len(wanted_operands) != len(operands):
            return False
        orders = [operands, operands[::-1]] if name in COMMUTATIVE else [operands]
        if self.swapped:
            orders.reverse()
        before = dict(self.bound), set(self.nodes)
        for order in orders:
            self.nodes.add(value)
            if all(self.value(operand, given) for operand, given in zip(wanted_operands, order, strict=True)):
                return True
            self.bound, self.nodes = dict(before[0]), set(before[1])
        return False

    def parameter(self, name: str, value: Any) -> bool:
        if name not in self.bound:
            self.bound[name] = value
        return self.bound[name] is value or (not isinstance(value, fx.Node) and self.bound[name] == value)

    def is_closed(self, root: fx.Node) -> bool:
        """Whether no node outside reads inner values, and no node between the first and the last has side effects."""
        if any(not set(node.users) <= self.nodes for node in self.nodes - {root}):
            return False
        node = min(self.nodes)
        while node is not root:
            if has_side_effects(node):
                return False
            node = node.next
        return not has_side_effects(root)

    def arguments(self, function: Callable[..., Any]) -> tuple[Any, ...]:
        """The values of the pattern's parameters, in the order of the function's parameters."""
        parameters = inspect.signature(function).parameters.values()
        return tuple(self.bound.get(p.name, p.default) for p in parameters)


def has_side_effects(node: fx.Node) -> bool:
    """Whether a node writes to a tensor or changes torch's state (autocast, grad mode): no code may move past it."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    written = bool(node.kwargs.get("inplace")) or "out" in node.kwargs or node.target in INPLACE_OPERATORS
    return in_place or written or not node.users or node.target is _enter_autocast


def value_of(value: Any) -> Any:
    """A node's fake value; other arguments unchanged."""
    return value.meta.get("example_value") if isinstance(value, fx.Node) else value


def autocast_at(node: fx.Node) -> list[tuple[Any, ...]]:
    """The arguments of the graph's autocast regions that are open at the node."""
    open_: dict[fx.Node, tuple[Any, ...]] = {}
    for earlier in node.graph.nodes:
        if earlier is node:
            break
        if earlier.target is _enter_autocast:
            open_[earlier] = earlier.args
        elif earlier.target is _exit_autocast:
            open_.pop(earlier.args[0])
    return list(open_.values())


# --- canonical spelling ------------------------------------------------------------------------------------------


def _binary(name: str) -> Callable[..., Terms | None]:
    def spelled(input: Any, other: Any, *, alpha: Any = 1, rounding_mode: Any = None) -> Terms | None:
        return (name, (input, other)) if alpha == 1 and rounding_mode is None else None

    return spelled


def _quotient(input: Any, other: Any, *, rounding_mode: Any = None) -> Terms | None:
    return ("mul", (input, 1 / other)) if isinstance(other, (int, float)) and other and not rounding_mode else None


def _relu(input: Any, inplace: bool = False) -> Terms | None:
    return None if inplace else ("relu", (input,))


def _gelu(input: Any, approximate: str = "none") -> Terms:
    return "gelu", (input, approximate)


def gelu(x: Tensor, approximate: str) -> Tensor:
    """The replacement of a GELU formula, with the form as a positional argument."""
    return F.gelu(x, approximate=approximate)


def _softmax(input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Terms | None:
    return None if dim is None else ("softmax", (input, dim, dtype))


def _torch_softmax(input: Any, dim: Any, dtype: Any = None) -> Terms:
    return "softmax", (input, dim, dtype)


def _layer_norm(input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Terms:
    return "layer_norm", (input, normalized_shape, weight, bias, eps)


def _torch_layer_norm(*args: Any, cudnn_enable: bool = True, **kwargs: Any) -> Terms:
    return _layer_norm(*args[:5], **kwargs)  # a sixth is cudnn_enable, which means nothing any more


def _linear(input: Any, weight: Any, bias: Any = None) -> Terms:
    return "linear", (input, weight, bias)


def _torch_dropout(input: Any, p: float, train: bool) -> Terms:
    return "dropout", (input, p, train)


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Terms | None:
    return None if inplace else ("dropout", (input, p, training))


COMMUTATIVE = {"add", "mul"}
INPLACE_OPERATORS = {f for name, f in vars(operator).items() if name.startswith("i") and f"__{name}__" in dir(Counter)}
SPELLINGS: dict[Any, Callable[..., Terms | None]] = {
    **dict.fromkeys((operator.add, torch.add, "add"), _binary("add")),
    **dict.fromkeys((operator.mul, torch.mul, torch.multiply, "mul"), _binary("mul")),
    **dict.fromkeys((operator.truediv, torch.div, torch.true_divide, "div"), _quotient),
    **dict.fromkeys((F.relu, torch.relu, "relu"), _relu),
    **dict.fromkeys((F.gelu, gelu), _gelu),
    F.softmax: _softmax,
    torch.softmax: _torch_softmax,
    "softmax": _torch_softmax,
    F.layer_norm: _layer_norm,
    torch.layer_norm: _torch_layer_norm,
    F.linear: _linear,
    F.dropout: _dropout,
    torch.dropout: _torch_dropout,
}


def terms(node: fx.Node) -> Terms | None:
    """The node's operation in canonical spelling; None for an operation that no pattern uses."""
    spelled = SPELLINGS.get(node.target) if node.op in ("call_function", "call_method") else None
    return spelled(*node.args, **node.kwargs) if spelled else None


# --- formulas ----------------------------------------------------------------------------------------------------

POINTWISE: set[Any] = {
    *(getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "pow", "neg")),
    *(getattr(torch, name) for name in ("add", "sub", "mul", "div", "pow", "neg", "tanh", "erf", "sigmoid", "exp")),
    *("add", "sub", "mul", "div", "pow", "neg", "tanh", "erf", "sigmoid", "exp", "square"),
    *(torch.square, torch.multiply, torch.true_divide, torch.special.erf),
}
CURVED = {"tanh", "erf", "sigmoid", "exp"}
LONGEST_FORMULA = 24  # nodes


def name_formulas(graph: fx.Graph) -> None:
    """Put F.gelu where GELU is written out.

    GELU can be written in too many ways for a list. So each element-wise expression of one tensor is evaluated on
    numbers: an expression that equals GELU on all of them, to more than float32's precision, is GELU.
    """
    for node in reversed(list(graph.nodes)):
        for argument, nodes in expressions(node):
            form = gelu_form(argument, sorted(nodes))
            if form is not None and Match(nodes=nodes).is_closed(node):
                replace(node, nodes, gelu, (argument, form))
                break


def expressions(root: fx.Node) -> Iterator[tuple[fx.Node, set[fx.Node]]]:
    """Each node from which alone element-wise operations compute the root, with these operations; the fewest first."""
    inside: set[fx.Node] = set()
    edge = [root]
    while edge and len(inside) < LONGEST_FORMULA:
        node = max(edge)  # the last in the graph: all its readers in the expression were visited
        edge = [other for other in edge if other is not node]
        if inside and not edge and any(getattr(n.target, "__name__", n.target) in CURVED for n in inside):
            yield node, set(inside)
        if node.target not in POINTWISE or node.kwargs or node.graph is not root.graph:
            return
        inside.add(node)
        edge += node.all_input_nodes


def gelu_form(argument: fx.Node, nodes: Sequence[fx.Node]) -> str | None:
    """The form of GELU ("tanh" or "none") that these nodes compute of the argument; None for another function."""
    x = torch.linspace(-12, 12, 241, dtype=torch.float64)
    values: dict[fx.Node, Any] = {argument: x}
    for node in nodes:
        args = fx.node.map_arg(node.args, values.__getitem__)
        function = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
        values[node] = function(*args)
    y = values[nodes[-1]]
    for form in ("tanh", "none"):
        if torch.allclose(y, F.gelu(x, approximate=form), rtol=1e-7, atol=1e-7):
            return form
    return None
