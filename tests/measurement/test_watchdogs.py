"""Each fault is named by its own watchdog and by no other; quiet samples wake none."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from optexp.measurement import watchdogs
from optexp.measurement.floor import floor_s
from optexp.measurement.gpu import Gpu, Reading
from optexp.measurement.samples import COLD, Late, Pair, Sample
from optexp.measurement.watchdogs import WATCHDOGS, split
from optexp.records.measurement import Severity, Watch
from optexp.records.profile import Calibration
from tests.measurement.nvml import Nvml
from tests.measurement.samples import constant, made, timing


def barking(samples: list[Sample]) -> dict[str, Watch]:
    return {watch.name: watch for watchdog in WATCHDOGS if not (watch := watchdog(samples)).ok}


def test_quiet_samples_wake_nobody(gpu: Gpu) -> None:
    assert barking(made(constant(2e-3), constant(1e-3), readings=[gpu.read(), gpu.read()])) == {}
    assert barking(made(constant(1e-3), constant(1e-3))) == {}  # a CPU: nothing was read
    assert barking(made(constant(1e-3), constant(1e-3), pairs=3, processes=1)) == {}


def stepping(baseline_s: float, candidate_s: float, pairs: int = 40) -> list[Sample]:
    """Blocks whose mean step takes 1 ms in both arms, and what single steps take."""
    samples = made(constant(1e-3), constant(1e-3), pairs=pairs)
    for sample in samples:
        sample.alone = {"baseline": [baseline_s] * 25, "candidate": [candidate_s] * 24 + [4 * candidate_s]}
    return samples


def test_a_step_that_computes_the_results_of_several_is_named() -> None:
    """Three of four single steps take nothing, and blocks a quarter of what the fourth does."""
    watch = barking(stepping(1.05e-3, 2e-5))["work ahead"]
    assert watch.refuses
    assert "one step computes the results of several" in watch.text
    assert "work ahead" not in barking(stepping(1.05e-3, 1.02e-3))
    assert "work ahead" not in barking(stepping(1.05e-3, 0.7e-3)), "a machine that is slower now"
    assert "work ahead" not in barking(stepping(2e-5, 2e-5)), "steps of the baseline differ as much"


def test_single_steps_of_a_quiet_moment_before_busy_blocks_are_no_work_ahead() -> None:
    samples = stepping(1.6e-3, 4e-4)
    assert "work ahead" in barking(samples)
    for sample in samples:
        sample.alone_later = {"candidate": [[3e-4] * 20, [1.1e-3] * 20]}
    assert "work ahead" not in barking(samples)


def test_nothing_is_held_against_an_arm_on_a_machine_too_busy_to_tell() -> None:
    samples = stepping(1.05e-3, 2e-5)
    for sample in samples:
        sample.pairs = [replace(p, candidate=replace(p.candidate, queued=0.6)) for p in sample.pairs]
    watch = barking(samples)["work ahead"]
    assert not watch.refuses
    assert watch.undecides
    assert "work ahead" not in barking(stepping(1.0, 2e-5)), "single steps of the baseline a thousand times too long"


def test_batches_of_the_background_come_when_they_come() -> None:
    samples = stepping(1.05e-3, 2e-5)
    for sample in samples:
        sample.queue = 4
    assert "work ahead" not in barking(samples)


def test_one_quiet_block_excuses_the_candidate_and_chance_is_small() -> None:
    samples = made(constant(1e-3), lambda index: 4e-3 if index else 1e-3)
    for sample in samples:
        sample.alone = {"baseline": [1e-3] * 20, "candidate": [1e-3] * 20}
    assert "work ahead" not in barking(samples)
    generator, alarms = Random(0), 0
    for _ in range(20_000):
        alarms += all(generator.random() < 0.3 for _ in range(8))
    assert watchdogs.chance(0.3, 8) == pytest.approx(alarms / 20_000, abs=2e-4)
    assert watchdogs.chance(0.1, 8) <= 1.01e-8


def hot(gpu: Gpu, nvml: Nvml, share: float, bit: int) -> list[Sample]:
    samples = made(constant(1e-3), constant(1e-3), readings=[gpu.read(), gpu.read()])
    nvml.reasons, nvml.clocks[1] = bit, 1200
    said = gpu.read()
    for sample in samples:
        for index in range(round(share * len(sample.pairs))):
            sample.pairs[index] = replace(sample.pairs[index], readings=(sample.pairs[index].readings[0], said))
    return samples


def test_a_thermal_flag_drops_pairs_and_too_many_are_no_measurement(gpu: Gpu, nvml: Nvml) -> None:
    samples = hot(gpu, nvml, 0.05, 0x20)
    watch = barking(samples)["throttling"]
    assert "thermal slow-down" in watch.text
    assert "10 of 200 pairs dropped" in watch.text
    assert "1200 to 1980 MHz" in watch.text
    assert not watch.refuses
    assert [len(sample.kept) for sample in samples] == [38] * 5
    assert barking(hot(gpu, nvml, 0.2, 0x40))["throttling"].refuses
    everything = hot(gpu, nvml, 1.0, 0x08)
    assert barking(everything)["throttling"].refuses
    assert everything[0].log_ratio == pytest.approx(0, abs=0.01)  # of what there is: the refusal says the rest


def test_a_process_without_a_pair_that_counts_is_no_measurement(gpu: Gpu, nvml: Nvml) -> None:
    """Few pairs of all, but all of a process: the statistic of that one is of throttled pairs."""
    steady = made(constant(1e-3), constant(1e-3), readings=[gpu.read(), gpu.read()], pairs=50, processes=14)
    (slowed,) = hot(gpu, nvml, 1.0, 0x20)[:1]
    watch = barking([*steady, replace(slowed, pairs=slowed.pairs[:10])])["throttling"]
    assert "10 of 710 pairs" in watch.text
    assert watch.refuses
    assert not barking([*steady, replace(slowed, pairs=[*slowed.pairs[:10], steady[0].pairs[0]])])["throttling"].refuses


def test_a_slow_down_inside_a_block_is_found_although_the_card_idles_when_it_is_read(gpu: Gpu, nvml: Nvml) -> None:
    before = replace(gpu.read(), at_s=0.0)
    nvml.held_ns = {0: 0, 1: 10**7}  # a quarter of the 40 ms
    samples = made(constant(1e-3), constant(1e-3), readings=[before, replace(gpu.read(), at_s=0.04)])
    watch = barking(samples)["throttling"]
    assert "thermal slow-down" in watch.text
    assert watch.refuses
    nvml.held_ns = {0: 10**7, 1: 0}
    samples = made(constant(1e-3), constant(1e-3), readings=[before, replace(gpu.read(), at_s=0.04)])
    assert set(barking(samples)) == {"power cap"}


def test_trial_blocks_that_were_slow_are_fatal() -> None:
    samples = made(constant(1e-3), constant(1e-3))
    for sample in samples:
        sample.alone = {arm: [1.1e-3] for arm in ("baseline", "candidate")}
        sample.planned_s = {"baseline": 1e-3, "candidate": 1e-3}
    assert barking(samples) == {}
    for sample in samples:
        sample.planned_s["candidate"] = 0.03
    watch = barking(samples)["slow start"]
    assert "the candidate took 30 times as long while warming up" in watch.text
    assert watch.refuses


def test_a_power_cap_is_said_and_keeps_its_pairs(gpu: Gpu, nvml: Nvml) -> None:
    samples = hot(gpu, nvml, 0.5, 0x04)
    assert set(barking(samples)) == {"power cap"}
    assert not barking(samples)["power cap"].refuses
    assert len(samples[0].kept) == 40


def test_an_arm_that_works_while_it_waits_is_named_and_fatal() -> None:
    """On the core that both are bound to, it takes time from the other."""
    samples = made(constant(2e-3), constant(1e-3))
    for sample in samples:
        sample.idle = {"baseline": [0.004] * 39 + [0.9], "candidate": [0.004] * 40}
    assert barking(samples) == {}  # a burst is nothing
    for sample in samples:
        sample.idle["candidate"] = [0.45] * 40
    watch = barking(samples)["waiting arm"]
    assert watch.refuses
    assert "the candidate keeps its cores 45.0% busy while the other is timed, the baseline 0.4%" in watch.text


def test_an_arm_that_goes_on_after_it_has_said_that_it_is_done_is_fatal() -> None:
    samples = made(constant(2e-3), constant(1e-3))
    for sample in samples:
        sample.late = {"baseline": [Late(4e-4, 0.04)] * 20, "candidate": [Late(1e-3, 0.001), Late(0.01, 0.0265)] * 10}
    watch = barking(samples)["waiting arm"]
    assert watch.refuses
    assert "the candidate goes on for 40.0% of a block on its cores after it, the baseline 1.0%" in watch.text
    for sample in samples:
        sample.idle = {"baseline": [0.004] * 40, "candidate": [0.004] * 40}
    assert barking(samples)["waiting arm"].text == watch.text  # at rest while the other is timed, all the same


def test_a_baseline_that_never_rests_refuses_nobody() -> None:
    samples = made(constant(2e-3), constant(1e-3))
    for sample in samples:
        sample.late = {"candidate": [Late(4e-4, 0.04)] * 20, "baseline": [Late(6e-3, 0.04)] * 20}
    watch = barking(samples)["waiting arm"]
    assert not watch.refuses
    assert watch.severity is Severity.UNDECIDES
    assert "the baseline goes on for 15.0% of a block on its cores after it" in watch.text


def test_cores_that_others_want_too_are_named() -> None:
    samples = made(constant(2e-3), constant(1e-3))

    def queued(baseline: float, candidate: float) -> list[Sample]:
        for sample in samples:
            for index, pair in enumerate(sample.pairs):
                blocks = replace(pair.baseline, queued=baseline), replace(pair.candidate, queued=candidate)
                sample.pairs[index] = replace(pair, baseline=blocks[0], candidate=blocks[1])
        return samples

    assert barking(queued(0.01, 0.04)) == {}
    watch = barking(queued(0.02, 0.3))["cores"]
    assert not watch.refuses
    assert "the candidate had to wait for a core for 30% of its time: other programs" in watch.text


def test_a_foreign_process_is_named_and_fatal() -> None:
    samples = made(constant(1e-3), constant(1e-3))
    samples[2].foreign = ("process 4711 (python, 2048 MiB)",)
    watch = barking(samples)["foreign processes"]
    assert "4711" in watch.text
    assert watch.refuses


def test_a_recompilation_in_the_middle_is_fatal() -> None:
    samples = made(constant(1e-3), constant(1e-3))
    samples[3].recompiled = True
    assert barking(samples)["recompilation"].refuses
    assert "in 1 of 5 processes" in barking(samples)["recompilation"].text


@pytest.mark.parametrize(("hidden_s", "queue", "caught"), [(0.02, 0, True), (0.005, 0, False), (0.02, 8, False)])
def test_a_block_that_takes_longer_than_it_tells_is_fatal(hidden_s: float, queue: int, caught: bool) -> None:
    """Of 21 ms; where batches are made in the background, more goes on than steps."""
    samples = made(constant(2e-3), constant(1e-3))
    for sample in samples:
        sample.queue = queue
        sample.pairs = [
            replace(
                pair,
                baseline=replace(pair.baseline, aside_s=0.05 * (index % 7 == 0)),
                candidate=replace(pair.candidate, aside_s=hidden_s),
            )
            for index, pair in enumerate(sample.pairs)
        ]
    assert ("work aside" in barking(samples)) is caught
    assert not caught or barking(samples)["work aside"].refuses


@pytest.mark.parametrize(("helped_s", "queue", "caught"), [(2e-4, 0, True), (5e-5, 0, False), (2e-4, 8, False)])
def test_a_step_that_hands_its_work_on_to_another_process_is_fatal(helped_s: float, queue: int, caught: bool) -> None:
    """Of 1 ms; what processes of the baseline do is no candidate's."""
    samples = made(constant(2e-3), constant(1e-3))
    for sample in samples:
        sample.queue = queue
        sample.pairs = [
            replace(
                pair,
                baseline=replace(pair.baseline, helped_s=1e-3),
                candidate=replace(pair.candidate, helped_s=1e-3 + helped_s),
            )
            for pair in sample.pairs
        ]
    assert ("work aside" in barking(samples)) is caught
    if caught:
        assert "other processes work 200 µs for a step of the candidate" in barking(samples)["work aside"].text


