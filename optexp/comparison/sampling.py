"""One process of each arm: warm-up, then blocks in alternating pairs whose order is drawn at random."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import ceil, inf, lcm
from random import Random
from statistics import median

from optexp.equivalence.missed import EVEN, LOOKS
from optexp.errors import UNTIMED, Failure
from optexp.measurement.clock import Timing, account, helped_s, now, share_taken, until_at_rest, worked_s
from optexp.measurement.gpu import Read, Reading
from optexp.measurement.placement import Standing, standings
from optexp.measurement.samples import COLD, CONTROL_EVERY, DELAYED, LOOK_EVERY, MAIN, SAME, Late, Pair, Sample
from optexp.measurement.settings import FEWEST, MeasurementSettings
from optexp.measurement.watchdogs import ahead_of_steps
from optexp.workers.arm import Arm
from optexp.workers.client import Client

QUEUES = 12  # fewest steps of a block, in lengths of the loader's queue: ten are left after jitter
LOOKS_AGAIN, AGAIN_S = 4, 0.3  # repetitions, and seconds of each, of timing single steps where an arm computes ahead
ATTEMPTS = 5  # at a block in which the arm is not stopped: a person may stop a job once
TRIALS = 2  # blocks by which the length of blocks is planned: another program may disturb one
LONGEST_S = 5.0  # longest block that is lengthened so that both arms meet the same batches
REST_S = 0.25  # longest wait for an arm's threads to rest: those of some libraries spin for 0.2 s
_ANY = Random()  # not seeded: a program cannot predict the batch with which a block begins
COMPILED = ("stats/unique_graphs", "frames/total")  # counters of torch.compile


@dataclass(frozen=True)
class Ready:
    """An arm after warm-up.

    steps:   of a block, before jitter
    lead_in: unmeasured steps before each block
    turn:    a block's steps are a multiple of this number, so that every kind of batch is met equally often; else the
             mean step would depend on the batch with which a block ends, and differ between arms of different speed
    """

    arm: Client[Arm]
    steps: int
    lead_in: int
    turn: int = 1

    def jittered(self, swing: float) -> int:
        return max(1, round(self.steps / self.turn * swing)) * self.turn

    def block(self, steps: int, cold: bool = False, anywhere: bool = False, first: int = 0) -> Timing:
        """A block of this arm; another one where the arm was stopped meanwhile.

        Raises:
            Failure: no time can be believed.
        """
        for _ in range(ATTEMPTS):
            timing = self._block(steps, cold, anywhere, first)
            if not timing.paused:
                return timing
        text = "another process stops and resumes it (SIGSTOP, SIGCONT) while it is timed"
        raise Failure(UNTIMED, text, worker=self.arm.name)

    def _block(self, steps: int, cold: bool, anywhere: bool, first: int) -> Timing:
        pid = self.arm.pid
        helped = helped_s(pid) if pid else 0.0
        begin, before = now(), account(pid) if pid else None
        timing = self.arm.call(Arm.block, steps=steps, lead_in=self.lead_in, cold=cold, anywhere=anywhere, first=first)
        seconds, after = now() - begin, account(pid) if pid else None
        if not 0 < timing.step_s < inf:
            text = f"a block of {timing.steps} steps took {timing.step_s} s a step by its own clock: none takes no time"
            raise Failure(UNTIMED, text, worker=self.arm.name)
        queued = None
        if pid and before and after:
            queued = share_taken(before, after, seconds, len(os.sched_getaffinity(pid)))
        run = timing.steps + self.lead_in
        helped = (helped_s(pid) - helped) / run if pid else 0.0
        return replace(timing, aside_s=seconds - timing.wall_s * run, queued=queued, helped_s=helped)

    def look(self, order: Random, cold: bool) -> None:
        """Run a block of random length from a random batch, so that a program cannot predict which step is
        verified."""
        longest = self.jittered(_swing(order))
        longest = longest if longest == 1 else _multiple(longest, EVEN)
        self.block(order.randint(1, longest), cold, anywhere=True, first=_first())

    def late(self, timing: Timing) -> Late | None:
        """The CPU time that the arm spends after its last block; None where it has no process of its own."""
        pid = self.arm.pid
        if not pid:
            return None
        cores, begin, before = len(os.sched_getaffinity(pid)), now(), worked_s(pid)
        self.arm.call(Arm.dismiss)  # which waits for a thread that works under the interpreter's lock
        between, most = worked_s(pid), (now() - begin) * cores
        _rest(self.arm)
        # Of threads that run, Linux tells what they did until the last tick: 4 ms of the block may be told after it.
        late_s = min(between - before, most) + worked_s(pid) - between
        if self.steps > 1 and cores > 1:
            self.block(1)  # the threads that were dismissed are there again before anything is timed
        return Late(late_s, timing.wall_s * (timing.steps + self.lead_in) * cores)


def sample(
    arms: Mapping[str, Client[Arm]],
    settings: MeasurementSettings,
    order: Random,
    pairs: int,
    read: Read = lambda: None,
    cycle: int = 1,
    tell: Callable[[int], None] = lambda done: None,
    into: Sample | None = None,
    enough: Callable[[Sample], bool] = lambda found: False,
) -> dict[str, Ready]:
    """Measure arms that have been set up. One arm works at a time, and none while `read` and `tell` are called.

    Args:
        arms: "baseline", "candidate" and, for the controls, a second baseline "again".
        pairs: Most pairs; `settings.process_s` and `enough` may end them earlier.
        cycle: Number of kinds of batch that take turns.
        tell: Takes the number of pairs that are measured.
        into: Is filled as pairs are measured, so that an exception loses none of them.
        enough: Whether the pairs so far suffice.

    Returns:
        The arms after their warm-up.
    """
    result, ready = Sample() if into is None else into, dict[str, Ready]()
    for name, arm in arms.items():
        ready[name] = _warmed(name, arm, settings, order, cycle, result)
    ready, result.uneven = _on_the_same_batches(
        ready, cycle, arms["baseline"].call(Arm.period, limit_s=settings.warmup_s), result.planned_s
    )
    compiled = {name: _compilations(arm) for name, arm in arms.items()}
    others = [arm for name, arm in arms.items() if name != "candidate" and arm.pid]
    standing = {arm.pid: standings(arm.pid) for arm in others}
    long = max(result.planned_s[name] for name in ("baseline", "candidate")) >= settings.block_ms / 1e3
    at_least, begin, before = min(pairs, FEWEST if long else 10), now(), read()
    moving = arms
    for index in range(pairs):
        if index >= at_least and (now() - begin > settings.process_s or enough(result)):
            break
        moving = _relocated(moving)
        timings, baseline_first = _in_turn(ready, order, settings.l2 == COLD, result)
        if index % LOOK_EVERY == 0:
            _look(ready, order, settings.l2 == COLD)
        after = read()  # last: a card rests meanwhile, so that every pair finds it rested
        result.pairs.append(Pair(*timings, baseline_first, MAIN, _known(before, after)))
        before = after
        tell(index + 1)
        if "again" in ready and index % CONTROL_EVERY == 0:
            _rest(arms["candidate"])
            result.pairs += _controls(ready["baseline"], ready["again"], order, read, cycle, settings.l2 == COLD)
            before = read()
    if settings.l2 == "both":
        _add_cold_pairs(ready, order, at_least, read, result)
    for arm in others:
        _refuse_other_standing(arm, standing[arm.pid])
    _time_single_steps_again(arms["candidate"], result)
    result.recompiled = compiled != {name: _compilations(arm) for name, arm in arms.items()}
    return ready


def _relocated(arms: Mapping[str, Client[Arm]]) -> dict[str, Client[Arm]]:
    """Arms whose tensors lie in other places now, by name. All move at once, as no block is timed meanwhile."""
    moving = {name: arm.start(Arm.relocate) for name, arm in arms.items()}
    moved = {name: answer.wait() for name, answer in moving.items()}
    return {name: arm for name, arm in arms.items() if moved[name]}


def _refuse_other_standing(arm: Client[Arm], before: Mapping[int, Standing]) -> None:
    """Raises Failure where the cores or the priority of a thread changed while an arm without a stack was timed."""
    after = standings(arm.pid)
    if any(after.get(thread, standing) != standing for thread, standing in before.items()):
        text = "its cores or its priority changed while it was timed: another process may have done that"
        raise Failure(UNTIMED, text, worker=arm.name)


def _add_cold_pairs(ready: Mapping[str, Ready], order: Random, count: int, read: Read, result: Sample) -> None:
    """Pairs with an emptied L2 cache, after the warm ones."""
    for index in range(count):
        before = read()
        timings, baseline_first = _in_turn(ready, order, True, result)
        result.pairs.append(Pair(*timings, baseline_first, COLD, _known(before, read())))
        if index % LOOK_EVERY == 0:
            _look(ready, order, cold=True)


def _time_single_steps_again(candidate: Client[Arm], result: Sample) -> None:
    """Repeat the times of single steps while the candidate seems to compute ahead: another program may have delayed
    the first ones."""
    for _ in range(LOOKS_AGAIN):
        if ahead_of_steps([result]).ok:
            break
        again = candidate.call(Arm.warm_up, limit_s=AGAIN_S)
        result.alone_later.setdefault("candidate", []).append(again.alone_s)


def sample_alone(
    arm: Client[Arm],
    settings: MeasurementSettings,
    order: Random,
    read: Read = lambda: None,
    cycle: int = 1,
    tell: Callable[[int], None] = lambda done: None,
) -> Sample:
    """Measure the baseline alone; the two blocks of each pair are one and the same."""
    result = Sample()
    ready = _warmed("baseline", arm, settings, order, cycle, result)
    ready = replace(ready, steps=_multiple(ready.steps, cycle), turn=cycle)
    compiled, begin, before = _compilations(arm), now(), read()
    long = result.planned_s["baseline"] >= settings.block_ms / 1e3
    for index in range(settings.pairs):
        if index >= (FEWEST if long else 10) and now() - begin > settings.process_s:
            break
        timing = ready.block(ready.jittered(_swing(order)), settings.l2 == COLD)
        after = read()
        result.pairs.append(Pair(timing, timing, True, MAIN, _known(before, after)))
        before = after
        tell(index + 1)
    result.recompiled = compiled != _compilations(arm)
    return result


def _in_turn(
    ready: Mapping[str, Ready], order: Random, cold: bool, result: Sample
) -> tuple[tuple[Timing, Timing], bool]:
    """A block of each arm, in an order drawn at random, and whether the baseline came first.

    `result` gets the CPU time of the waiting arms, and that of the second arm after its block.
    """
    baseline_first, swing, batch = order.random() < 0.5, _swing(order), _first()
    timings: dict[str, Timing] = {}
    for name in ("baseline", "candidate") if baseline_first else ("candidate", "baseline"):
        others = {other: ready[other].arm for other in ready if other != name}
        _rest(*others.values())
        with _watched(others, result):
            steps = ready[name].jittered(swing)
            timings[name] = ready[name].block(steps, cold, anywhere=steps == 1, first=batch)
    if (late := ready[name].late(timings[name])) is not None:
        result.late.setdefault(name, []).append(late)
    return (timings["baseline"], timings["candidate"]), baseline_first


def _swing(order: Random) -> float:
    """A random factor of a block's length, so that a program cannot predict the number of a timed call."""
    return order.uniform(0.9, 1.1)


