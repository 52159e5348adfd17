"""One step of the candidate: effects come before tensors, and skipped steps before both."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optexp.equivalence.candidate_step import GENERATORS, RESEEDED, CandidateStep
from optexp.equivalence.judge import Judge
from optexp.equivalence.observation import Observation, observe
from optexp.equivalence.trajectory import TIMED
from optexp.errors import NoReference
from optexp.strategy import REASSOCIATES
from tests.equivalence.conftest import CPU

INF = torch.tensor(torch.inf)
SCALER = {"before/scaler/scale": torch.tensor(8.0), "after/scaler/scale": torch.tensor(8.0)}


def measured(net: type, mode: str = "forward", scaled: bool = False) -> tuple[Judge, Observation]:
    """A judge that knows the yardstick of its first step, and the baseline's observation of it."""
    judge = Judge(net(mode=mode), CPU, torch.float32, 7, REASSOCIATES)
    judge.draw(0, 1)
    seen = observe(net(mode=mode).build(CPU, torch.float32, 7), judge.batches[0]) | (SCALER if scaled else {})
    judge.yardstick(0, seen)
    return judge, seen


def test_a_wrong_effect_leaves_no_tensor_to_measure(net: type) -> None:
    judge, seen = measured(net)
    wrong = seen | {"flag/plain": torch.tensor(0), "out/output": 2 * seen["out/output"]}
    assert [(finding.tensor, finding.gate) for finding in judge.judge(0, wrong)] == [("outputs", "G0")]


def test_the_worst_element_has_the_baselines_value_beside_it(net: type) -> None:
    judge, seen = measured(net)
    output = seen["out/output"].clone()
    output[1, 2] += 1.0
    finding = next(f for f in judge.judge(0, seen | {"out/output": output}) if f.tensor == "output")
    assert not finding.ok
    assert (finding.element.index, finding.element.baseline) == ([1, 2], seen["out/output"][1, 2].item())


def test_equal_bits_are_said_by_tensor(net: type) -> None:
    judge, seen = measured(net)
    changed = seen["out/output"].clone()
    changed[0, 0] = torch.nextafter(changed[0, 0], INF)
    found = {f.tensor: f.bitwise for f in judge.judge(0, seen | {"out/output": changed})}
    assert found.pop("output") is False
    assert all(found.values())


def test_a_seed_that_is_set_anew_is_a_remark(net: type) -> None:
    judge, seen = measured(net)
    remark = next(f for f in judge.judge(0, seen | {"flag/random": torch.tensor(1)}) if f.tensor == GENERATORS)
    assert (remark.ok, remark.message) == (True, RESEEDED)


def test_a_step_that_one_arm_skips_alone_fails(net: type) -> None:
    judge, seen = measured(net, "train", scaled=True)
    name = next(name for name in seen if name.startswith("grad/"))
    (finding,) = judge.judge(0, seen | {name: seen[name] * INF})
    assert (finding.tensor, finding.gate, finding.ok) == ("scaler", "G0", False)
    assert finding.message.startswith("candidate skips this step")


def test_a_set_of_which_every_step_is_skipped_decides_nothing(net: type) -> None:
    judge, seen = measured(net, "train", scaled=True)
    skipped = seen | {name: tensor * INF for name, tensor in seen.items() if name.startswith("grad/")}
    judge.yardstick(0, skipped)
    with pytest.raises(NoReference, match="gradients overflow in every step"):
        judge.judge(0, skipped)


@pytest.mark.parametrize(("step", "unseen"), [(0, True), (0, False), (TIMED, True)])
def test_state_that_rounding_moves_as_far_decides_nothing(step: int, unseen: bool) -> None:
    """As that of a meta-learner whose inner steps are many; a late step has a verdict of its own for it."""
    state = SimpleNamespace(alike=lambda *_: False, unseen=lambda *_: unseen)
    inputs: Any = SimpleNamespace(
        fp64=SimpleNamespace(program=SimpleNamespace(step_state=state)),
        arithmetic=SimpleNamespace(row=SimpleNamespace(unit=2.0**-24)),
        yardsticks=SimpleNamespace(state_spread={}),
    )
    candidate = CandidateStep(inputs, step, {})
    assert candidate._same_step_state("velocity", b"same", b"same")
    if unseen and step != TIMED:
        with pytest.raises(NoReference, match="rounding alone moves velocity by more than 2 %"):
            candidate._same_step_state("velocity", b"ours", b"theirs")
    else:
        assert not candidate._same_step_state("velocity", b"ours", b"theirs")
