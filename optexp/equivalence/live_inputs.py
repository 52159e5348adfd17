"""Inputs that the results of a workload depend on: a candidate that ignores any other passes for a right one."""

from __future__ import annotations

from optexp.equivalence import input_families
from optexp.equivalence.checksums import compact
from optexp.equivalence.fp64_reference import Fp64Reference
from optexp.equivalence.input_source import same_bits
from optexp.equivalence.observation import Observation
from optexp.equivalence.tensor_math import alike
from optexp.errors import NoReference
from optexp.program import Batch, tensors_of

NO_GRADIENT = "a step computes no gradient, and no result depends on its inputs: let it call backward() on its loss"
LATER = 2  # steps in which what an earlier one remembers has to show: as many are compared after a first one


def dead_inputs(fp64: Fp64Reference) -> list[str]:
    """After a draw of ONE_BY_ONE: names of inputs that the results do not depend on.

    Raises NoReference where every draw is the same, or no varied input matters.
    """
    first, *others = fp64.batches  # one for each group, and one that is half new
    fits = all(input_families.fitting(first, other) for other in others)
    groups = input_families.together(first) if fits else [list(tensors_of(first))]
    lives, start = {}, compact(fp64.step(0, fp64.initial))
    for index, (names, other) in enumerate(zip(groups, others, strict=False), start=1):
        lives.update(dict.fromkeys(names, _differs(start, fp64.step(index, fp64.initial))))
        for name in names if fits and len(names) > 1 else ():
            with fp64.unremembered():
                swapped = fp64.step_on(input_families.swapped(first, other, [name]), 0, dict(fp64.initial))
            lives[name] = _differs(start, swapped)
            del swapped
    fp64.results.forget_large()
    if all(same_bits(tensors_of(first), tensors_of(other)) for other in others):
        raise NoReference(
            "inputs hold the same values whatever the seed, so that a result that ignores them passes for a right"
            " one: let what makes them draw random numbers, as torch.randn does"
        )
    constant = fp64.source.constant(fp64.drawn)
    if not any(lives.values()) and fp64.program.own_step:
        later = _later(fp64, first, first)
        for names, other in zip(groups, others, strict=False):
            lives.update(dict.fromkeys(names, _differs(later, _later(fp64, other, first))))
    if not any(lives.values()):
        if fp64.program.optimizer is not None and not any(name.startswith("grad/") for name in start):
            raise NoReference(NO_GRADIENT)
        still = f" (the same in every draw: input {', '.join(constant)})" if constant else ""
        raise NoReference(
            f"the result depends on no input that was varied{still}, so that a wrong one could not be told from a"
            " right one: draw those that matter at random"
        )
    return [name for name in tensors_of(first) if not lives[name] and name not in constant]


def _later(fp64: Fp64Reference, before: Batch, then: Batch) -> Observation:
    """Results of `LATER` steps on one batch after a step on another, which a replay memory may have kept."""
    found: Observation = {}
    with fp64.unremembered():
        fp64.step_on(before, 0, dict(fp64.initial))
        for step in range(LATER):
            results = fp64.step_on(then, 0, None)
            results = {name: t for name, t in results.items() if not name.startswith(("buffer/", "param/"))}
            found |= {f"{name} in step {step}": tensor for name, tensor in results.items()}
    return compact(found)


def _differs(first: Observation, golden: Observation) -> bool:
    """Whether results, without state, are others than those of the first batch."""
    results = [name for name in first if not name.startswith(("buffer/", "param/"))]
    return not alike(first, compact(golden)).issuperset(results)
