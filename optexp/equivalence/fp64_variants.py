"""Steps in fp64 of a model that is changed a little, for the time of the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from optexp.equivalence.fp64_reference import Fp64Reference
from optexp.equivalence.mutants import leading
from optexp.equivalence.noise import noisy
from optexp.equivalence.observation import Observation
from optexp.errors import NoReference

NO_EPS = 1e-100  # batch norm insists on more than 0


def nearby(fp64: Fp64Reference, index: int, state: Mapping[str, Tensor], seed: int, share: float) -> Observation:
    """The results of a step with noise inside the model; empty where it does not run.

    share: of the usual noise
    """
    try:
        with fp64.aside(), noisy(fp64.program.model, seed, fp64.dtype, share):
            return fp64.step(index, dict(state))
    except NoReference:
        return {}


def without_eps(fp64: Fp64Reference, index: int, state: Mapping[str, Tensor]) -> Observation:
    """The difference that the model's eps makes to each result of a step; of large tensors, to their first rows."""
    modules: list[Any] = [m for m in fp64.program.model.modules() if isinstance(getattr(m, "eps", None), float)]
    if not modules:
        return {}
    golden = {name: leading(tensor).clone() for name, tensor in fp64.step(index, state).items()}
    with fp64.aside(), _eps(fp64, modules, NO_EPS, state):
        mutated = fp64.step(index, dict(state))
    return {
        name: leading(tensor) - golden[name]
        for name, tensor in mutated.items()
        if tensor.is_floating_point() and name in golden
    }


@contextmanager
def _eps(fp64: Fp64Reference, modules: list[Any], eps: float, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Another eps in these modules, in steps from `state`."""
    kept, program = [module.eps for module in modules], fp64.program
    try:
        fp64.load(state)
        fp64.program = replace(program, keeps=None)  # which would put back the eps
        for module in modules:
            module.eps = eps
        yield
    finally:
        fp64.program = program
        for module, before in zip(modules, kept, strict=True):
            module.eps = before
