"""How blocks are sampled, seen with arms whose clock is told what to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log
from random import Random
from statistics import fmean, median
from typing import Any

import pytest
import torch

from optexp.measurement.clock import Timing
from optexp.measurement.gpu import Gpu, Reading
from optexp.measurement.samples import COLD, DELAYED, MAIN, SAME, Sample
from optexp.measurement.settings import FEWEST, MeasurementSettings
from optexp.measurement.watchdogs import ahead_of_steps, same_batches
from optexp.workers.arm import Arm
from optexp.workers.arm_timing import constant as constant_inputs
from optexp.workers.messages import WarmUp
from optexp.workers.spec import Spec
from optexp.workloads.matmul import Matmul
from tests.measurement.nvml import Nvml
from tests.measurement.scripted import Scripted, measured, taken


def test_blocks_alternate_in_random_order_and_jittered_length() -> None:
    arms = {"baseline": Scripted(1e-3), "candidate": Scripted(5e-4)}
    found = measured(**arms)
    assert len(found.pairs) == 30
    assert found.log_ratio == pytest.approx(log(2))
    assert 5 < sum(pair.baseline_first for pair in found.pairs) < 25
    steps = [call["steps"] for call in arms["candidate"].calls if not call["anywhere"]]
    assert min(steps) >= 36  # 20 ms, less 10 %
    assert max(steps) <= 44
    assert len(set(steps)) > 4


class Waited(Scripted):
    """An arm whose step takes several times as long where it is waited for."""

    def answer(self, method: str, **arguments: Any) -> Any:
        found = super().answer(method, **arguments)
        return replace(found, alone_s=[8 * self.step_s] * 20) if method == "warm_up" else found


def test_blocks_of_short_steps_are_as_long_as_asked() -> None:
    arm = Waited(5e-6)
    found = measured(pairs=10, baseline=Scripted(5e-6), candidate=arm)
    lasted = [call["steps"] * arm.step_s for call in arm.calls[2:] if not call["anywhere"]]
    assert min(lasted) >= 0.018  # 20 ms, less 10 %
    assert max(lasted) <= 0.022
    assert found.planned_s["candidate"] == 5e-6


def test_a_trial_block_that_another_program_disturbs_plans_nothing() -> None:
    class Disturbed(Scripted):
        def answer(self, method: str, **arguments: Any) -> Any:
            found = super().answer(method, **arguments)
            return replace(found, wall_s=5e-4) if method == "block" and len(self.calls) == 2 else found

    arm = Disturbed(5e-6)
    assert measured(pairs=10, baseline=Scripted(5e-6), candidate=arm).planned_s["candidate"] == 5e-6
    assert min(call["steps"] for call in arm.calls[2:] if not call["anywhere"]) >= 3600


@pytest.mark.parametrize(("step_s", "pairs"), [(1e-3, 10), (0.05, FEWEST)], ids=["short", "long"])
def test_pairs_that_suffice_are_the_last_ones(step_s: float, pairs: int) -> None:
    arms, counts = {"baseline": Scripted(step_s), "candidate": Scripted(step_s)}, list[int]()

    def enough(found: Sample) -> bool:
        counts.append(len(found.pairs))
        return len(found.pairs) >= pairs + 2

    found = taken(arms, MeasurementSettings(), Random(0), 30, enough=enough)
    assert (len(found.pairs), counts) == (pairs + 2, [pairs, pairs + 1, pairs + 2])


def test_some_blocks_of_the_candidate_may_end_anywhere_and_do_not_count() -> None:
    arms = {"baseline": Scripted(1e-3), "candidate": Scripted(1e-3)}
    found = measured(pairs=50, **arms)
    anywhere = [call["steps"] for call in arms["candidate"].calls if call["anywhere"]]
    assert len(anywhere) == 25
    assert min(anywhere) < 5
    assert max(anywhere) > 15
    assert len(found.pairs) == 50


def test_a_long_step_is_a_block_by_itself() -> None:
    arms = {"baseline": Scripted(0.5), "candidate": Scripted(0.4)}
    measured(pairs=8, **arms)
    assert {(call["steps"], call["lead_in"]) for arm in arms.values() for call in arm.calls} == {(1, 1)}


class Shapes(Scripted):
    """An arm whose batches take turns; their steps take 1, 10 and 80 units of time."""

    COSTS = (1, 10, 80)

    def answer(self, method: str, **arguments: Any) -> Any:
        if method == "warm_up":
            alone = [self.step_s * cost for cost in self.COSTS] * 7
            return WarmUp(alone, 1e-6, 0, [])
        if method == "period":
            return 6
        if method == "block":
            steps, start = arguments["steps"], arguments["lead_in"]
            total = sum(self.COSTS[index % 3] for index in range(start, start + steps))
            return Timing(steps, self.step_s * total / steps, None)
        return super().answer(method, **arguments)


@pytest.mark.parametrize("unit", [1e-6, 9.8e-5, 9.8e-4, 0.02])
def test_every_shape_is_timed_equally_often(unit: float) -> None:
    """A block that ends anywhere called an arm 1.3 times as fast as another of 1.03 times its speed."""
    arms = {"baseline": Shapes(1.03 * unit), "candidate": Shapes(unit), "again": Shapes(1.03 * unit)}
    found = taken(arms, MeasurementSettings(), Random(0), 12, cycle=3)
    assert {round(pair.log_ratio, 9) for pair in found.of(MAIN)} == {round(log(1.03), 9)}
    assert found.pairs[0].candidate.wall_s == pytest.approx(unit * sum(Shapes.COSTS) / 3)
    assert {round(pair.log_ratio, 9) for pair in found.of(SAME)} == {0.0}
    assert {round(pair.log_ratio, 9) for pair in found.of(DELAYED)} <= {-round(log(1.05), 9)}


class Uneven(Scripted):
    """An arm whose batches cost more or less, whoever steps; a block's first is the same in every block."""

    def __init__(self, step_s: float, costs: Sequence[float], period: int, queue: int = 0) -> None:
        super().__init__(step_s)
        self.costs, self.period, self.queue = costs, period, queue

    def answer(self, method: str, **arguments: Any) -> Any:
        found = super().answer(method, **arguments)
        if method == "period":
            return self.period
        if method == "warm_up":
            return replace(found, queue=self.queue)
        if method != "block":
            return found
        met = range(arguments["lead_in"], arguments["lead_in"] + arguments["steps"])
        return replace(found, wall_s=self.step_s * fmean(self.costs[i % len(self.costs)] for i in met))