def test_zeros_as_inputs_are_named() -> None:
    samples = made(constant(1e-3), constant(1e-3))
    for sample in samples:
        sample.constant = ("0",)
    assert "input 0 is one value over and over (zeros?)" in barking(samples)["inputs"].text


@pytest.mark.parametrize("across", ["blocks", "processes"])
def test_an_arm_with_two_speeds_is_reported_as_two(across: str) -> None:
    if across == "blocks":
        samples = made(constant(2e-3), lambda index: 1e-3 if index % 3 else 1.1e-3)
    else:
        samples = made(constant(2e-3), constant(1e-3), processes=3) + made(
            constant(2e-3), constant(1.1e-3), processes=2
        )
    found = barking(samples)
    assert set(found) == {"modes"}
    assert "the candidate takes 1 ms" in found["modes"].text
    assert "1.1 ms" in found["modes"].text
    assert "baseline" not in found["modes"].text


@pytest.mark.parametrize("shape", ["bell", "uniform", "disturbed", "lognormal"])
def test_one_mode_is_not_split(shape: str) -> None:
    random, falsely = Random(shape), 0
    draw = {
        "bell": lambda: random.gauss(1.0, 0.05),
        "uniform": lambda: random.uniform(0.8, 1.2),
        "disturbed": lambda: random.gauss(1.0, 0.01) + 0.5 * (random.random() < 0.05),
        "lognormal": lambda: random.lognormvariate(0, 0.3),
    }[shape]
    for _ in range(300):
        falsely += split([draw() for _ in range(50)]) is not None
    assert falsely <= 3


