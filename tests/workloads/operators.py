"""Which operators a step calls: what tells two ways to write the same numbers apart."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from optexp.program import Program


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operators(program: Program) -> Counter[str]:
    """How often one step calls which operator of ATen."""
    with _Seen() as seen:
        program.run()
    return seen.count
