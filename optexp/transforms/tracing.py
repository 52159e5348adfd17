"""A model as a graph of its operations, or the reason why that graph would be another program."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from optexp.equivalence import process_state
from optexp.errors import OtherProgram

MODES = "the modes of torch functions"


class Tracer(fx.Tracer):
    """A tracer that refuses models with settings or state beyond operations, which torch.fx does not record."""

    proxy_buffer_attributes = True  # else operations on buffers alone run once, here, and are missing in the graph

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        assert isinstance(root, nn.Module)
        for path, module in root.named_modules():
            if hooked(module) and (module is root or not self.is_leaf_module(module, path)):
                raise OtherProgram(f"{path or 'the model itself'} has hooks, which a graph would leave out")
        self.around, before = surroundings(), places(root)
        try:
            graph = super().trace(root, concrete_args)
        finally:
            assigned = [name for place in before for name in place.put_back()]
        if assigned:
            raise OtherProgram(f"its forward assigns self.{assigned[0]}, which a graph would do once")
        return graph

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if function := applied():
            raise OtherProgram(f"its forward calls {function}.apply, whose backward a graph would leave out")
        now = surroundings()
        now[MODES] = max(now[MODES], self.around[MODES])  # a mode that handles a call is not on the stack meanwhile
        if changed := [name for name, value in now.items() if value != self.around[name]]:
            raise OtherProgram(f"its forward changes {', '.join(changed)} for a while, which a graph would leave out")
        return super().create_node(*args, **kwargs)


def applied() -> str:
    """The class of the user's autograd function that runs now; empty outside of one."""
    frame, code = sys._getframe(), torch.autograd.Function.apply.__code__
    while frame and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return str(frame.f_locals["cls"].__name__) if frame else ""


def surroundings() -> dict[str, Any]:
    """Global settings that operations may depend on besides their arguments."""
    backend: Any = torch._C
    settings = {
        name: value for name, value in process_state.settings().items() if name != process_state.MODES
    }  # they are counted below
    return settings | {
        "hooks for saved tensors (as checkpointing does)": backend._autograd._top_saved_tensors_default_hooks(True),
        MODES: backend._len_torch_function_stack(),
        "the modes of torch's dispatcher": backend._len_torch_dispatch_stack(),
    }


def hooked(module: nn.Module) -> bool:
    """Whether hooks make a module's call run more than its forward."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)


@dataclass(frozen=True)
class Place:
    """A dictionary or list in which a module keeps something, and what was there before a trace.

    path: of the module, with a dot where it is not the root
    name: of the attribute; empty where keys are names of attributes
    """

    path: str
    held: dict[Any, Any] | list[Any]
    before: dict[Any, Any]
    name: str = ""

    def put_back(self) -> list[str]:
        """Undo assignments; names of attributes."""
        now, before = items(self.held), self.before
        changed = [key for key in {**before, **now} if now.get(key, self) is not before.get(key, self)]
        changed = [key for key in changed if not str(key).startswith("_tensor_constant")]  # which fx adds
        if isinstance(self.held, list):
            self.held[:] = before.values()
            return [self.path + self.name] * bool(changed)
        for key in changed:
            self.held.pop(key, None)
        self.held.update({key: before[key] for key in changed if key in before})
        return [self.path + (self.name or str(key)) for key in changed]


def items(held: dict[Any, Any] | list[Any]) -> dict[Any, Any]:
    return dict(enumerate(held)) if isinstance(held, list) else dict(held)


def places(model: nn.Module) -> list[Place]:
    """Of a model and its submodules: their attributes, and the dictionaries and lists among these."""
    found = []
    for path, module in model.named_modules():
        path = f"{path}." if path else ""
        for held in (vars(module), module._buffers, module._parameters, module._modules):
            found.append(Place(path, held, dict(held)))
        for name, value in vars(module).items():
            if type(value) in (dict, list) and name not in ("_buffers", "_parameters", "_modules"):
                found.append(Place(path, value, items(value), name))
    return found