def test_a_drifting_arm_is_named() -> None:
    samples = made(constant(1e-3), lambda index: 1e-3 * (1 + 0.001 * index))
    found = barking(samples)
    assert set(found) == {"drift"}
    assert "-2." in found["drift"].text  # per cent, between the first and the last third of 40 pairs


def test_slowed_pairs_with_emptied_caches_are_counted(gpu: Gpu, nvml: Nvml) -> None:
    steady = made(constant(1e-3), constant(1e-3), readings=[gpu.read(), gpu.read()])
    slowed = hot(gpu, nvml, 0.3, 0x20)
    for sample, other in zip(steady, slowed, strict=True):
        sample.pairs += [replace(pair, kind=COLD) for pair in other.pairs]
    watch = barking(steady)["throttling"]
    assert "60 of 400 pairs dropped" in watch.text
    assert watch.refuses


def test_both_arms_drifting_together_change_no_ratio() -> None:
    slower = lambda index: 1e-3 * (1 + 0.002 * index)  # noqa: E731
    assert barking(made(slower, slower)) == {}


def test_an_effect_of_the_order_is_named() -> None:
    random, pairs = Random(1), []
    for _ in range(60):
        first = random.random() < 0.5
        pairs.append(Pair(timing(1.1e-3 if first else 1e-3), timing(1e-3), first))
    assert set(barking([Sample(pairs)])) >= {"order"}


