"""REFERENCE: every tensor of an observation beside its value in fp64, computed from the observed arm's own state.

Outputs, written inputs, gradients and buffers are compared with an fp64 step from the arm's prior state; parameter
changes and optimizer state with an fp64 optimizer step on the arm's *own* gradients. Near zero Adam takes a gradient's
sign: a comparison of updates with the baseline's would reject honest candidates, and hide a learning rate that is 1 %
off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from optexp.equivalence.effects import title
from optexp.equivalence.fp64_reference import before
from optexp.equivalence.fp64_variants import is_smooth
from optexp.equivalence.gates import PRECISION_CAP, Limits
from optexp.equivalence.gradient_terms import note_zeros
from optexp.equivalence.hyperparameters import in_float32
from optexp.equivalence.input_set import InputSet
from optexp.equivalence.loss_scale import skipped
from optexp.equivalence.observation import Observation
from optexp.equivalence.quantities import Quantity, measured, parts
from optexp.equivalence.reassociation import Reassociated
from optexp.equivalence.step_hooks import changing_numbers_alone
from optexp.equivalence.tensor_math import histogram, largest
from optexp.equivalence.trajectory import RATES
from optexp.errors import NoReference
from optexp.program import NotCalled, clear_gradients
from optexp.program.counters import is_counted
from optexp.support.tolerances import SCARCE, SMALL


def quantities(inputs: InputSet, step: int, seen: Observation) -> Iterator[Quantity]:
    """Every tensor of `seen` that fp64 has a value for, with its error, and parts of it that are small or unmasked.

    Raises NoReference where a result's shape depends on the dtype, or the step does not run in float64.
    """
    return measured(_compared(inputs, step, seen))


def error_histogram(inputs: InputSet, seen: Observation, name: str) -> list[float]:
    """Shares of the elements of one quantity by |c−g|/s (see `optexp.equivalence.tensor_math.histogram`).

    seen: observation of the set's current step
    """
    quantity = next(q for q in quantities(inputs, inputs.step, seen) if q.name == name)
    return histogram(quantity.value, quantity.reference, quantity.scale)


def _compared(inputs: InputSet, step: int, seen: Observation) -> Iterator[Quantity]:
    golden, skips = inputs.golden(step, seen), skipped(seen)
    note_zeros(inputs.fp64, step, inputs.fp64.start_of(step, seen), golden)
    for name, reference in golden.items():
        if name in seen and not (name.startswith("grad/") and skips):
            variance = golden.get(name.replace("running_mean", "running_var")) if "running_mean" in name else None
            quantity = _result(inputs, name, seen[name], reference, variance)
            yield from (quantity, *parts(quantity))
    if any(name.startswith("after/") for name in seen):
        yield from updates(inputs, step, seen)


def _result(inputs: InputSet, name: str, value: Tensor, reference: Tensor, variance: Tensor | None) -> Quantity:
    """An output, a written input, a gradient or a buffer.

    variance: of a running mean: the running variance beside it; None for other tensors
    """
    gradient, forward = name.startswith("grad/"), name.startswith(("out/", "input/"))
    small = reference.numel() < SMALL
    cap = PRECISION_CAP if forward and not inputs.arithmetic.keeps_precision and not small else None
    if forward and reference.shape != value.shape:
        if reference.is_floating_point():
            there = f"{title(name)} has the shape {list(reference.shape)} in float64"
            raise NoReference(f"{there}: return one whose shape does not depend on rounding")
        baseline = inputs.baseline.get(name, value)  # the length of a text may depend on rounding or on noise
        reference = baseline if baseline.shape == value.shape else value
    if forward and reference.is_floating_point() and largest(reference) > (most := torch.finfo(value.dtype).max):
        reference = reference.clamp(-most, most)  # as finfo's least number is another one in float64
    terms = inputs.fp64.results.zeros.get(name, 0.0) if gradient else 0.0
    scarce = gradient and reference.numel() < SCARCE
    limits = Limits(inputs.arithmetic.coarser_row(value), gradient, small, scarce, terms > 0, cap=cap)
    return Quantity(name, value, reference, limits, variance, value if small else None, terms)


def updates(
    inputs: InputSet, step: int, seen: Observation, rounded: bool = False, order: int | None = None
) -> Iterator[Quantity]:
    """Parameter changes and optimizer state, beside an fp64 optimizer step on the arm's own gradients and prior state.

    rounded: the fp64 optimizer has its hyperparameters rounded to float32
    order:   number of a reassociated step of it (see `optexp.equivalence.reassociation`)
    """
    smooth = is_smooth(inputs.fp64, step, inputs.fp64.start_of(step, seen))
    _take_optimizer_step(inputs, step, seen, rounded, order)
    yield from _optimizer_state(inputs, step, seen, smooth)
    yield from _learning_rates(inputs, step, seen)


def causes(name: str, seen: Observation) -> dict[str, Tensor] | None:
    """The source of an update, by the name that people know; None of other quantities.

    name: of a quantity;  seen: the observation that it is of
    """
    kind, _, path = name.partition("/")
    if kind not in ("change", "optimizer"):
        return None
    owner, _, key = path.rpartition("/") if kind == "optimizer" else (path, "", "")
    words = {f"before/param/{owner}": "the parameter", f"grad/{owner}": "the gradient"}
    words |= {f"before/optimizer/{owner}/{key}": "its value before the step"} if key else {}
    return {word: seen[tensor] for tensor, word in words.items() if tensor in seen}


def _take_optimizer_step(inputs: InputSet, step: int, seen: Observation, rounded: bool, order: int | None) -> None:
    """Bring the fp64 program to the state after the arm's update."""
    fp64, program, optimizer = inputs.fp64, inputs.fp64.program, inputs.fp64.program.optimizer
    assert optimizer is not None
    counts = {name: value for name, value in before(inputs.baseline).items() if is_counted(name)}
    fp64.load(fp64.initial | counts | before(seen))  # an arm that counts nothing does not count otherwise
    for name, change in fp64.results.update_inputs.earlier.get(step, {}).items():
        program.model.get_parameter(name).detach().add_(change)
    if not program.own_step:
        fp64.rates.set(RATES[step % len(RATES)])
    if skipped(seen):
        return
    clear_gradients(program.model)
    for name, parameter in program.model.named_parameters():
        if (gradient := seen.get(f"grad/{name}")) is not None:
            sparse, wide = fp64.results.update_inputs.sparse[step].get(f"grad/{name}"), gradient.to(parameter)
            parameter.grad = wide if sparse is None else wide.sparse_mask(sparse)
    if program.own_step and not isinstance(optimizer, NotCalled):  # a user's step may change them
        for group, called in zip(optimizer.param_groups, fp64.results.update_inputs.called[step], strict=True):
            group.update(called)
    reassociates = nullcontext() if order is None else Reassociated(order)
    hooks = changing_numbers_alone(optimizer, numbers=not program.own_step)
    with in_float32(optimizer) if rounded else nullcontext(), hooks, reassociates:
        optimizer.step()


