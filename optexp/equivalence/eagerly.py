"""Compiled functions run eagerly where a mode looks at operations: Dynamo traces no frame below a mode, and would later
remember which it has left out."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import torch

COMPILING = ("torch._dynamo", "torch.nn.attention.flex_attention")  # which compiles itself


def eagerly() -> AbstractContextManager[object]:
    """A context without compilation; no compiler is imported for it."""
    if not any(name in sys.modules for name in COMPILING):
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