def test_blocks_that_scatter_have_no_order() -> None:
    random, barked = Random(3), 0
    for _ in range(50):
        blocks = [[timing(random.gauss(1e-3, 1e-4)) for _ in range(2)] for _ in range(40)]
        barked += "order" in barking([Sample([Pair(*pair, index % 2 == 0) for index, pair in enumerate(blocks)])])  # type: ignore[call-arg]
    assert barked <= 1


def test_the_luck_of_a_process_is_no_mode() -> None:
    """Of processes whose luck both arms share."""
    samples = [
        sample
        for luck in (1.0, 1.01, 1.05, 1.06, 1.055)
        for sample in made(constant(2e-3 * luck), constant(1e-3 * luck), processes=1)
    ]
    assert "modes" not in barking(samples)


def test_a_gain_that_does_not_reach_the_user_is_named() -> None:
    samples = made(constant(1e-3), constant(0.9e-3))  # between events a card that waits seems to work
    assert "device and wall" not in barking(samples)
    samples[-1].busy_s = {"baseline": 4e-4, "candidate": 2e-4}
    text = barking(samples)["device and wall"].text
    assert text == "device time improves 2.00×, wall time 1.11×: the gain does not reach the user"
    samples[-1].busy_s = {"baseline": 4e-4, "candidate": 3.6e-4}
    assert "device and wall" not in barking(samples)
    samples = made(constant(1e-3), constant(2e-3))
    samples[-1].busy_s = {"baseline": 4e-4, "candidate": 6.7e-4}  # slower by either
    assert "device and wall" not in barking(samples)


