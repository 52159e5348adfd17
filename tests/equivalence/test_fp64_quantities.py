"""Every tensor of an observation has its value in fp64, from the state of the arm that observed it."""

from __future__ import annotations

import pytest
import torch

from optexp.equivalence.fp64_quantities import error_histogram, quantities, updates
from optexp.equivalence.gradient_terms import all_terms
from optexp.equivalence.judge import Judge
from optexp.equivalence.observation import Observation, observe
from optexp.errors import NoReference
from optexp.strategy import REASSOCIATES
from tests.equivalence.conftest import CPU


def trained(net: type, mode: str = "train") -> tuple[Judge, Observation]:
    judge = Judge(net(mode=mode), CPU, torch.float32, 7, REASSOCIATES)
    judge.draw(0, 1)
    seen = observe(net(mode=mode).build(CPU, torch.float32, 7), judge.batches[0])
    judge.yardstick(0, seen)
    return judge, seen


def test_results_and_updates_are_compared(net: type) -> None:
    judge, seen = trained(net)
    kinds = {quantity.name.partition("/")[0] for quantity in quantities(judge.inputs, 0, seen)}
    assert kinds == {"out", "grad", "buffer", "change", "optimizer"}


def test_an_update_is_beside_fp64s_on_the_arms_own_gradients(net: type) -> None:
    judge, seen = trained(net)
    found = {q.name: q for q in updates(judge.inputs, 0, seen)}
    turned = seen | {name: -tensor for name, tensor in seen.items() if name.startswith("grad/")}
    other = {q.name: q for q in updates(judge.inputs, 0, turned)}
    name = next(name for name in found if name.startswith("change/"))
    assert found[name].value.equal(other[name].value)
    assert not torch.allclose(found[name].reference, other[name].reference)


def test_a_forward_pass_has_no_update(net: type) -> None:
    judge, seen = trained(net, "forward")
    assert not any(q.name.startswith(("change/", "grad/")) for q in quantities(judge.inputs, 0, seen))


def test_a_shape_that_depends_on_rounding_leaves_equivalence_undecided(net: type) -> None:
    judge, seen = trained(net, "forward")
    with pytest.raises(NoReference, match=r"output has the shape \[8, 10\] in float64"):
        list(quantities(judge.inputs, 0, seen | {"out/output": torch.zeros(9, 10)}))


def test_the_histogram_has_every_element(net: type) -> None:
    judge, seen = trained(net, "forward")
    assert sum(error_histogram(judge.inputs, seen, "out/output")) == pytest.approx(1)


def test_what_is_computed_aside_leaves_the_references_of_an_update_alone(net: type) -> None:
    """Large models are compared in groups: terms of a gradient may be asked for after the optimizer's step in fp64."""
    judge, seen = trained(net)
    expected = {q.name: q.reference.clone() for q in updates(judge.inputs, 0, seen)}
    beside = updates(judge.inputs, 0, seen | {name: 2 * tensor for name, tensor in seen.items() if "grad/" in name})
    first = next(beside)
    judge.inputs.fp64.results.terms = None
    assert all_terms(judge.inputs.fp64)
    found = {q.name: q.reference.clone() for q in (first, *beside)}
    doubled = {name: 2 * tensor for name, tensor in expected.items() if name.endswith("/exp_avg")}
    assert doubled
    assert all(torch.allclose(found[name], tensor) for name, tensor in doubled.items())