@pytest.mark.parametrize(("baseline", "candidate"), [(0.030, 0.006), (0.105, 0.095), (0.2, 0.01), (0.015, 0.014)])
@pytest.mark.parametrize("period", [4, 0])
def test_both_arms_are_timed_on_the_same_batches(baseline: float, candidate: float, period: int) -> None:
    """Blocks of one step each, of other batches, made 1.1 times 2."""
    costs = [1.0, 1.3, 0.7, 1.0]
    found = measured(pairs=10, baseline=Uneven(baseline, costs, period), candidate=Uneven(candidate, costs, period))
    assert {round(pair.log_ratio, 9) for pair in found.pairs} == {round(log(baseline / candidate), 9)}


def test_an_epoch_that_ends_with_a_smaller_batch_is_met_whole() -> None:
    """Every 17th batch costs a 32nd: an arm whose blocks outlast a queue was called 1.06 times as fast as the other."""
    costs = [1.0] * 16 + [1 / 32]
    found = measured(pairs=10, baseline=Uneven(1e-3, costs, 17), candidate=Uneven(1e-3, costs, 17, queue=4))
    assert {round(pair.log_ratio, 9) for pair in found.pairs} == {0.0}


def test_batches_that_would_take_too_long_to_be_the_same_decide_nothing() -> None:
    arms = {"baseline": Uneven(0.2, [1.0], 0), "candidate": Uneven(0.025, [1.0], 0, queue=16)}
    found = measured(pairs=8, **arms)
    assert max(call["steps"] for call in arms["baseline"].calls) == 1
    assert found.uneven == "192 steps of the baseline would take 42 s"
    watch = same_batches([found])
    assert not watch.ok
    assert found.uneven in watch.text
    assert not measured(pairs=8, baseline=Uneven(0.2, [1.0], 0), candidate=Uneven(0.02, [1.0], 0)).uneven


