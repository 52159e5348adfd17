"""Copies of parameters that a user's step makes and keeps, as a target network: they begin with the values of their
source, and a program that takes the one for the other would pass."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from optexp.equivalence.perturbation import is_filled
from optexp.program import Program
from optexp.support.sparse import is_sparse
from optexp.support.wrapped import is_wrapped

SPREAD = 0.5  # standard deviation of a factor's logarithm: a third of the rows get another argmax


@torch.no_grad()
def move_apart(program: Program, initial: Mapping[str, Tensor]) -> list[str]:
    """Move such copies in place, by the same in every process.

    Args:
        program: After its first step.
        initial: Its state before that: a copy has the values of then, or the present ones.

    Returns:
        Names of the sources, one for each copy.
    """
    state = program.step_state
    own = {tensor.data_ptr() for tensor in (*program.model.parameters(), *program.model.buffers())}
    kept = [] if state is None else [t for t in state.kept_tensors() if _is_dense(t)]
    others = {tensor.data_ptr(): tensor.detach() for tensor in kept if tensor.data_ptr() not in own}
    found = list[str]()
    for alias, parameter in program.parameters() if others else ():
        if not (parameter.requires_grad and _is_dense(parameter)) or is_filled(parameter):
            continue
        values = [alias(parameter.detach()), initial.get(f"param/{alias.name}")]
        for copy in others.values():
            if copy.shape == parameter.shape and any(_is_equal(alias(copy), value) for value in values):
                generator = torch.Generator().manual_seed(zlib.crc32(alias.name.encode()))
                noise = torch.randn(alias(copy).shape, generator=generator).to(copy)
                alias(copy).mul_((SPREAD * noise).exp())  # signs stay
                found.append(alias.name)
    return sorted(found)


def _is_dense(tensor: Tensor) -> bool:
    return not (is_sparse(tensor) or is_wrapped(tensor))


def _is_equal(copy: Tensor, value: Tensor | None) -> bool:
    if value is None or copy.dtype != value.dtype or copy.device != value.device:
        return False
    return torch.equal(copy, value)
