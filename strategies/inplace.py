"""In-place operations: an intermediate value without further readers is overwritten, without new memory."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.shape_prop import ShapeProp

from optexp.errors import NotCovered, Unsupported, refusing
from optexp.export.inlining import code_of
from optexp.program import Program, to_device
from optexp.strategy import BITWISE, Contract, Counters, Evidence, Notes, Remedy, Stage, Strategy, UserFile
from optexp.transforms.tracing import Tracer, hooked

if TYPE_CHECKING:
    from optexp.profiling.bounds import Bound
    from optexp.profiling.view import View
    from optexp.records.profile import Calibration
    from optexp.trace import Trace

# Tensors that an operation's backward reads, which must not be overwritten.
BACKWARD_READS_INPUT = {"gelu", "silu", "pow", "clamp", "abs"}  # mul and div too, where both operands are tensors
BACKWARD_READS_OUTPUT = {"tanh", "sigmoid", "exp", "sqrt", "relu"}
BACKWARD_READS_NEITHER = {"add", "sub", "neg", "mul", "div"}
POINTWISE = BACKWARD_READS_INPUT | BACKWARD_READS_OUTPUT | BACKWARD_READS_NEITHER
OPERANDS = {"add": 2, "sub": 2, "mul": 2, "div": 2, "pow": 2, "clamp": 3}  # of the others: one
COMMUTATIVE = {"add", "mul"}

# Other operations whose result is new memory that their backward does not read.
OTHER_PRODUCERS: set[Any] = {
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    F.linear, F.conv1d, F.conv2d, F.conv3d, F.layer_norm, F.batch_norm,
    torch.matmul, operator.matmul, torch.mm, torch.bmm, torch.addmm,
}  # fmt: skip

UNTRACED = "inplace rewrites the model's graph, and torch.fx cannot trace this model"

NAMES: dict[Any, str] = {
    **{getattr(torch, name): name for name in POINTWISE - {"gelu", "silu"}},
    **{getattr(operator, name): name for name in ("add", "sub", "mul", "neg", "pow", "abs")},
    operator.truediv: "div",
    torch.true_divide: "div",
    F.relu: "relu",
    F.gelu: "gelu",
    F.silu: "silu",
    nn.ReLU: "relu",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
}


@dataclass
class Inplace(Strategy):
    """Rewrites the model's graph; a value is overwritten only if no later reader and no backward needs it."""

    stage = Stage.REWRITE
    level = "memory"

    @property
    def contract(self) -> Contract:
        return BITWISE

    @property
    def remedies(self) -> tuple[Remedy, ...]:
        return (Remedy("memory_bound", rank=3), Remedy("memory_passes", rank=2))

    def bound(self, view: View, ceilings: Calibration | None) -> Bound | None:
        """The same work in less memory; None on a CPU, where new memory costs time."""
        step = view.parts(ceilings)
        if not step.on_gpu:
            return None
        python = view.account("python").us  # the traced graph omits Python code
        return step.less("time unchanged (peak memory falls by the tensors that are overwritten)", waiting=python)

    def apply(self, program: Program) -> tuple[Program, Notes]:
        traced = trace(program.model)
        batch = to_device(program.feed.next(), program.device)
        with refusing("inplace cannot tell the shapes of all values", "leave it out"):
            infer_shapes(traced, *program.arguments(batch))
        rewritten, kept = Rewriter(traced, program.trains).run()
        notes = {"rewritten": len(rewritten), "operations": dict(Counter(rewritten)), "kept": dict(Counter(kept))}
        notes |= {"code": code_of(traced)}
        put_in(program.model, traced)
        return program, notes

    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        kept = "; ".join(f"{times} kept: {reason}" for reason, times in notes["kept"].items())
        count = notes["rewritten"]
        if not count:
            return Evidence(False, kept or "the model has no element-wise operation to do in place")
        operations = ", ".join(f"{times} {name}" for name, times in notes["operations"].items())
        done = f"{count} operation{'s' * (count > 1)} in place ({operations})"
        return Evidence(True, f"{done}; {kept}" if kept else done)

    def recipe(self, notes: Notes) -> str:
        if notes["code"] is None:
            return ""
        return f"from types import MethodType\n{notes['code']}\n\nmodel.forward = MethodType(rewritten, model)"

    def patch(self, notes: Notes, file: UserFile) -> str:
        raise NotCovered(
            "the rewritten forward is the graph of this one model, which other arguments of its class, changed"
            " attributes and edits of the file would not reach; repro.py holds it"
        )


def trace(model: nn.Module) -> fx.GraphModule:
    """The model as a graph over the model's own attributes, which its code finds in either."""
    with refusing(UNTRACED, "leave inplace out, or take that out of its forward"):
        traced = fx.GraphModule(model, Tracer().trace(model))
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    known = {name for name, _ in every}
    if any(name not in known for name, _ in (*traced.named_parameters(), *traced.named_buffers())):
        raise Unsupported(
            "inplace: the model uses a tensor that is neither a parameter nor a buffer: register it as a buffer, or"
            " leave inplace out"
        )
    return traced


def put_in(model: nn.Module, traced: fx.GraphModule) -> None:
    """Let the model run the graph. It stays what it is to its user: its methods, attributes and order of parameters."""
    kind = type(model)
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    model.__class__ = type(kind.__name__, (kind,), {**names, "forward": type(traced).forward})