def _look(ready: Mapping[str, Ready], order: Random, cold: bool) -> None:
    """Run a block of the candidate whose end is verified, and one of the baseline.

    Without the baseline's block, the candidate would follow itself wherever it comes first in the next pair.
    """
    for name in order.sample(("baseline", "candidate"), 2):
        _rest(*(ready[other].arm for other in ready if other != name))
        ready[name].look(order, cold)


def look_enough(candidate: Ready, order: Random, cold: bool) -> None:
    """Run more blocks, until so many ends are kept that a fault is missed rarely enough."""
    for _ in range(len(candidate.arm.call(Arm.timed_ends)), LOOKS):
        candidate.look(order, cold)


def _first() -> int:
    """The number of a block's first batch, which the arm takes modulo the number of its batches."""
    return _ANY.getrandbits(16)


def _on_the_same_batches(
    ready: Mapping[str, Ready], cycle: int, period: int, planned_s: Mapping[str, float]
) -> tuple[dict[str, Ready], str]:
    """Lengthen blocks so that all arms meet the same mix of batches, and the reason where that would take too long.

    A block meets all batches equally often. Where there are more batches than a block has steps, or an unknown number,
    the blocks of all arms get one length: the arm with the shorter blocks may have met the cheaper batches otherwise.
    Batches of one size, and sizes that take turns (`cycle`), need no reason.

    Args:
        period: Steps after which the batches repeat; 1: all are alike; 0: unknown.
        planned_s: Seconds of a step, by arm.
    """
    longest = max(arm.steps for arm in ready.values())
    if 0 < period <= longest:
        turn = lcm(period, cycle)
        return {name: replace(arm, steps=_multiple(arm.steps, turn), turn=turn) for name, arm in ready.items()}, ""
    steps, lead_in = _multiple(longest, cycle), max(arm.lead_in for arm in ready.values())
    lasting = {name: (steps + lead_in) * planned_s[name] for name, arm in ready.items() if steps > arm.steps}
    if not lasting or max(lasting.values()) <= LONGEST_S:
        return {name: replace(arm, steps=steps, lead_in=lead_in, turn=cycle) for name, arm in ready.items()}, ""
    slow, block_s = max(lasting.items(), key=lambda item: item[1])
    sizes_differ = not period or ready["baseline"].arm.call(Arm.has_loader)
    return dict(ready), f"{steps} steps of the {slow} would take {block_s:.0f} s" if sizes_differ else ""


