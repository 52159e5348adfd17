"""Steps that draw random numbers: no two implementations draw the same ones, so their distributions are compared.

Each arm runs one batch from one state with many seeds; of every output and gradient some moments are kept. A wrong rate
or scale moves them, a mask that is reused within a tensor changes how much they scatter, and the results of another
batch sum up to something else under signs that belong to each element's place. A mask that neighbours, rows or layers
share shows in how elements scatter together (see `optexp.equivalence.scatter`). What no distribution tells, a mask that
backward draws anew, gradients beside their own loss do (see `optexp.equivalence.gradient_check`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf, isfinite, sqrt
from statistics import fmean, median, variance
from types import MappingProxyType

import torch
from torch import Tensor

from optexp.equivalence import dropout, gradient_check
from optexp.equivalence.gates import structure
from optexp.equivalence.scatter import Elements
from optexp.equivalence.tensor_math import error, identical, rms
from optexp.equivalence.two_samples import location
from optexp.program import Batch, Program, Snapshot, gradients
from optexp.records.verification import Finding, Randomness
from optexp.support import random_state
from optexp.support.reading import read
from optexp.support.tolerances import of_a_zero

GATE = "RANDOMNESS"
SEEDS = 64
RESTORED = 24  # of these begin with restored Python state; the others with what the one before left of it
ALARM = 1e-3  # how often honest arms may differ by luck, over all tests of a comparison together

WIDEST = 4.0  # times the RMS of rounding: hardly an element of it is larger
SIGNED = 4  # sums under signs
ROUNDINGS = 4.0  # of terms that cancel, as κ of G1
PLACES = 2**14  # elements that they are of

Moments = dict[str, list[list[float]]]  # by tensor, for each seed: those below, and the share that may be zero
ZEROS = 2
_MOMENTS = ("mean", "RMS", "share of zeros", *(f"sum {index + 1} under random signs" for index in range(SIGNED)))


@dataclass(frozen=True)
class Throws:
    """One arm's random steps.

    repeat: equal seeds give equal results, but for what rounds at random
    differ: different seeds give different results
    go_on:  so do steps that follow each other without a new seed
    renew:  so do steps with other seeds after a first one whose Python state they keep
    slopes: how far gradients are from those of the loss, by draw; empty where that cannot be told
    rates:  of torch's dropout functions that the step calls, sorted; empty where they follow from random numbers
    shapes: of the results of which elements are kept
    """

    moments: Moments
    repeat: bool
    differ: bool
    go_on: bool
    slopes: Sequence[float] = ()
    rates: Sequence[float] = ()
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    renew: bool = True


def state(device: torch.device) -> list[Tensor]:
    """States of the generators that a step may draw from: the CPU's, and the device's."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def drawn(before: Sequence[Tensor], device: torch.device) -> bool:
    """Whether random numbers were drawn since."""
    return not all(map(torch.equal, before, state(device)))


def throw(
    program: Program,
    batch: Batch,
    start: Snapshot,
    unit: float,
    elements: Elements | None = None,
    more: Callable[[int], bool] = lambda draws: False,
) -> Throws:
    """The same step from the same state, `SEEDS` times. Python state is left as it is after the first ones, so that a
    mask shows that a layer keeps in an attribute, and a few masks of which each step takes one.

    unit:     of rounding: sums may be added up in another order each time
    elements: gets each draw's results
    more:     whether elements of another draw are wanted, after so many
    """

    def once(seed: int | None, attributes: bool = True) -> dict[str, Tensor]:
        start.restore(program, attributes)
        if seed is not None:
            random_state.seed(seed)
        outputs = program.step(program, program.feed.bring(batch))
        found = {f"out/{name}": read(tensor) for name, tensor in outputs.items()}
        return found | (gradients(program) if program.trains else {})

    moments: Moments = {}
    elements = elements or Elements()
    for seed in count():
        if seed >= SEEDS and not more(seed):
            break
        drawn = once(seed, attributes=seed < RESTORED)
        found = {name: tensor for name, tensor in drawn.items() if tensor.is_floating_point() and tensor.numel()}
        elements.add(found)
        if seed >= SEEDS:
            continue
        told = {name: _moments(tensor) for name, tensor in found.items()}
        for name, share in _may_be_zero(found, told, unit).items():
            moments.setdefault(name, []).append([*told[name], share])
    first = {name: tensor.clone() for name, tensor in once(0).items()}
    noise, rounding = _apart(first, once(0)), _rounding(first, unit)
    repeat = not _differ(noise, rounding)
    # What repeats its bits differs by any bit; what rounds at random, by more than that.
    least = rounding if repeat and any(noise.values()) else {}
    go_on, differ = (_differ(_apart(first, once(seed)), least) for seed in (None, 1))
    later = {name: tensor.clone() for name, tensor in once(1, attributes=False).items()}
    renew = _differ(_apart(later, once(2, attributes=False)), least)
    beside = gradient_check.slopes(program, batch, start) if repeat and program.trains else []
    rates = [dropout.rates(partial(once, seed)) for seed in (0, 1)]
    return Throws(
        moments, repeat, differ, go_on, beside, rates[0] if rates[0] == rates[1] else (), elements.shapes, renew
    )


