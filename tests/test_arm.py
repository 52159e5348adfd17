"""What an arm remembers of the blocks that it timed."""

import weakref
from dataclasses import replace
from itertools import cycle
from math import nan
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from optexp.equivalence.missed import LOOKS, End
from optexp.program import Batch, tensors_of
from optexp.program.offered import Offered, Place
from optexp.workers import arm_novelty, arm_program
from optexp.workers.arm import Arm
from optexp.workers.spec import Spec
from optexp.workloads.gelu import Gelu
from optexp.workloads.mlp import Mlp


def made() -> Arm:
    arm: Any = Arm()
    arm.initial = SimpleNamespace(values={})
    arm.batches = [(torch.zeros(1),)] * 4
    arm.program = SimpleNamespace(trains=False, optimizer=None, buffers=dict, state=dict)
    arm.offered = Offered(arm.batches, Place(torch.device("cpu")))
    return arm  # type: ignore[no-any-return]


def test_of_many_blocks_a_few_are_kept_and_only_those_that_could_end_anywhere():
    arm = made()
    for steps in range(1, 400, 2):
        arm._keep(End(4 * steps + 2), False, {"output": torch.full((1,), nan)})
        arm._keep(End(steps, steps % 4), True, {"output": torch.full((1,), float(steps))})
    assert len(arm.kept) == LOOKS
    assert all(steps % 2 and first == steps % 4 for steps, first in arm.timed_ends())
    assert [arm.timed(index)["out/output"][0] for index in range(LOOKS)] == [end.steps for end in arm.timed_ends()]
    assert arm.outputs["output"].item() == arm.timed_ends()[0].steps


def test_a_block_that_ends_where_all_do_is_better_than_none():
    arm = made()
    arm._keep(End(10), False, {"output": torch.zeros(1)})
    assert arm.timed_ends() == [End(10)]


def test_parameters_without_an_alias_take_memory_all_the_same():
    sizes = []
    for aliases in (None, {}):
        arm = Arm()
        arm.setup(Spec(Mlp(dim=32, layers=2, batch_size=4), (), "cpu", "float32", 0).pack())
        arm.program = replace(arm.program, aliases=aliases)
        sizes.append(arm.peak_memory(1).resident_mib)
    assert sizes[0] == sizes[1] > 2 * 32 * 33 * 4 / 2**20


@pytest.mark.parametrize(("momentum", "carries"), [(0.1, True), (0.0, False)])
def test_an_arm_tells_whether_steps_change_buffers(momentum: float, carries: bool) -> None:
    class Normed(Mlp):
        def model(self) -> nn.Module:
            norm = nn.BatchNorm1d(32, momentum=momentum)
            norm.num_batches_tracked = None
            return nn.Sequential(super().model(), norm)

    told = Arm().setup(Spec(Normed("forward_backward", dim=32, batch_size=4), (), "cpu", "float32", 0).pack())
    assert told.carries is carries


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_machine_that_is_busy_at_every_third_block_accuses_nobody(who: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arm = Arm()
    arm.setup(Spec(Gelu(size=8), (), "cpu", "float32", 0).pack())
    times = cycle([5.0 if block == who else 1.0 for block in range(3)])
    monkeypatch.setattr("optexp.workers.arm_timing.clock.time_block", lambda *_: SimpleNamespace(wall_s=next(times)))
    assert arm.novelty(1000)[0] <= 1.0
    assert arm.reordered(1000)[0] <= 1.0


def test_other_batches_of_one_turn_are_given_back_before_the_next_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    held, alive = list[weakref.ref[torch.Tensor]](), list[int]()

    def draw(*given: Any) -> list[Batch]:
        alive.append(sum(one() is not None for one in held))
        drawn = arm_program.draw(*given)
        held.extend(weakref.ref(tensor) for batch in drawn for tensor in tensors_of(batch).values())
        return drawn

    monkeypatch.setattr(arm_novelty, "draw", draw)
    arm = Arm()
    arm.setup(Spec(Gelu(size=8), (), "cpu", "float32", 0).pack())
    arm.novelty(1000)
    assert len(alive) > 1
    assert not any(alive)


@pytest.mark.parametrize("kinds", [2, 4, 5])
def test_some_blocks_tell_however_many_kinds_of_batch_take_turns(kinds: int) -> None:
    """A block is a number of turns: with one batch of each kind, all would end where they began."""

    class Kinds(Gelu):
        variety = kinds

    arm = Arm()
    arm.setup(Spec(Kinds(size=4), (), "cpu", "float32", 0).pack())
    assert len(arm.batches) % kinds == 0
    assert any(turns * kinds % len(arm.batches) for turns in range(1, 4))


class Keeping(nn.Module):
    """Counts, goes on from an average, and overwrites scratch memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.average, self.scratch = 0, torch.zeros(32), torch.zeros(4, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.scratch.copy_(x)
        self.average.lerp_(x.mean(0), 0.5)
        return x + self.average


def test_scratch_memory_is_no_state(monkeypatch):
    monkeypatch.setattr(Mlp, "model", lambda self: Keeping())
    arm = Arm()
    told = arm.setup(Spec(Mlp(mode="forward", dim=32, batch_size=4), (), "cpu", "float32", 0).pack())
    assert told.keeps == ["average", "calls"]
    keeps = arm.program.keeps
    assert keeps is not None
    assert keeps.forgetful == {"scratch"}
    assert arm.unkept() == []