def _multiple(steps: int, of: int) -> int:
    """`steps` rounded up to a multiple."""
    return -(-steps // of) * of


def _known(*readings: Reading | None) -> tuple[Reading, ...]:
    return tuple(reading for reading in readings if reading)


def _rest(*arms: Client[Arm]) -> None:
    """Wait until the threads of these arms are at rest."""
    for arm in arms:
        if pid := arm.pid:
            until_at_rest(pid, REST_S)


@contextmanager
def _watched(idle: Mapping[str, Client[Arm]], result: Sample) -> Iterator[None]:
    """Note the CPU time of waiting arms, as a share of the block and of its cores: they take it from the timed arm."""
    pids = {name: pid for name, arm in idle.items() if (pid := arm.pid)}
    begin, before = now(), {name: _all_worked_s(pid, result) for name, pid in pids.items()}
    yield
    seconds = now() - begin
    for name, pid in pids.items():
        with suppress(ProcessLookupError):  # it ended, and its next call tells how
            share = (_all_worked_s(pid, result) - before[name]) / seconds / len(os.sched_getaffinity(pid))
            result.idle.setdefault(name, []).append(share)


def _all_worked_s(pid: int, result: Sample) -> float:
    """CPU seconds of an arm and, where no batches are made in the background, of the processes that it has started."""
    return worked_s(pid) + (0.0 if result.queue > 1 else helped_s(pid))


def _controls(baseline: Ready, again: Ready, order: Random, read: Read, cycle: int, cold: bool) -> list[Pair]:
    """The baseline beside its own double and, where a block has 20 steps, beside itself with a delay of 5 %.

    The delay is exact: 21 steps (or turns of all kinds of batch) are reported as 20. Cold steps have none, as their
    time is a median.
    """
    steps, unit = baseline.jittered(_swing(order)), 20 * cycle
    counted = max(unit, steps // unit * unit) if baseline.steps >= unit and not cold else 0
    kinds = [MAIN, SAME, *([DELAYED] if counted else [])]
    at, timings, before = {}, {}, read()
    for place, kind in enumerate(order.sample(kinds, len(kinds))):
        run = steps if kind != DELAYED else counted * 21 // 20
        chosen, other = (again, baseline) if kind == SAME else (baseline, again)
        _rest(other.arm)
        timing = chosen.block(run, cold)
        at[kind] = place
        timings[kind] = timing.told_as(counted) if kind == DELAYED else timing
    readings = _known(before, read())
    return [Pair(timings[MAIN], timings[kind], at[MAIN] < at[kind], kind, readings) for kind in kinds if kind != MAIN]


def _warmed(
    name: str, arm: Client[Arm], settings: MeasurementSettings, order: Random, cycle: int, result: Sample
) -> Ready:
    """Warm an arm up, and plan the length of its blocks; `result` gets the times of single steps.

    A single step that is waited for may take several times as long as one of many, so trial blocks set the length.
    A loader's queue fills while nothing is timed, and would make a loop look far too fast: so the lead-in empties it,
    and a block is many times as long as the queue.
    """
    steady = arm.call(Arm.warm_up, limit_s=settings.warmup_s)
    result.timer_s[name] = steady.timer_s
    result.alone[name], result.constant = steady.alone_s, tuple(steady.constant)
    queue, step_s = steady.queue, median(steady.alone_s)
    result.queue = max(result.queue, queue)
    at_least = QUEUES * queue
    ready = Ready(arm, max(1, at_least), max(1, queue), cycle)
    if step_s < 0.1:
        duration = max(settings.block_ms / 1e3, 200 * steady.timer_s)
        ready = replace(ready, lead_in=max(2, queue))
        for _ in range(TRIALS):
            ready = replace(ready, steps=max(ceil(duration / step_s), at_least))
            step_s = min(step_s, ready.block(ready.jittered(_swing(order))).wall_s)
        ready = replace(ready, steps=max(ceil(duration / step_s), at_least))
    result.planned_s[name] = step_s
    return ready


def _compilations(arm: Client[Arm]) -> float:
    """Number of compilations and of autotuned kernels so far."""
    counters = arm.call(Arm.counters)
    return sum(n for name, n in counters.items() if name in COMPILED or "autotune" in name)
