"""Runs of the baseline become yardsticks: its own distance from fp64 is the measure of the candidate's."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from math import inf

import torch

from optexp.equivalence.doubtful_elements import most_elements
from optexp.equivalence.effects import optional, title
from optexp.equivalence.fp64_quantities import quantities
from optexp.equivalence.fp64_variants import is_smooth
from optexp.equivalence.gates import Yardstick
from optexp.equivalence.input_families import nonfinite
from optexp.equivalence.input_set import InputSet
from optexp.equivalence.loss_scale import skipped
from optexp.equivalence.noise import RUNS
from optexp.equivalence.observation import Observation, unpacked
from optexp.equivalence.other_changes import SHARES, allowed
from optexp.equivalence.quantities import Quantity, is_exact, source
from optexp.equivalence.rounded_hyperparameters import allow_rounded_hyperparameters
from optexp.equivalence.tensor_math import errors, finite, identical
from optexp.errors import NoReference

MEND = "mend the program first (the learning rate, clipping, an eps in log, sqrt or a division)"
SEEDED = ", or define train_step(model, batch, optimizer) for mode=train: they are seeded before each call of it"
RESULTS = ("out/", "input/", "grad/", "buffer/", "param/")  # compared with an fp64 step; other tensors with an update


@dataclass(frozen=True)
class BaselineObservation:
    """One run of the baseline, and how it was perturbed.

    noisy:        noise was added inside the model
    reassociated: sums were taken in another order
    ties:         equal elements were selected in another order
    """

    step: int
    seen: Observation
    noisy: bool
    reassociated: bool
    ties: bool

    @classmethod
    def of(cls, step: int, seen: Observation) -> BaselineObservation:
        reassociated, ties = (int(seen[f"flag/{name}"]) > 0 for name in ("reassociated", "ties"))
        return cls(step, seen, bool(seen["flag/noisy"]), reassociated, ties)

    @property
    def perturbed(self) -> bool:
        return self.noisy or self.reassociated


def add_baseline_run(inputs: InputSet, step: int, seen: Observation) -> None:
    """Add one run of the baseline to the yardsticks of its step.

    seen: where fp64 runs
    Raises NoReference where the run is no measure: it draws random numbers, its results are NaN, or fp64 has no value
    for one of them.
    """
    run = BaselineObservation.of(step, seen)
    _note_step(inputs, run)
    if int(seen["flag/reassociated"]) == 0:
        return  # nothing could be taken in another order
    _note_results(inputs, run)
    yardsticks = inputs.yardsticks
    yardsticks.noisy_runs += run.noisy
    inputs.traits.finer |= run.noisy and float(seen["flag/finest"]) < inputs.arithmetic.eps
    if not run.noisy or yardsticks.noisy_runs <= RUNS:  # further ones are for integers, and would widen other limits
        _measure(inputs, run)


def _note_step(inputs: InputSet, run: BaselineObservation) -> None:
    """State and side effects of the step, before any result."""
    seen, fp64 = run.seen, inputs.fp64
    if seen["flag/random"]:
        place = fp64.draws_at()
        named, seeded = place and f" ({place})", SEEDED if fp64.trains and not fp64.program.own_step else ""
        raise NoReference(
            f"a step draws random numbers even with every dropout at p = 0{named}, so no two implementations need"
            f" agree: switch that off for the comparison{seeded}"
        )
    fp64.adopt(seen)
    inputs.yardsticks.attributes.meet(run.step, seen)
    fp64.follow(name for name in seen if name.startswith("param/"))
    inputs.traits.writes_inputs |= not seen["flag/inputs_intact"]


def _note_results(inputs: InputSet, run: BaselineObservation) -> None:
    """How far the results repeat, and are numbers."""
    yardsticks, seen = inputs.yardsticks, run.seen
    _require_finite(inputs, seen)
    _compare_python_state(inputs, run)
    inputs.traits.coarsest = max(inputs.traits.coarsest, float(seen["flag/coarsest"]))
    if not run.perturbed:
        _compare_integers(inputs, run)
        yardsticks.follow(run.step, seen)
    elif run.step == inputs.step:
        _measure_spread(inputs, seen)
    integers = (name for name in seen if run.perturbed and name.startswith("out/") and is_exact(seen[name]))
    for name in integers:
        yardsticks.steps[run.step].move(name, seen[name], run.ties)


def _measure(inputs: InputSet, run: BaselineObservation) -> None:
    """The distance of every result from fp64. Noisy and reassociated runs of any step count for all steps."""
    step, seen, here = run.step, run.seen, inputs.yardsticks.steps[run.step]
    into = inputs.yardsticks.noise if run.noisy else here.plain
    into = inputs.yardsticks.reassociated if run.reassociated else into
    unjudged = {name for name in seen if name.startswith((*RESULTS, "after/"))}
    unjudged = {name for name in unjudged if not name.startswith("after/scaler/") and not optional(name)}
    first = not (here.has_rounded or run.perturbed) and any(name.startswith("after/") for name in seen)
    exact, others = dict[str, Quantity](), inputs.fp64.results.update_inputs.others
    for quantity in quantities(inputs, step, seen):
        if first and not quantity.name.startswith(RESULTS):
            exact[quantity.name] = quantity
        change = quantity.name.startswith("change/")
        other = change and quantity.name.removeprefix("change/") in others.get(step, {})
        if other:
            inputs.yardsticks.doubt(quantity)
        lottery = run.reassociated and _products_in_updates(inputs, seen)
        if other or lottery or not (change and run.perturbed):  # torch's update has an error of its own
            whole, *most = inputs.yardsticks.spared(quantity)
            for part in (whole if run.perturbed else quantity, *most):
                into[part.name] = into.get(part.name, Yardstick()) | Yardstick.of(part.found)
        unjudged.discard(source(quantity.name))
        if not run.perturbed:
            _require_numbers(inputs, quantity)
    if first:
        allow_rounded_hyperparameters(inputs, step, seen, exact)
        smooth = is_smooth(inputs.fp64, step, inputs.fp64.start_of(step, seen))
        for name in others.get(step, {}) if not smooth else ():
            updated, causes = exact[f"change/{name}"], (seen.get(f"grad/{name}"), seen.get(f"before/param/{name}"))
            here.allow_share(updated, *allowed(updated.reference, *causes))
            for part in most_elements(updated):
                here.allow_share(part, *SHARES)
        here.has_rounded = True  # further runs of the step would add their scatter, and nothing else
    if unjudged and not skipped(seen):
        raise NoReference(f"float64 gives nothing to compare {', '.join(sorted(unjudged))} with")


def _products_in_updates(inputs: InputSet, seen: Observation) -> bool:
    """Whether the optimizer's update may hold products and factorizations, as a user's class may: the error of a single
    run is then no yardstick.

    False where the step computes in a narrower dtype than its own: see `optexp.equivalence.narrow_updates`.
    """
    return inputs.fp64.program.own_optimizer and float(seen["flag/coarsest"]) <= inputs.arithmetic.eps


def _measure_spread(inputs: InputSet, seen: Observation) -> None:
    """The RMS by which another order, rounding or noise moves each tensor of the same step."""
    baseline, spread = inputs.baseline, inputs.yardsticks.spread
    names = [name for name in seen if name in baseline and name.startswith(("out/", "grad/", "buffer/", "param/"))]
    names = [n for n in names if seen[n].is_floating_point() and seen[n].shape == baseline[n].shape]
    found = errors([(seen[n].to(torch.float64), baseline[n].to(torch.float64), 0.0) for n in names])
    for name, error in zip(names, found, strict=True):
        spread[name] = max(spread.get(name, 0.0), error.rms)


def _compare_integers(inputs: InputSet, run: BaselineObservation) -> None:
    """Integers that differ between runs of a step, as a count of all calls so far, have no value to be equal to."""
    first_run = inputs.yardsticks.steps[run.step].integers
    for name, tensor in run.seen.items():
        if name.startswith("out/") and is_exact(tensor):
            first = first_run.setdefault(name, tensor.clone())
            if not identical(first.to(tensor.device), tensor):
                inputs.traits.unrepeated_integers.add(name)


def _compare_python_state(inputs: InputSet, run: BaselineObservation) -> None:
    """Python state of a user's step that differs between runs, as a time, has no value to be equal to."""
    if (step_state := inputs.fp64.program.step_state) is None:
        return
    first_run, spread = inputs.yardsticks.steps[run.step].python_state, inputs.yardsticks.state_spread
    unit = inputs.arithmetic.row.unit
    for name, packed in unpacked("remembers", run.seen).items():
        first, perturbed = first_run.setdefault(name, (packed, run.perturbed))
        if run.perturbed and not step_state.same_start(packed, first):
            continue  # a late step's yardsticks are runs of a first step, where counts are others
        apart = step_state.apart(packed, first)
        if inf in apart or not (run.perturbed or perturbed or step_state.alike(packed, first, unit)):
            inputs.traits.unrepeated_state.add(f"remembers/{name}")
        spread[name] = list(map(max, zip_longest(apart, spread.get(name, ()), fillvalue=0.0)))
        if perturbed and not run.perturbed:
            first_run[name] = packed, run.perturbed


