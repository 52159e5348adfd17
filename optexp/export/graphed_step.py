"""A step of a user's file as a CUDA graph. The code behind this text becomes part of the file, by a patch."""

import dis
from itertools import chain
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten


def is_own(value: Any) -> bool:
    return getattr(value, "__module__", "") == __name__


def read_by(functions: Any) -> list[str]:
    """Names of globals that functions of this file read, and functions of this file that these call."""
    functions, names = [*functions], dict[str, None]()
    for function in functions:  # which grows
        codes = [function.__code__]
        for code in codes:
            codes += [inner for inner in code.co_consts if hasattr(inner, "co_code")]
            names.update((found.argval, None) for found in dis.get_instructions(code) if found.opname == "LOAD_GLOBAL")
        called = [getattr(function, "__wrapped__", None), *map(globals().get, names)]
        functions += [f for f in called if is_own(f) and hasattr(f, "__code__") and f not in functions]
    return [*names]


class Graphed:
    """call(model, batch, *optimizers) as a CUDA graph: after a few calls as they are, one is recorded and replayed.

    Other shapes, float64, and a model that is not on a GPU run as they are. What a graph takes for constant is compared
    at every call, and a change of it begins anew; a model whose forward assigns attributes is never recorded.
    """

    warmup = 3

    def __init__(self, call: Any) -> None:
        self.call = call
        self.graph: Any = None
        self.known: Any = None
        self.globals: list[str] = []
        self.parameters: list[torch.nn.Parameter] = []
        self.places: list[Any] = []
        self.filled: list[Any] = []

    def __call__(self, model: Any, batch: Any, *optimizers: Any) -> Any:
        leaves, form = tree_flatten(batch)
        shapes = [(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        shapes.append(form)
        if self.facts(self.constants(model, optimizers)) != self.known:  # new, or another model, mode or option
            self.begin(model, optimizers, shapes)
        if not self.parameters:
            return self.call(model, batch, *optimizers)
        first = self.parameters[0]
        if not first.is_cuda or first.dtype is torch.float64 or shapes != self.shapes:
            return self.call(model, batch, *optimizers)
        self.calls += 1
        if self.calls <= self.warmup:
            return self.aside(model, batch, *optimizers)
        if self.graph is None:
            self.record(model, leaves, form, optimizers)
        elif not self.finds_gradients():
            return self.call(model, batch, *optimizers)
        for static, leaf in zip(self.static, leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                static.copy_(leaf, non_blocking=True)
        for group, rate in self.rates:
            if group["lr"] is not rate:  # the graph reads the tensor, and someone put another in its place
                rate.fill_(group["lr"])
                group["lr"] = rate
        self.graph.replay()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        return tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, self.result)

    def constants(self, model: Any, optimizers: Any) -> list[Any]:
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        options = (value for group in groups for name, value in group.items() if name != "lr")  # a graph reads the rate
        kept = (held.values() if isinstance(held, dict) else held for held in self.filled)
        read = map(globals().get, self.globals)
        return [model, *modes, *groups, *options, *read, *chain.from_iterable(kept)]

    def facts(self, constants: Any) -> Any:
        memory = [(parameter.data_ptr(), parameter.requires_grad) for parameter in self.parameters]
        return [*map(id, constants)], [*map(len, self.places)], memory

    def begin(self, model: Any, optimizers: Any, shapes: Any) -> None:
        attributes = [vars(module) for module in model.modules()]  # modes, hooks, layers, parameters and others
        several = (value for own in attributes for value in own.values() if isinstance(value, (dict, list)))
        self.places = [*attributes, *several]
        self.filled, self.parameters = [*filter(None, self.places)], [*model.parameters()]
        forwards = [type(module).forward for module in model.modules() if is_own(type(module))]
        self.globals = read_by(f for f in (self.call, *forwards) if hasattr(f, "__code__"))
        self.held = self.constants(model, optimizers)  # as the id of what is gone may be another's
        self.known, self.shapes, self.calls, self.graph = self.facts(self.held), shapes, 0, None

    def finds_gradients(self) -> bool:
        for parameter, was, then in self.found:
            cleared = was is not None and then is not None and then is not was  # by the call itself
            if (parameter.grad is None) if cleared else (parameter.grad is not was):
                return False  # a graph adds to the gradient that it found, or to none
        return True

    def aside(self, *arguments: Any) -> Any:
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):  # lazily created objects must not belong to the default stream
            result = self.call(*arguments)
        here.wait_stream(side)
        return result

    def record(self, model: Any, leaves: Any, form: Any, optimizers: Any) -> None:
        device = self.parameters[0].device
        self.static = [leaf.to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group in groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)  # not a number
        found = [(p, p.grad) for p in self.parameters] if torch.is_grad_enabled() else []
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # a loader may pin memory meanwhile
            self.result = self.call(model, tree_unflatten(self.static, form), *optimizers)
        plain = (torch.Tensor, bool, int, float, str, type(None))
        if other := [leaf for leaf in tree_flatten(self.result)[0] if not isinstance(leaf, plain)]:
            raise TypeError(f"what is recorded returns tensors, in lists and dicts, and no {type(other[0]).__name__}")
        self.found = [(p, was, p.grad) for p, was in found]
        self.gradients = [(p, p.grad) for p, _ in found if p.grad is not None]
        self.rates = [(group, group["lr"]) for group in groups]
        self.graph = graph