def compare(
    candidate: Throws, baseline: Throws, unit: float, zeros: Mapping[str, float] = MappingProxyType({})
) -> tuple[list[Finding], Randomness]:
    """Findings of RANDOMNESS, and figures of its tests.

    unit: of rounding; moments that do not scatter differ by it, and by what it becomes on the way (some √u of a size).
          Of a gradient whose terms cancel (of the bias of attention's keys, say) rounding beside the others is all
          there is, and how much of that is zero is an implementation's own affair.
    zeros: gradients that are zero in exact arithmetic, with the RMS over elements of Σ|terms|
    """
    findings = []
    for fact, text in _FACTS.items():
        if getattr(baseline, fact) and not getattr(candidate, fact):
            findings.append(Finding("random numbers", GATE, False, (GATE,), used=inf, message=text))
    if len(candidate.rates) == len(baseline.rates) and candidate.rates != baseline.rates:
        findings.append(
            Finding("random numbers", GATE, False, (GATE,), used=inf, message=_other_rates(candidate, baseline))
        )
    off, limit = gradient_check.mismatch(candidate.slopes, baseline.slopes)
    if off > limit:
        message = (
            "gradients are not those of the loss: dropout draws another mask in backward (they are off by"
            f" {off:.2g} of what another draw's would be, and may be by {limit:.2g})"
        )
        findings.append(Finding("random numbers", GATE, False, (GATE,), used=off / limit, message=message))
    findings += _zeros(candidate, baseline, unit, zeros)
    tests: list[tuple[float, str, str]] = []
    sizes = [fmean(seed[1] for seed in seeds) for name, seeds in baseline.moments.items() if name.startswith("grad/")]
    cancelled = unit * max((size for size in sizes if isfinite(size)), default=0.0)
    for name, expected in baseline.moments.items():
        if name in zeros:
            continue
        ours = list(zip(*candidate.moments.get(name, []), strict=True))
        theirs = list(zip(*expected, strict=True))
        fewer = min((arm for arm in (ours, theirs) if arm), key=lambda arm: fmean(arm[ZEROS]))
        unsure = fmean(fewer[-1]) - fmean(fewer[ZEROS])  # what the other has as zeros besides may be rounding here
        for moment, x, y in zip(_MOMENTS, ours, theirs, strict=False):
            floor = max(sqrt(unit) / 4 * fmean(theirs[1]), cancelled * name.startswith("grad/"))
            floor = max(unit, unsure) if moment == "share of zeros" else floor
            what = f"{moment} is {fmean(x):.6g} on average over {len(x)} seeds, and {fmean(y):.6g} in the baseline"
            tests.append((location(x, y, floor), name, what))
            what = f"{moment} scatters by {sqrt(variance(x)):.3g} over {len(x)} seeds, by {sqrt(variance(y)):.3g} there"
            tests.append((location(_from_median(x), _from_median(y), floor), name, what))
    for p, name, what in tests:
        if p * len(tests) < ALARM:
            message = f"its {what} (p = {p:.1g} in each of {len(tests)} tests)"
            findings.append(Finding(name.removeprefix("out/"), GATE, False, (GATE,), used=inf, message=message))
    smallest = min((p for p, _, _ in tests), default=1.0)
    known = isfinite(limit)
    return findings, Randomness(SEEDS, len(tests), smallest, off if known else None, limit if known else None)


