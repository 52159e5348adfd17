"""A model as a graph of its operations, or the reason why that graph would be another program."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from optexp.equivalence import process_state
from optexp.errors import OtherProgram

MODES = "the modes of torch functions"


class Tracer(fx.Tracer):
    """A tracer that refuses models with settings or state beyond operations, which torch.fx does not record."""

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        assert isinstance(root, nn.Module)
        for path, module in root.named_modules():
            if hooked(module) and (module is root or not self.is_leaf_module(module, path)):
                raise OtherProgram(f"{path or 'the model itself'} has hooks, which a graph would leave out")
        self.around, before = surroundings(), attributes(root)
        graph = super().trace(root, concrete_args)
        for name, value in attributes(root).items():
            if before.get(name, root) is not value and not name.startswith("._tensor_constant"):  # which fx adds
                raise OtherProgram(f"its forward assigns self{name}, which a graph would do once")
        return graph

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        now = surroundings()
        now[MODES] = max(now[MODES], self.around[MODES])  # a mode that handles a call is not on the stack meanwhile
        if changed := [name for name, value in now.items() if value != self.around[name]]:
            raise OtherProgram(f"its forward changes {', '.join(changed)} for a while, which a graph would leave out")
        return super().create_node(*args, **kwargs)


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


def attributes(model: nn.Module) -> dict[str, Any]:
    """Plain attributes of a model and its submodules."""
    return {
        f".{path}.{name}" if path else f".{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
    }