@pytest.mark.parametrize("loader", [True, False])
def test_batches_of_one_size_are_no_reason_to_decide_nothing(loader: bool) -> None:
    """Blocks of 50 steps and of one: a candidate is so slow that it never meets all of its 64 batches."""

    class Arm(Uneven):
        def answer(self, method: str, **arguments: Any) -> Any:
            return loader if method == "has_loader" else super().answer(method, **arguments)

    found = measured(pairs=8, baseline=Arm(1e-3, [1.0], 64), candidate=Arm(0.3, [1.0], 64))
    assert bool(found.uneven) is loader
    assert same_batches([found]).ok is not loader


def test_an_interrupt_leaves_what_was_measured() -> None:
    class Interrupted(Scripted):
        def answer(self, method: str, **arguments: Any) -> Any:
            if len(self.calls) > 20:
                raise KeyboardInterrupt
            return super().answer(method, **arguments)

    found = Sample()
    with pytest.raises(KeyboardInterrupt):
        taken(
            {"baseline": Scripted(1e-3), "candidate": Interrupted(1e-3)},
            MeasurementSettings(),
            Random(0),
            50,
            into=found,
        )
    assert len(found.pairs) > 8


def test_a_loader_whose_batches_are_alike_keeps_each_arm_its_own_blocks() -> None:
    arms = {"baseline": Uneven(0.005, [1.0], 1), "candidate": Uneven(0.001, [1.0], 1)}
    measured(pairs=10, **arms)
    assert {name: max(c["steps"] for c in arm.calls) for name, arm in arms.items()} == {"baseline": 4, "candidate": 22}


class Shared:
    """Where two arms run: a block takes longer after one of the other arm."""

    def __init__(self) -> None:
        self.last: object = None

    def arm(self, generator: Random) -> Scripted:
        shared = self

        class After(Scripted):
            def answer(self, method: str, **arguments: Any) -> Any:
                found = super().answer(method, **arguments)
                if method != "block":
                    return found
                more, shared.last = (1.05 if shared.last not in (None, self) else 1.0), self
                return replace(found, wall_s=found.wall_s * more * generator.gauss(1.0, 0.02))

        return After(1e-3)


def test_looking_at_the_candidate_makes_it_no_faster() -> None:
    shared, generator = Shared(), Random(3)
    arms = {"baseline": shared.arm(generator), "candidate": shared.arm(generator)}
    ratios = [taken(arms, MeasurementSettings(), Random(seed), 50).log_ratio for seed in range(60)]
    assert abs(fmean(ratios)) < 0.004  # it was 0.012


def test_controls_of_cold_steps_are_cold_and_without_a_delay() -> None:
    arms = {name: Scripted(1e-3) for name in ("baseline", "candidate", "again")}
    found = taken(arms, MeasurementSettings(l2="cold"), Random(0), 10)
    assert all(pair.candidate.cold for pair in found.of(SAME))
    assert found.of(SAME)
    assert not found.of(DELAYED)


def test_a_compiler_that_works_in_the_middle_is_noticed() -> None:
    assert measured(baseline=Scripted(1e-3), candidate=Scripted(1e-3, compiles_after=12)).recompiled
    assert not measured(baseline=Scripted(1e-3), candidate=Scripted(1e-3, compiles_after=1000)).recompiled


def test_the_card_is_read_around_every_pair_and_never_in_a_block() -> None:
    arms = {"baseline": Scripted(1e-3), "candidate": Scripted(1e-3)}
    reads = iter(range(1000))

    def read() -> Reading:
        assert not any(arm.busy for arm in arms.values())
        return Reading(float(next(reads)))

    found = taken(arms, MeasurementSettings(), Random(0), 12, read)
    assert [[r.at_s for r in pair.readings] for pair in found.pairs] == [[i, i + 1] for i in range(12)]


def test_the_card_is_read_around_controls_and_cold_pairs_too() -> None:
    arms = {name: Scripted(1e-3) for name in ("baseline", "candidate", "again")}
    reads = iter(range(1000))
    found = taken(arms, MeasurementSettings(l2="both"), Random(0), 10, lambda: Reading(float(next(reads))))
    for kind in (MAIN, SAME, DELAYED, COLD):
        spans = [[reading.at_s for reading in pair.readings] for pair in found.of(kind)]
        assert spans
        assert all(after == before + 1 for before, after in spans)
    hot = replace(found.of(SAME)[0].readings[1], reasons=("thermal slow-down",))
    assert not replace(found.of(SAME)[0], readings=(hot,)).counts