def _other_rates(candidate: Throws, baseline: Throws) -> str:
    ours, theirs = Counter(candidate.rates), Counter(baseline.rates)
    said = [
        ", ".join(f"{rate:g}" for rate in sorted((one - other).elements()))
        for one, other in ((ours, theirs), (theirs, ours))
    ]
    return f"dropout has the rate {said[0]} where the baseline's has {said[1]}"


def _zeros(candidate: Throws, baseline: Throws, unit: float, zeros: Mapping[str, float]) -> Iterator[Finding]:
    """Gradients that are zero in exact arithmetic are rounding alone, which no two implementations share: their size
    is measured by the sum of the absolute values of their terms."""
    for name in zeros.keys() & candidate.moments.keys():
        ours, theirs = (fmean(s[1] for s in arm.moments.get(name, [[0.0] * 2])) for arm in (candidate, baseline))
        limit = max(ROUNDINGS * max(unit * zeros[name], theirs), of_a_zero(unit) * zeros[name])
        if not ours <= limit:
            message = f"its RMS is {ours:.3g} where it is zero in exact arithmetic, and rounding explains {limit:.3g}"
            yield Finding(name, GATE, False, (GATE,), used=ours / limit if limit else inf, message=message)


_FACTS: Mapping[str, str] = {
    "repeat": "equal seeds give different results, where the baseline's are equal",
    "differ": "another seed gives the same result: the random numbers are frozen",
    "renew": "later steps give the first one's results: a mask that is kept for all of them",
    "go_on": "steps that follow each other draw the same random numbers: a seed that is set anew, or a frozen graph",
}


def _moments(tensor: Tensor) -> list[float]:
    wide = torch.float64
    values = [
        tensor.mean(dtype=wide),
        torch.linalg.vector_norm(tensor, dtype=wide) / sqrt(tensor.numel()),
        (tensor == 0).sum() / tensor.numel(),
        *_signed(tensor.reshape(-1)[:PLACES].to(wide)),
    ]
    return torch.stack([value.to(wide) for value in values]).tolist()


def _may_be_zero(found: Mapping[str, Tensor], told: Mapping[str, Sequence[float]], unit: float) -> dict[str, float]:
    """By tensor, the share of elements that are zero or, in a gradient, may be nothing but rounding: of the largest
    gradient where its own is no larger, else of its own."""
    sizes = {name: moments[1] for name, moments in told.items() if name.startswith("grad/")}
    cancelled = unit * max((size for size in sizes.values() if isfinite(size)), default=0.0)
    shares = {name: moments[ZEROS] for name, moments in told.items()}
    for name, size in sizes.items():
        rounding = cancelled if size <= WIDEST * cancelled else min(cancelled, unit * size)
        shares[name] = float((found[name].abs() <= WIDEST * rounding).sum() / found[name].numel())
    return shares


def _signed(values: Tensor) -> Tensor:
    """Sums under fixed signs, of the size of one element."""
    generator = torch.Generator(values.device).manual_seed(0)
    signs = torch.randint(2, (SIGNED, values.numel()), generator=generator, device=values.device) * 2.0 - 1.0
    return signs.to(values) @ values / sqrt(values.numel())


def _apart(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, float]:
    """RMS of the difference by tensor: 0 where the bits are equal, infinite where no number tells."""
    found = dict.fromkeys(first.keys() | second.keys(), inf)
    for name in first.keys() & second.keys():
        a, b = first[name], second[name]
        if identical(a, b):
            found[name] = 0.0
        elif a.is_floating_point() and structure(a, b) is None:
            found[name] = error(a, b, scale=0.0).rms
    return found


def _differ(apart: Mapping[str, float], least: Mapping[str, float]) -> bool:
    return any(distance > least.get(name, 0.0) for name, distance in apart.items())


def _rounding(found: Mapping[str, Tensor], unit: float) -> dict[str, float]:
    """Its largest size on the way (see `compare`)."""
    sizes = {name: rms(tensor) for name, tensor in found.items() if tensor.is_floating_point()}
    most = max((size for name, size in sizes.items() if name.startswith("grad/")), default=0.0)
    return {name: max(sqrt(unit) / 4 * size, unit * most * name.startswith("grad/")) for name, size in sizes.items()}


def _from_median(values: Sequence[float]) -> list[float]:
    middle = median(values)
    return [abs(value - middle) for value in values]
