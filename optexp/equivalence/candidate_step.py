"""One step of the candidate before the gates: effects first, then every tensor beside fp64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from optexp.equivalence import loss_scale
from optexp.equivalence.buffer_counterparts import with_buffers
from optexp.equivalence.determined import determined
from optexp.equivalence.effects import broken_effects, unlike_memories
from optexp.equivalence.fp64_quantities import causes, quantities, updates
from optexp.equivalence.gates import exact
from optexp.equivalence.input_set import InputSet
from optexp.equivalence.narrow_updates import narrow_updates_allowed
from optexp.equivalence.nature import explained
from optexp.equivalence.near_ties import AT_ONCE, NEAR, TIED, allow_near_ties, hangs_on_gradients
from optexp.equivalence.observation import Observation
from optexp.equivalence.optimizer_counterparts import instead_of, moved_counts, without
from optexp.equivalence.optimizer_rules import unlike_rules, with_rules
from optexp.equivalence.quantities import Quantity, is_exact, source
from optexp.equivalence.quantity_gates import baseline_at, compare, rows_far_off, unseen_for
from optexp.equivalence.rounded_hyperparameters import allow_rounded_hyperparameters
from optexp.equivalence.schedules import unlike_schedules
from optexp.equivalence.tensor_math import alike, identical
from optexp.equivalence.ties import unless_tied
from optexp.equivalence.trajectory import TIMED
from optexp.errors import NoReference
from optexp.records.verification import Element, Finding, broken

OWN = "before/param/"
OUT_OF_SIGHT = (
    "the {} updates parameters and leaves no gradient in p.grad, as with torch.autograd.grad and torch.func: updates"
    " are checked by the gradients that they take; write these to p.grad before the update"
)
NARROW = (
    "the optimizer computes in bfloat16 or float16, and the order of its sums alone moves {} by as much as the two"
    " programs differ: an update that is wrong by less could not be told; let it compute in float32 for the comparison"
)
UNSEEN_STATE = (
    "rounding alone moves {} by more than 2 % of a step's change of it, so that no wrong value could be told from a"
    " right one: take a larger batch, float32, or a better conditioned step"
)
GENERATORS = "generators"
DRAWS_OTHERWISE = (
    "a step of the baseline draws from Python's or numpy's generator, and the candidate's draws other numbers, or none:"
    " no two implementations need agree then; switch that off for the comparison"
)
RESEEDED = "a step draws random numbers or sets their seed, which the baseline's leaves alone"


@dataclass(frozen=True)
class CandidateStep:
    """The candidate's run of the step whose yardsticks are complete.

    seen: its observation, where fp64 runs
    instead: by key of the baseline's optimizer state, what the candidate keeps in its place, with other values
    elsewhere: counts of the baseline's optimizer that the candidate's keeps by another name
    """

    inputs: InputSet
    step: int
    seen: Observation
    instead: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Set[str] = frozenset()

    def findings(self) -> list[Finding]:
        """Findings of all gates; of G0 alone where effects differ.

        Raises NoReference where gradients overflow so that no update can be compared.
        """
        self.inputs.fp64.adopt(self.inputs.baseline)
        state = self.inputs.fp64.program.step_state
        seen, instead = self.inputs.optimizer_names.translated(self.seen, self.inputs.baseline, state)
        start, unit = self.inputs.fp64.start_of(self.step, self.inputs.baseline), self.inputs.arithmetic.row.unit
        elsewhere = moved_counts(self.seen, self.inputs.baseline)
        seen, held = with_buffers(seen, self.inputs.baseline, start, state, unit)
        seen, amiss = self._remembered(seen)
        named = replace(self, seen=seen, instead=instead, elsewhere=elsewhere)
        return [*held, *amiss, *(instead_of(*names) for names in instead.items()), *named._in_baseline_names()]

    def _remembered(self, seen: Observation) -> tuple[Observation, list[Finding]]:
        """The same with the baseline's names of what a step keeps in Python, of a program that was written apart."""
        state, inputs = self.inputs.fp64.program.step_state, self.inputs
        if state is None or not seen["flag/apart"]:
            return seen, []
        spread, unit = inputs.yardsticks.state_spread, inputs.arithmetic.row.unit
        return inputs.step_names.translated(
            seen, inputs.baseline, state, unit, spread, drifted=self.step == TIMED, optimizer=self.seen
        )

    def _in_baseline_names(self) -> list[Finding]:
        """Findings about an observation in which state has the baseline's names."""
        seen, baseline = self.seen, self.inputs.baseline
        skips = loss_scale.skipped(seen)
        if differs := self._skips_differently(skips):
            return [differs]
        if seen["flag/apart"] and _has_gradients(seen) is not _has_gradients(baseline) and _updates(seen):
            raise NoReference(OUT_OF_SIGHT.format("baseline" if _has_gradients(seen) else "second program"))
        ours, theirs = self._repeated(seen), self._repeated(baseline)
        remembered = list(unlike_memories(ours, theirs, self._same_step_state))
        if failures := self._broken_effects(skips):
            return [*failures, *remembered]
        try:
            return [*self._gated(skips), *remembered]
        except NoReference:
            if remembered:
                return remembered
            raise

    def _gated(self, skips: bool) -> list[Finding]:
        """Findings of all tensors and rules, in a step whose effects are the baseline's."""
        inputs, seen, baseline = self.inputs, self.seen, self.inputs.baseline
        attributes = inputs.yardsticks.attributes.compare(
            seen, baseline, inputs.arithmetic.row.unit, drifted=self.step == TIMED
        )
        rules = [
            *unlike_rules(seen, baseline, self.elsewhere),
            *(unlike_schedules(seen, baseline) if seen["flag/apart"] else ()),
        ]
        results = with_rules(self._results(), rules)
        return [*rules, *attributes, *self._remarks(skips), *results, *self._loss_scales()]

    def _skips_differently(self, skips: bool) -> Finding | None:
        """A GradScaler that leaves out the step of one arm alone."""
        expected = loss_scale.skipped(self.inputs.baseline)
        if skips == expected:
            return None
        if expected and self.inputs.is_family:
            raise NoReference("the gradients of plain autocast overflow, so that there is no update to compare with")
        who, other = ("candidate", "plain autocast") if skips else ("plain autocast", "candidate")
        return broken("scaler", f"{who} skips this step because its gradients overflow, {other} does not")

    def _broken_effects(self, skips: bool) -> list[Finding]:
        """G0."""
        inputs = self.inputs
        initial = inputs.fp64.initial if self.step == 0 else None
        baseline = without(inputs.baseline, self.instead)
        ours, theirs = self._repeated(self.seen), self._repeated(baseline)
        theirs["flag/inputs_intact"] = torch.tensor(not inputs.traits.writes_inputs)  # a repeated batch may hide it
        by_value = not inputs.arithmetic.keeps_precision
        return list(broken_effects(ours, theirs, initial, by_value, skips))

    def _repeated(self, arm: Observation) -> dict[str, Tensor]:
        """An observation without state that equal steps of the baseline leave otherwise, as a clock."""
        return {name: t for name, t in arm.items() if name not in self.inputs.traits.unrepeated_state}

    def _same_step_state(self, name: str, ours: bytes, theirs: bytes) -> bool:
        """Whether both arms hold equal Python state, within rounding and the spread of the baseline.

        Raises NoReference where noise moves what differs by so much that nothing wrong would show.
        """
        step_state = self.inputs.fp64.program.step_state
        unit, spread = self.inputs.arithmetic.row.unit, self.inputs.yardsticks.state_spread.get(name, ())
        drifted = self.step == TIMED
        if ours == theirs or step_state is None:
            return ours == theirs
        same = step_state.alike(ours, theirs, unit, spread, drifted)
        if not same and not drifted and step_state.unseen(ours, theirs, unit, spread):
            raise NoReference(UNSEEN_STATE.format(name))
        return same

    def _remarks(self, skips: bool) -> Iterator[Finding]:
        """Findings without a gate, for the notes.

        Raises NoReference where random numbers of the arms differ, or gradients overflow in every step.
        """
        drawn = self.inputs.baseline["flag/host_random"]
        if drawn and self.seen["flag/host_random"] != drawn:
            raise NoReference(DRAWS_OTHERWISE)
        if skips:
            skipped = self.inputs.yardsticks.skipped
            skipped.add(self.step)
            if len(skipped) == len(self.inputs.fp64.batches):
                raise NoReference("gradients overflow in every step, so that no update can be compared: use bfloat16")
            yield Finding("scaler", "SKIPPED", message="a step was skipped in both: its gradients overflow")
        if self.seen["flag/random"]:  # the baseline's step draws none (see `baseline_runs`)
            yield Finding(GENERATORS, bitwise=True, message=RESEEDED)

    def _results(self) -> list[Finding]:
        """Findings of every tensor, after a widening of limits where it may explain failures: by hyperparameters in
        float32 of updates, by near ties of gradients that fail alone."""
        inputs, found, tied = self.inputs, self._measured(), set[str]()
        if _wrong_updates(found):
            exact = {quantity.name: quantity for quantity in updates(inputs, self.step, self.seen)}
            allow_rounded_hyperparameters(inputs, self.step, self.seen, exact)
            found = self._measured()
            if left := _wrong_updates(found):
                with narrow_updates_allowed(inputs, self.step, self.seen, exact):
                    explained_all = all(finding.ok for finding in self._measured())
                if explained_all:
                    raise NoReference(NARROW.format(left[0]))
        for seed in range(0, NEAR, AT_ONCE):
            failures = [finding for finding in found if not finding.ok]
            wrong = {finding.tensor for finding in failures}
            searchable = inputs.arithmetic.keeps_precision and not inputs.traits.finer
            if not wrong or not searchable or not all(hangs_on_gradients(inputs, self.step, f) for f in failures):
                break
            tied |= wrong
            allow_near_ties(inputs, self.step, self.seen, range(seed, seed + AT_ONCE))
            found = self._measured()
        return [replace(f, message=f.message or TIED) if f.tensor in tied else f for f in found]

    def _measured(self) -> list[Finding]:
        """Findings of every tensor that fp64 has a value for."""
        inputs, findings, beside = self.inputs, list[Finding](), list[tuple[Element, Tensor]]()
        equal = alike(self.seen, inputs.baseline)
        for quantity in chain.from_iterable(map(inputs.yardsticks.spared, quantities(inputs, self.step, self.seen))):
            if self.instead and self.step > 0 and quantity.name.startswith(("change/", "optimizer/")):
                continue  # float64's optimizer lacks the state that this update used
            if inputs.is_noise(quantity):
                continue
            finding = self._finding(quantity, equal)
            if quantity.limits.gross and not finding.ok:
                if (rest := determined(inputs, self.step, self.seen, quantity)) is None:
                    continue
                quantity, finding = rest, self._finding(rest, equal)
            element = finding.element
            index = tuple(element.index) if element else ()
            if element and (value := baseline_at(inputs, quantity, index)) is not None:
                beside.append((element, value))
            findings.append(finding)
        values = torch.stack([value for _, value in beside]).tolist() if beside else []  # one wait for all
        for (element, _), number in zip(beside, values, strict=True):
            element.baseline = number
        return findings

    def _finding(self, quantity: Quantity, equal: set[str]) -> Finding:
        """The finding of one quantity, with everything that people read of it.

        equal: names of tensors whose bits are the baseline's
        """
        inputs = self.inputs
        finding = compare(inputs, quantity)
        if not finding.ok and is_exact(quantity.value):
            finding = unless_tied(inputs, self.step, self.seen, quantity, finding)
        finding = finding if finding.ok else explained(finding, quantity, causes(quantity.name, self.seen))
        finding = replace(finding, bitwise=source(quantity.name) in equal, far_off=rows_far_off(inputs, quantity))
        unseen, parted = unseen_for(inputs, quantity, finding)
        return replace(finding, unseen=finding.unseen or unseen, parted=parted)

    def _loss_scales(self) -> Iterator[Finding]:
        """EXACT on the state of a GradScaler."""
        for name in self.seen:
            if name.startswith("after/scaler/"):
                ours, theirs = (loss_scale.change(arm, name) for arm in (self.seen, self.inputs.baseline))
                yield exact(name.removeprefix("after/"), ours, theirs, None)


def _has_gradients(seen: Observation) -> bool:
    return any(name.startswith("grad/") for name in seen)


def _wrong_updates(findings: Iterable[Finding]) -> list[str]:
    """Names of changes and optimizer state that fail."""
    return [f.tensor for f in findings if not f.ok and f.tensor.startswith(("change/", "optimizer/"))]


def _updates(seen: Observation) -> bool:
    """Whether the step changes a parameter."""
    pairs = [
        (tensor, seen.get(before.replace("before/", "after/", 1)))
        for before, tensor in seen.items()
        if before.startswith(OWN)
    ]
    return any(after is not None and not identical(tensor, after) for tensor, after in pairs)
