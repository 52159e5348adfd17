"""Power of the gates: which small wrongs in the baseline's own results they see, and the smallest error that fails.

Gates that a large mutant passes prove nothing about the candidate that passed them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from optexp.equivalence import mutants
from optexp.equivalence.effects import title
from optexp.equivalence.fp64_quantities import quantities
from optexp.equivalence.fp64_variants import without_eps
from optexp.equivalence.gates import structure
from optexp.equivalence.input_set import InputSet
from optexp.equivalence.observation import Observation
from optexp.equivalence.quantities import Quantity, measured, parts
from optexp.equivalence.quantity_gates import compare, follows_zero
from optexp.equivalence.tensor_math import rms
from optexp.errors import NoReference

SUBJECTS = 4  # tensors of a kind that mutants are made of, the largest ones


@dataclass(frozen=True)
class Power:
    """The gates' power on the baseline's last plain run.

    inputs: the set whose gates the candidate passed
    """

    inputs: InputSet

    def tried(self) -> list[mutants.Tried]:
        """Every mutant of every subject, and whether a gate failed.

        Raises NoReference where an optimizer that moves no parameter passes, or a large mutant of any tensor.
        """
        inputs, trials = self.inputs, list[mutants.Tried]()
        start = inputs.fp64.start_of(inputs.step, inputs.baseline)
        moved = without_eps(inputs.fp64, inputs.step, start)
        for quantity in self._subjects():
            subject = self._subject(quantity, moved)
            trials += [self._try(quantity, subject, name, value) for name, value in mutants.of(subject)]
        unmoved = [trial.caught for trial in trials if trial.mutant == mutants.NO_UPDATE]
        if unmoved and not any(unmoved):
            raise NoReference(
                "the gates have no power: an optimizer that moves no parameter passes them, as what it changes is lost"
                " in the parameters' own rounding: keep them in float32, or use a larger learning rate"
            )
        return trials

    def _subjects(self) -> Iterator[Quantity]:
        """The largest real tensors of every kind that has mutants."""
        inputs = self.inputs
        every = (q for q in quantities(inputs, inputs.step, inputs.baseline) if q.value.numel())
        real = [q for q in every if q.value.is_floating_point() and not q.limits.gross]
        real = [q for q in real if not (inputs.is_noise(q) or follows_zero(inputs, q.name))]
        for kind in mutants.MUTANTS:
            of_kind = [q for q in real if q.name.startswith(f"{kind}/")]
            yield from map(_leading, sorted(of_kind, key=lambda q: -q.value.numel())[:SUBJECTS])

    def _subject(self, quantity: Quantity, moved: Observation) -> mutants.Subject:
        """A quantity with everything that its mutants are made of.

        moved: by tensor, the difference that the model's eps makes in fp64
        """
        earlier = self.inputs.yardsticks.earlier.get(quantity.name)
        if earlier is not None:
            earlier = earlier.to(torch.float64) if earlier.shape == quantity.value.shape else None
        return mutants.Subject(
            quantity.name.partition("/")[0],
            quantity.value.to(torch.float64).contiguous(),
            quantity.scale,
            self.inputs.yardstick(quantity),
            quantity.limits.row,
            earlier,
            moved.get(quantity.name),
        )

    def _try(self, quantity: Quantity, subject: mutants.Subject, mutant: str, value: Tensor) -> mutants.Tried:
        """One mutant before the gates that the candidate passed."""
        inputs = self.inputs
        (mutated,) = measured([replace(quantity, value=value)])
        finding = compare(inputs, mutated)
        visible = finding.visible
        for part in measured(parts(mutated)) if finding.ok else ():
            if not inputs.is_noise(part) and not (there := compare(inputs, part)).ok:
                finding = there
        shows = structure(value, subject.value)
        off = rms(value - subject.value)
        if finding.ok and not shows and off > mutants.LARGE * subject.smallest:
            passes = f"the gates have no power: {title(quantity.name)} passes them with the mutant '{mutant}'"
            raise NoReference(f"{passes}: compare at a larger size, or in a wider dtype")
        return mutants.Tried(
            tensor=title(quantity.name),
            mutant=mutant,
            caught=bool(shows) or not finding.ok,
            gate="G0" if shows else finding.gate,
            off=off / quantity.scale if quantity.scale else None,
            visible=visible,
        )


def _leading(quantity: Quantity) -> Quantity:
    """The first rows of a quantity that is too large for mutants of all of it; a part forgets where it lies."""
    if quantity.value.numel() <= mutants.FIRST:
        return quantity
    stored = None if quantity.stored is None else mutants.leading(quantity.stored)
    value, reference = mutants.leading(quantity.value), mutants.leading(quantity.reference)
    return replace(quantity, value=value, reference=reference, stored=stored, spread=None, columns=None, within=())