def add_drift(inputs: InputSet, seen: Observation) -> None:
    """Let what a step keeps in Python differ by as much as noise of earlier steps moves it in the baseline."""
    step_state, spread = inputs.fp64.program.step_state, inputs.yardsticks.state_spread
    theirs = unpacked("remembers", inputs.baseline)
    for name, packed in unpacked("remembers", seen).items():
        if step_state is not None and name in theirs:
            by = step_state.drift(packed, theirs[name])
            spread[name] = list(map(max, zip_longest(by, spread.get(name, ()), fillvalue=0.0)))


def _require_finite(inputs: InputSet, seen: Observation) -> None:
    """A baseline that overflows on a special family alone defines no result there."""
    scaled = () if inputs.arithmetic.keeps_precision or skipped(seen) else ("grad/",)
    results = {name: t for name, t in seen.items() if name.startswith(("out/", *scaled))}
    found, usual = results.keys() - finite(results), inputs.traits.nonfinite
    if not inputs.is_family:
        usual.update(found)
    elif inputs.fp64.family != nonfinite.__name__ and (lost := found - usual):
        raise NoReference(f"the baseline gives NaN or Inf in {', '.join(sorted(map(title, lost)))}")


def _require_numbers(inputs: InputSet, quantity: Quantity) -> None:
    """A baseline that is mostly NaN or Inf hides wrong results: one NaN equals any other. On a special family gradients
    that overflow in float32 alone define no result: another formula may keep its numbers.

    At lower precision plain autocast may overflow where fp64 has numbers; NaN that fp64 has, too, hide as much.
    """
    if not quantity.found.lost:
        return
    value, reference = quantity.value, quantity.reference
    if inputs.is_family:
        overflows = inputs.arithmetic.keeps_precision and quantity.name.startswith("grad/")
        if overflows and bool((~value.isfinite() & reference.isfinite()).any()):
            raise NoReference(f"the baseline gives NaN or Inf in {title(quantity.name)}, where float64 has numbers")
        return
    own = int((value.isnan() & ~reference.isfinite()).sum())
    nan, overflown = int(value.isnan().sum()), int((value.isinf() & reference.isfinite()).sum())
    lost = nan + overflown if inputs.arithmetic.keeps_precision else own
    if 2 * lost <= value.numel():
        return
    both = bool(nan and overflown and inputs.arithmetic.keeps_precision)
    what = [f"are NaN{f' ({nan})' * both}"] * bool(nan)
    what += [f"overflow{f' ({overflown})' * both} where fp64 has numbers"] * bool(overflown and lost > own)
    mend = f", and in float64, too: {MEND}" if own == lost else ""
    raise NoReference(
        f"{lost} of {value.numel()} elements of the baseline's own {title(quantity.name)} {' and '.join(what)},"
        f" so that a wrong result could not be told from a right one{mend}"
    )
