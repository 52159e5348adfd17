"""ARM: ranges in a trace around each module's forward call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from optexp.support.hooks import takes_hooks
from optexp.trace import MODULE


def markable(model: nn.Module) -> bool:
    """Whether hooks reach the calls: a scripted module takes no hooks, and hooks make a compiled model compile anew.

    Code that dynamo compiled anywhere in this process counts as compiled.
    """
    if torch._dynamo.utils.counters["frames"]:
        return False
    return not any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())


@contextmanager
def marked(model: nn.Module) -> Iterator[None]:
    """Inside, each forward call of a module is a range "optexp.module:<path>|<class>".

    A call that raises leaves its range open; it is closed with the call around it.
    """
    open_ranges: list[tuple[nn.Module, Any]] = []

    def before(module: nn.Module, label: str) -> None:
        mark = record_function(label)
        mark.__enter__()
        open_ranges.append((module, mark))

    def after(module: nn.Module) -> None:
        while open_ranges:
            opened, mark = open_ranges.pop()
            mark.__exit__(None, None, None)
            if opened is module:
                return

    handles = []
    for path, module in model.named_modules():
        if not takes_hooks(module):
            continue
        label = f"{MODULE}{path}|{type(module).__name__}"
        handles.append(
            module.register_forward_pre_hook(lambda module, _, label=label: before(module, label), prepend=True)
        )
        handles.append(module.register_forward_hook(lambda module, *_: after(module)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        while open_ranges:
            open_ranges.pop()[1].__exit__(None, None, None)