def test_a_card_that_heats_up_loses_the_pairs_from_then_on(nvml: Nvml, gpu: Gpu) -> None:
    class Heating(Scripted):
        def answer(self, method: str, **arguments: Any) -> Any:
            counted = method == "block" and not arguments["anywhere"]
            if counted and sum(not call["anywhere"] for call in self.calls) == 11:  # 2 trials, 9 pairs
                nvml.reasons = 0x20
            return super().answer(method, **arguments)

    found = taken(
        {"baseline": Scripted(1e-3), "candidate": Heating(1e-3)}, MeasurementSettings(), Random(0), 12, gpu.read
    )
    assert [bool(pair.slowed) for pair in found.pairs] == [False] * 9 + [True] * 3
    assert len(found.kept) == 9


def test_controls_are_the_baseline_beside_its_double_and_beside_a_delay_of_5_percent() -> None:
    found = measured(baseline=Scripted(1e-3), candidate=Scripted(5e-4), again=Scripted(1.02e-3))
    assert len(found.of(MAIN)) == 30
    assert len(found.of(SAME)) == len(found.of(DELAYED)) == 10
    assert median(pair.log_ratio for pair in found.of(SAME)) == pytest.approx(log(1 / 1.02))
    assert median(pair.log_ratio for pair in found.of(DELAYED)) == pytest.approx(-log(1.05))
    assert found.log_ratio == pytest.approx(log(2))  # controls are no part of it


def test_steps_too_long_for_an_exact_delay_have_none() -> None:
    found = measured(pairs=10, baseline=Scripted(5e-3), candidate=Scripted(5e-3), again=Scripted(5e-3))
    assert found.of(DELAYED) == []
    assert len(found.of(SAME)) == 4


@pytest.mark.parametrize(("l2", "main_is_cold", "cold"), [("warm", False, 0), ("cold", True, 0), ("both", False, 10)])
def test_cold_caches_are_compared_by_the_device_alone(l2: str, main_is_cold: bool, cold: int) -> None:
    found = measured(MeasurementSettings(l2=l2), baseline=Scripted(1e-3), candidate=Scripted(1e-3))
    assert {pair.baseline.cold for pair in found.of(MAIN)} == {main_is_cold}
    assert len(found.of(COLD)) == cold
    assert found.pairs[0].baseline.step_s == (5e-4 if main_is_cold else 1e-3)


def test_what_an_operation_must_move() -> None:
    arm = Arm()
    arm.setup(Spec(Matmul(size=64), [], "cpu", "bfloat16", 0).pack())
    assert arm.moved() == (3 * 64 * 64 * 2, 0)
    assert Matmul(size=64).flops == 2 * 64**3
    assert Matmul(size=64, mode="forward_backward").flops == 6 * 64**3


def test_inputs_that_are_one_value_are_told_from_real_ones() -> None:
    zeros, data, mask = torch.zeros(3, 4), torch.randn(3, 4), torch.ones(3, dtype=torch.int64)
    assert constant_inputs([(zeros, data, mask), (zeros, data, mask)]) == ["0"]
    assert constant_inputs([(zeros, data), (data, data)]) == []
    assert constant_inputs([{"image": torch.full((2, 2), 0.5, dtype=torch.bfloat16), "scale": torch.ones(())}]) == [
        "image"
    ]
    assert measured(baseline=Scripted(1e-3), candidate=Scripted(1e-3)).constant == ("0",)


@pytest.mark.parametrize(("single_s", "looks"), [(1e-3, 0), (4e-4, 1)])
def test_single_steps_are_looked_at_again_where_blocks_take_longer(single_s: float, looks: int) -> None:
    """Other programs came after the first look: by the second, single steps take as long as steps of blocks."""

    class Crowded(Scripted):
        def answer(self, method: str, **arguments: Any) -> Any:
            quick = single_s if not self.calls else self.step_s
            return WarmUp([quick] * 20, 1e-6, 0, []) if method == "warm_up" else super().answer(method, **arguments)

    found = measured(baseline=Scripted(1e-3), candidate=Crowded(1e-3))
    assert len(found.alone_later.get("candidate", ())) == looks
    assert ahead_of_steps([found]).ok
