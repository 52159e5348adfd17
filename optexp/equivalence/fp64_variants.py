"""Steps in fp64 of a model that is changed a little, for the time of the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from optexp.equivalence.fp64_reference import Fp64Reference
from optexp.equivalence.mutants import leading
from optexp.equivalence.noise import amplitude, move_values, noisy, unhooked
from optexp.equivalence.observation import Observation
from optexp.equivalence.tensor_math import largest, name_of
from optexp.errors import NoReference
from optexp.program import NotCalled, map_batch
from optexp.support.sparse import is_sparse

COARSE = 256.0  # times the usual noise: a thousandth of a value, at which an update that can jump does so
JUMP = 0.5  # of the largest change of a parameter
ROUNDED = 1e-9  # of the largest change of any parameter: a smaller one may be nothing but rounding
NO_EPS = 1e-100  # batch norm insists on more than 0


def nearby(fp64: Fp64Reference, index: int, state: Mapping[str, Tensor], seed: int, share: float) -> Observation:
    """The results of a step with noise inside the model, and changes of parameters that are no known optimizer's
    (change/<name>); empty where it does not run.

    share: of the usual noise
    """
    try:
        with fp64.aside(), noisy(fp64.program.model, seed, fp64.dtype, share):
            found = fp64.step(index, dict(state) | _disturbed(fp64, state, seed, share))
            return found | other_changes(fp64, index)
    except NoReference:
        return {}


def other_changes(fp64: Fp64Reference, index: int) -> Observation:
    """Of the last step with this index: change/<name> of parameters that no known optimizer made."""
    return {f"change/{name}": change for name, change in fp64.results.update_inputs.others.get(index, {}).items()}


def _disturbed(fp64: Fp64Reference, state: Mapping[str, Tensor], seed: int, share: float) -> Observation:
    """Parameters that begin with noise, as no hook covers their use."""
    generator, far = torch.Generator(fp64.device).manual_seed(seed), amplitude(name_of(fp64.dtype), share)
    moved = dict[str, Tensor]()
    for name in map("param/{}".format, unhooked(fp64.program.model)):
        if (value := state.get(name)) is not None and value.is_floating_point() and not is_sparse(value):
            moved[name] = value.detach().to(fp64.device, torch.float64, copy=True)
            move_values(moved[name], far, generator)
    return moved


def with_rounded_inputs(fp64: Fp64Reference, index: int, state: Mapping[str, Tensor], unit: float) -> Observation:
    """The results of a step whose real inputs and parameters are off by one rounding; empty where it does not run."""
    generator = torch.Generator(fp64.device).manual_seed(index)

    def off(value: Tensor) -> Tensor:
        if not value.is_floating_point() or is_sparse(value) or value.is_nested:
            return value
        signs = torch.randint(0, 2, value.shape, generator=generator, device=fp64.device).mul_(2).sub_(1)
        wide = value.detach().to(fp64.device, fp64.dtype)
        return wide.addcmul(wide, signs.to(wide), value=unit)

    batch = map_batch(off, fp64.batches[index % len(fp64.batches)])
    start = {name: off(value) if name.startswith("param/") else value for name, value in state.items()}
    try:
        with fp64.aside():
            return fp64.step_on(batch, index, start)
    except NoReference:
        return {}


def is_smooth(fp64: Fp64Reference, index: int, state: Mapping[str, Tensor]) -> bool:
    """Whether the step updates parameters by hand, and moves them by little more where gradients move by a little.

    `p -= lr * p.grad` does; an update that takes a gradient's sign, as Adam's near zero, jumps.

    index: of a step that was computed from `state` last
    """
    optimizer, usual = fp64.program.optimizer, fp64.results.update_inputs.others.get(index, {})
    if not (isinstance(optimizer, NotCalled) and optimizer.by_hand and usual):
        return False
    if fp64.results.smooth is None:
        fp64.results.smooth = not any(_jumps(fp64, index, state, usual))
    return fp64.results.smooth


def _jumps(fp64: Fp64Reference, index: int, state: Mapping[str, Tensor], usual: Mapping[str, Tensor]) -> Iterator[bool]:
    """Of each parameter, whether coarse noise turns a part of its change around."""
    try:
        with fp64.aside(), noisy(fp64.program.model, 1, fp64.dtype, COARSE):
            fp64.step(index, dict(state))
            moved = fp64.results.update_inputs.others[index]
    except NoReference:
        moved = {}
    sizes = {name: largest(change) for name, change in usual.items()}
    for name in (name for name, size in sizes.items() if size > ROUNDED * max(sizes.values())):
        yield name not in moved or largest(moved[name] - usual[name]) > JUMP * sizes[name]


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
