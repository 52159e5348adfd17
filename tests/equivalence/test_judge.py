"""The judge holds one set of inputs at a time, and nothing of the sets before."""

from __future__ import annotations

import pytest
import torch

from optexp.equivalence.judge import Judge
from optexp.equivalence.observation import observe
from optexp.errors import NoReference
from optexp.strategy import REASSOCIATES
from tests.equivalence.conftest import CPU


@pytest.fixture
def judge(net: type) -> Judge:
    """With one step of the baseline as its own candidate."""
    found = Judge(net(mode="forward"), CPU, torch.float32, 7, REASSOCIATES)
    found.draw(0, 2)
    seen = observe(net(mode="forward").build(CPU, torch.float32, 7), found.batches[0])
    found.yardstick(0, seen)
    assert all(finding.ok for finding in found.judge(0, seen))
    return found


def test_yardsticks_end_with_their_set(judge: Judge) -> None:
    yardsticks = judge.inputs.yardsticks
    assert yardsticks.current.plain
    judge.draw(1, 1)
    assert judge.inputs.yardsticks is not yardsticks
    assert (judge.inputs.step, judge.inputs.baseline, judge.inputs.candidate) == (-1, {}, {})


def test_traits_of_the_baseline_hold_for_later_sets(judge: Judge) -> None:
    judge.inputs.traits.nonfinite.add("out/y")
    judge.draw(1, 1)
    assert judge.inputs.traits.nonfinite == {"out/y"}


def test_results_of_the_step_before_outlive_a_set_and_no_rest(judge: Judge) -> None:
    results = judge.inputs.yardsticks.earlier = {"out/y": torch.ones(1)}
    judge.draw(1, 1)
    assert judge.inputs.yardsticks.earlier is results
    judge.rest()
    assert (judge.inputs.yardsticks.earlier, judge.batches) == ({}, [])


def test_a_batch_for_another_step_takes_the_room_of_the_candidates_results(judge: Judge) -> None:
    yardsticks = judge.inputs.yardsticks
    assert judge.inputs.candidate
    assert judge.batch(1) is judge.batches[1]
    assert not judge.inputs.candidate
    assert judge.inputs.yardsticks is yardsticks


def test_memory_that_runs_out_on_the_host_leaves_equivalence_undecided(judge: Judge) -> None:
    def full() -> None:
        raise torch.OutOfMemoryError("2 TiB")

    with pytest.raises(NoReference, match="fp64 does not fit: use a smaller batch or model"):
        judge._guarded(full)