def infer_shapes(model: fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Shapes, dtypes and strides of every value, without computing one or touching a buffer."""
    placeholders = [str(node.target) for node in model.graph.nodes if node.op == "placeholder"]
    inputs = [*args, *(kwargs[name] for name in placeholders[len(args) :] if name in kwargs)]
    counting = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and m.momentum is None]
    for norm in counting:  # momentum=None would read the number of batches, a value
        norm.momentum = 0.0
    try:
        ShapeProp(model, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*inputs)
    except RuntimeError as error:  # which shows a node of the graph, and has the reason as its cause
        raise error.__cause__ or error from None
    finally:
        for norm in counting:
            norm.momentum = None


class Rewriter:
    """Replaces operations of a graph by their in-place forms.

    names:  which nodes are pointwise operations, and which ones
    owners: nodes whose value is memory of their own: no input, parameter or view
    """

    def __init__(self, model: fx.GraphModule, trains: bool) -> None:
        self.model, self.trains = model, trains
        self.names = {node: name for node in model.graph.nodes if (name := pointwise_name(node, model))}
        self.owners = {n for n in model.graph.nodes if n in self.names or producer(n, model) in OTHER_PRODUCERS}

    def run(self) -> tuple[list[str], list[str]]:
        """The names of the operations that are now in place, and the reasons why others are not."""
        rewritten, kept = [], []
        for node, name in list(self.names.items()):
            operands = list(node.args)
            if name in COMMUTATIVE and "alpha" not in node.kwargs:
                operands.sort(key=lambda operand: not self.is_free(operand))
            if reason := self.why_not(node, name, operands):
                kept.append(reason)
            else:
                self.replace(node, name, operands)
                rewritten.append(name)
        self.model.graph.lint()
        self.model.recompile()
        return rewritten, kept

    def is_free(self, operand: Any) -> bool:
        return operand in self.owners and len(operand.users) == 1

    def why_not(self, node: fx.Node, name: str, operands: list[Any]) -> str | None:
        """Why the result cannot overwrite the first operand; None where it can."""
        target = operands[0]
        if target not in self.owners:
            return "it reads an input, a parameter or a view"
        if not self.is_free(target):
            return "its operand is read again"
        if layout(target) is None or layout(target) != layout(node):
            return "its result has another shape, dtype or layout"
        product = name in ("mul", "div") and has_tensors(operands[1:])
        if self.trains and (product or name in BACKWARD_READS_INPUT or self.names.get(target) in BACKWARD_READS_OUTPUT):
            return "backward needs its operand"
        return None

    def replace(self, node: fx.Node, name: str, operands: list[Any]) -> None:
        function, arguments = in_place(name, has_tensors(operands[1:])), tuple(operands)
        if function is unless_autocast:
            arguments = (name, *arguments)
        with self.model.graph.inserting_before(node):
            named = options(node, self.model)
            kind = "call_method" if isinstance(function, str) else "call_function"
            new = self.model.graph.create_node(kind, function, arguments, named, name=f"{name}_")
        new.meta = node.meta
        node.replace_all_uses_with(new)
        self.model.graph.erase_node(node)
        self.names[new] = name
        self.owners.add(new)


def pointwise_name(node: fx.Node, model: fx.GraphModule) -> str | None:
    """The operation's name where it is one of POINTWISE and not in place already."""
    unknown = node.kwargs.keys() - {"approximate", "alpha", "min", "max", "exponent", "inplace"}
    if not node.args or unknown or node.kwargs.get("inplace"):
        return None
    if node.op == "call_module" and getattr(model.get_submodule(str(node.target)), "inplace", False):
        return None
    name = str(node.target) if node.op == "call_method" else NAMES.get(producer(node, model))
    if name not in POINTWISE or len(node.args) > OPERANDS.get(name, 1):
        return None
    # With a tensor as exponent, the backward of pow reads its result as well.
    return None if name == "pow" and len(node.all_input_nodes) > 1 else name


def in_place(name: str, tensors: bool) -> Callable[..., Tensor] | str:
    """The in-place form of an operation, or the name of the method; `unless_autocast` takes its name first."""
    if name in ("gelu", "silu"):
        overloads: Callable[..., Tensor] = getattr(torch.ops.aten, f"{name}_")
        return overloads
    if tensors or name in ("pow", "exp"):
        return unless_autocast
    return f"{name}_"


def unless_autocast(name: str, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The in-place form; under autocast the normal one, as autocast may choose another dtype than the operand's."""
    if isinstance(tensor, fx.Proxy):  # a later strategy traces the model: decide at each call of its graph
        node: Any = tensor.tracer.create_proxy("call_function", unless_autocast, (name, tensor, *args), kwargs)
        return node
    own_memory = torch.is_autocast_enabled(tensor.device.type)
    result: Tensor = getattr(tensor, name if own_memory else f"{name}_")(*args, **kwargs)
    return result


def producer(node: fx.Node, model: fx.GraphModule) -> Any:
    """The function or module class that computes a node's value; None for modules with hooks, which may change it."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return None if hooked(module) else type(module)
    return node.target if node.op == "call_function" else None


def options(node: fx.Node, model: fx.GraphModule) -> dict[str, Any]:
    """Keyword arguments of the in-place form."""
    if node.op == "call_module" and isinstance(module := model.get_submodule(str(node.target)), nn.GELU):
        return {"approximate": module.approximate}
    return {key: value for key, value in node.kwargs.items() if key != "inplace"}


def layout(node: fx.Node) -> tuple[Any, ...] | None:
    """Shape, dtype and strides of a node's value; None where it is no single tensor."""
    meta: Any = node.meta.get("tensor_meta")
    return (meta.shape, meta.dtype, meta.stride) if hasattr(meta, "stride") else None


def has_tensors(operands: list[Any]) -> bool:
    return any(isinstance(operand, fx.Node) for operand in operands)