def test_readings_of_a_card_without_clocks() -> None:
    samples = made(constant(1e-3), constant(1e-3), readings=[Reading(0.0), Reading(1.0)])
    assert barking(samples) == {}


@pytest.mark.parametrize(("candidate", "fatal"), [(1e-3, False), (2e-4, True)])
def test_faster_than_physics_is_fatal(candidate: float, fatal: bool) -> None:
    samples = made(constant(2e-3), constant(candidate))
    samples[-1].floor_s = 5e-4
    assert bool(barking(samples)) is fatal
    if fatal:
        watch = barking(samples)["physical floor"]
        assert watch.refuses
        assert "less than 500 µs here, and the candidate takes 200 µs" in watch.text


def test_a_floor_that_the_baseline_breaks_is_wrong() -> None:
    samples = made(constant(3e-4), constant(2e-4))
    samples[-1].floor_s = 5e-4
    assert barking(samples) == {}


def test_the_floor_is_the_larger_of_memory_and_arithmetic() -> None:
    calibration = Calibration("cuda:0", 4e12, {"bfloat16": 8e14})
    assert floor_s(4_060_000_000, 60_000_000, None, calibration, "float32") == pytest.approx(0.9e-3)
    assert floor_s(50_000_000, 60_000_000, None, calibration, "float32") == 0
    assert floor_s(0, 0, 8e11, calibration, "bfloat16") == pytest.approx(0.9e-3)
    assert floor_s(0, 0, 8e11, calibration, "float64") == 0  # never calibrated
    cards = Calibration("cuda:0", 4e12, {"float32": 5e13, "tf32": 4.5e14})
    assert floor_s(0, 0, 1.5e11, cards, "float32") == pytest.approx(0.9e-3)  # as three products of tf32
    assert floor_s(0, 0, 4.5e11, cards, "tf32") == pytest.approx(0.9e-3)
    cards = Calibration("cuda:0", 4e12, {"float32": 5e13, "tf32": 6e13})
    assert floor_s(0, 0, 5e10, cards, "float32") == pytest.approx(0.9e-3)
    assert floor_s(4_000_000_000, 0, None, calibration, "bfloat16", narrower=0.5) == pytest.approx(0.45e-3)


def test_the_page_about_measuring_lists_every_watchdog_in_its_order() -> None:
    samples = made(constant(1e-3), constant(1e-3))
    page = (Path(__file__).parents[2] / "docs" / "measurement.md").read_text()
    table = page.partition("## Watchdogs")[2].partition("## ")[0]
    listed = re.findall(r"^\| (?!watchdog|---)([^|]+) \|", table, re.MULTILINE)
    assert listed == [watchdog(samples).name for watchdog in WATCHDOGS]
