"""Code that torch.compile has wrapped, run as Python: beside modes that its compiler does not trace."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import torch

COMPILING = ("torch._dynamo", "torch.nn.attention.flex_attention")  # the latter compiles itself


def uncompiled() -> AbstractContextManager[object]:
    """A context in which it runs operator by operator.

    Dynamo would keep that it has skipped a function there, and refuse it later, as of `torch.cond`.
    """
    if not any(name in sys.modules for name in COMPILING):
        return nullcontext()  # to import Dynamo takes a second
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