def _optimizer_state(inputs: InputSet, step: int, seen: Observation, smooth: bool) -> Iterator[Quantity]:
    """Parameter changes, and everything else in the state of the fp64 program but buffers.

    smooth: changes follow gradients, and are judged as these are
    """
    fp64, own = inputs.fp64, before(seen)
    others = fp64.results.update_inputs.others.get(step, {})
    earlier = fp64.results.update_inputs.earlier.get(step, {})
    for name, reference in fp64.program.state().items():
        if (after := seen.get(f"after/{name}")) is None or name.startswith("buffer/"):
            continue
        stored = _as_stored(inputs, name, after)
        limits, wide = Limits(inputs.arithmetic.row_of(stored.dtype)), after.to(torch.float64)
        reference = reference.detach().to(fp64.device, torch.float64)  # plain optimizers keep `step` on the CPU
        if name.startswith("param/"):  # however small the change is beside the stored value
            start, change = own[name].to(torch.float64), name.replace("param/", "change/", 1)
            start = start + earlier.get(name.removeprefix("param/"), 0.0)
            reference = reference + others.get(name.removeprefix("param/"), 0.0)
            if smooth:
                limits = replace(limits, gradient=True, scarce=wide.numel() < SCARCE)
            yield Quantity(change, wide - start, reference - start, limits, stored=stored)
        else:
            yield Quantity(name, wide, reference.clone(), limits, stored=stored)


def _as_stored(inputs: InputSet, name: str, after: Tensor) -> Tensor:
    """The state in the coarser dtype of candidate and baseline: no candidate is held to a finer one.

    A capturable `step` may be float32 where the baseline's is an integer: both are compared by value, in fp64.
    """
    baseline = inputs.baseline.get(f"after/{name}", after)
    real = baseline.is_floating_point() and after.is_floating_point()
    finer = real and torch.finfo(baseline.dtype).eps < torch.finfo(after.dtype).eps
    stored = after.to(baseline.dtype) if finer else after
    # A Python number is as exact as the arithmetic that it was computed in.
    return stored.to(inputs.fp64.dtype) if stored.dtype is torch.float64 else stored


def _learning_rates(inputs: InputSet, step: int, seen: Observation) -> Iterator[Quantity]:
    """Learning rates that are tensors, one of each parameter group."""
    fp64, program = inputs.fp64, inputs.fp64.program
    assert program.optimizer is not None
    for index, group in enumerate(program.optimizer.param_groups):
        if (rate := seen.get(f"after/optimizer/group{index}/lr")) is not None:
            left = fp64.results.update_inputs.left[step][index] if program.own_step else group["lr"]
            reference = torch.as_tensor(left, dtype=torch.float64, device=fp64.device)
            limits = Limits(inputs.arithmetic.row_of(rate.dtype))
            yield Quantity(f"optimizer/group{index}/lr", rate.to(torch.float64), reference, limits)
