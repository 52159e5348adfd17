"""Integers that the order of equal values decides: top-k and an unstable sort promise none, argmax gives the first.

fp64 has the values: indices that differ from its own are ties where they lead to values that are equal up to rounding.
Other integers, as classes of what was selected, may be any where the order of equal elements moves the baseline's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from optexp.equivalence.input_set import InputSet
from optexp.equivalence.observation import Observation
from optexp.equivalence.quantities import Quantity, source
from optexp.equivalence.quantity_gates import compare
from optexp.errors import NoReference
from optexp.records.verification import Finding

aten = torch.ops.aten
MOST_OPEN = 0.5  # share of integers: of others it shows whether they are right
OPEN = "torch leaves the order of equal elements open, and this order decides most of it: make these elements differ"
ROUNDINGS = 4.0  # of the largest value: values that are so near are equal in the arms
FREE = "{}: indices differ from the baseline's among equal values alone, of which {} promises no order"
BOUND = "; indices differ among equal values alone, of which {} gives the first"


@dataclass(frozen=True)
class Selection:
    """One call that selects elements by their values.

    free: torch promises no order of equal values
    """

    name: str
    free: bool
    values: Tensor
    indices: Tensor
    dim: int

    def led_alike(self, other: Tensor, unit: float = 0.0) -> bool:
        """Whether other indices of the same shape lead to the same values, each element at most once.

        unit: u of the arithmetic in which the values were compared
        """
        if other.numel() != self.indices.numel() or not self.indices.numel():
            return False
        other = other.reshape(self.indices.shape).to(self.indices)
        if bool(((other < 0) | (other >= self.values.shape[self.dim])).any()):
            return False
        here, there = (self.values.gather(self.dim, chosen) for chosen in (self.indices, other))
        ordered = other.sort(self.dim).values
        once = bool((ordered.diff(dim=self.dim) > 0).all())
        allowed = ROUNDINGS * unit * float(self.values.abs().max())
        return once and bool(((here == there) | ((here - there).abs() <= allowed)).all())


class Selections(TorchDispatchMode):
    """Inside, note every selection."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Selection] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        answer, named = func(*args, **kwargs or {}), kwargs or {}
        if (known := KINDS.get(func.overloadpacket)) is not None and args[0].ndim:
            names = [argument.name for argument in func._schema.arguments]
            self._note(func, known, dict(zip(names, args, strict=False)) | named, answer)
        return answer

    def _note(self, func: Any, known: tuple[bool, bool], given: Mapping[str, Any], answer: Any) -> None:
        free, has_dimension = known
        if isinstance(answer, Tensor) and func.overloadpacket in (aten.max, aten.min):
            return  # the values alone, or the larger ones of two tensors
        values, dim = given["self"].detach(), given.get("dim", -1 if has_dimension else None)
        indices = answer if isinstance(answer, Tensor) else answer[1]
        if dim is None:
            values, dim, indices = values.flatten(), 0, indices.reshape(1)
        elif indices.ndim < values.ndim:
            indices = indices.unsqueeze(dim)
        free = free and not given.get("stable")
        name = f"torch.{func.overloadpacket.__name__}"
        self.found.append(Selection(name, free, values.clone(), indices.clone(), dim))


# By operator: whether it promises no order of equal values, and whether it has a dimension by default.
KINDS: dict[Any, tuple[bool, bool]] = {
    aten.topk: (True, True),
    aten.sort: (True, True),
    aten.argsort: (True, True),
    aten.argmax: (False, False),
    aten.argmin: (False, False),
    aten.max: (False, False),
    aten.min: (False, False),
}


def unless_tied(inputs: InputSet, step: int, seen: Observation, quantity: Quantity, failed: Finding) -> Finding:
    """The finding of integers that fail EXACT: a pass where the order of equal values decides them and torch promises
    none, and a word where it promises the first.

    seen: the observation that the integers are from
    """
    made = [one for one in _selections(inputs, step, seen) if _made(one, quantity)]
    if not made:
        return _but_for_open(inputs, quantity, failed)
    tied = [one for one in made if one.led_alike(quantity.value, inputs.arithmetic.row.unit)]
    if not tied:
        return failed
    if all(one.free for one in tied):
        return Finding(failed.tensor, "EXACT", message=FREE.format(failed.tensor, tied[0].name))
    bound = next(one for one in tied if not one.free)
    return replace(failed, message=failed.message + BOUND.format(bound.name))


def _but_for_open(inputs: InputSet, quantity: Quantity, failed: Finding) -> Finding:
    """The finding without integers that another order of equal elements moves in the baseline."""
    baseline = inputs.baseline[source(quantity.name)]
    left_open = inputs.yardsticks.current.left_open(quantity.name, baseline)
    if left_open.shape != quantity.value.shape or not bool(left_open.any()):
        return failed
    value = torch.where(left_open, quantity.reference.to(quantity.value), quantity.value)
    found = compare(inputs, replace(quantity, value=value))
    if found.ok and float(left_open.double().mean()) > MOST_OPEN:
        found = replace(found, error_rms=0.0, unseen=OPEN)
    return replace(found, tied=True)


def _made(selection: Selection, quantity: Quantity) -> bool:
    """Whether fp64's result is what it selects."""
    reference, indices = quantity.reference, selection.indices
    return reference.numel() == indices.numel() and torch.equal(reference.reshape(-1).long(), indices.reshape(-1))


def _selections(inputs: InputSet, step: int, seen: Observation) -> list[Selection]:
    """Those of an fp64 step; none where it does not run."""
    noted = Selections()
    try:
        with inputs.fp64.aside(), noted:
            inputs.fp64.step(step, dict(inputs.fp64.start_of(step, seen)))
    except NoReference:
        return []
    return noted.found
