"""Code that torch.compile has wrapped, run as Python: beside modes that its compiler does not trace."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import torch


def uncompiled() -> AbstractContextManager[object]:
    """A context in which it runs operator by operator.

    Dynamo would keep that it has skipped a function there, and refuse it later, as of `torch.cond`.
    """
    if "torch._dynamo" not in sys.modules:  # which takes a second to import, and nothing is wrapped
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
