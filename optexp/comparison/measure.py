"""Rounds of new processes of each arm, until the interval over the processes is narrow enough."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, exp, pi, sqrt
from pathlib import Path
from random import Random
from statistics import fmean, median, variance

from optexp.comparison.physics import bound, recalibrate
from optexp.comparison.sampling import QUEUES, Ready, look_enough, sample
from optexp.comparison.session import Session
from optexp.comparison.spread_of_processes import HOST_BOUND, busy_shares, expected, pairs_suffice
from optexp.comparison.under_load import under_load
from optexp.errors import Distrusted
from optexp.measurement import controls, placement, samples_file, statistics
from optexp.measurement.floor import floor_s
from optexp.measurement.gpu import Gpu
from optexp.measurement.neighbours import neighbours
from optexp.measurement.samples import COLD, CONTROL_EVERY, RETRIED, UNBOUND, Sample
from optexp.measurement.settings import MeasurementSettings
from optexp.measurement.watchdogs import impossible
from optexp.records import filenames
from optexp.records.folder import tolerating
from optexp.records.measurement import Control
from optexp.result import ArmSummary, Result
from optexp.support.units import duration, ratio
from optexp.workers.arm import Arm
from optexp.workers.client import Client

ENDING_S = 2.0  # for which another process on the GPU may still be ending
FEWEST_PAIRS = 10
RESTART_PAIRS = 40  # pairs that take as long as the start and warm-up of processes, about 2 s
ON_STREAM = 0.7  # cold step over busy time of a warm step, below which the cold step leaves work out
SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
CONTEXT_MIB = 1024  # least GPU memory that a process takes beside its tensors


def refuse_company(session: Session) -> None:
    """Refuse other processes on the GPU before anything is measured; verification alone may run beside them.

    Raises:
        Distrusted: The GPU is shared.
    """
    if session.machine.gpu is None or session.experiment.verify == "only":
        return
    ours = [*session.pool.processes(), *session.quiet.others]  # a profiled arm lives already
    look, end = partial(neighbours, session.machine.gpu, ours=ours), time.monotonic() + ENDING_S
    accepted, (found, hidden) = session.experiment.environment.allow_foreign, look()
    while found and not accepted and time.monotonic() < end:
        time.sleep(0.1)
        found, hidden = look()
    note_hidden(session.result, hidden)
    if found and not accepted:
        raise Distrusted(
            f"the GPU is shared with {', '.join(found)}: end that, or accept it with environment.allow_foreign=true",
        )


def note_hidden(result: Result, count: int) -> None:
    """Note once how many processes on the GPU cannot be identified."""
    text = f"{count} processes on the GPU have ids that mean nothing here (another container's): they may disturb"
    if count > 0 and text not in result.notes:
        result.notes.append(text)


@dataclass
class Timed:
    """Timed blocks of several processes of each arm; the last processes live until `close_arms`.

    samples:     those on which the verdict rests, one for each round
    beside:      others: controls, and arms that are bound to no cores
    setups_s:    seconds of set-up of each process, by arm
    differences: settings that differ between both arms, as "one → other"
    unbound:     the ratio on all cores, in words; empty where it was not measured
    due:         controls are to be run
    known:       file of remembered controls; None where they are run every time
    """

    order: Random
    samples: list[Sample] = field(default_factory=list)
    beside: list[Sample] = field(default_factory=list)
    arms: dict[str, Client[Arm]] = field(default_factory=dict)
    setups_s: dict[str, list[float]] = field(default_factory=dict)
    differences: dict[str, str] = field(default_factory=dict)
    controls: dict[str, Control] = field(default_factory=dict)
    unbound: str = ""
    due: bool = False
    known: Path | None = None

    def close_arms(self) -> None:
        for arm in self.arms.values():
            arm.close()
        self.arms = {}


def measure(session: Session, verified: Callable[[Timed], bool] = lambda timed: True, fresh: bool = False) -> Timed:
    """Time both arms in rounds, verify the process that was timed last, and run the controls.

    Args:
        verified: Checks the last arms while they live. False: the measurement ends without controls.
        fresh: Controls are run although they are known; always so for two versions.

    Raises:
        Distrusted: A measurement cannot be believed.
    """
    try:
        with timing(session, fresh or session.pool.homes is not None) as timed:
            rounds(session, timed)
            sound = verified(timed)
            timed.close_arms()
            if not sound:
                return timed
            judge_controls(session, timed)
            explain_the_host(session, timed)
    finally:
        session.quiet.end()
    session.refuse_edits()
    return timed


@contextmanager
def timing(session: Session, fresh: bool = False) -> Iterator[Timed]:
    """Around the rounds: keeps other processes off their cores, and writes every block down, however the rounds end.

    Args:
        fresh: Controls are run although they are known.
    """
    # The load of a CPU changes, so its controls are run every time.
    known = controls.cache_file(fingerprint(session)) if session.machine.gpu and not fresh else None
    timed = Timed(Random(session.draws.seed("order")), known=known)
    timed.controls = controls.remembered(known) if known else {}
    timed.due = bool(session.settings.controls and not timed.controls and room_for_a_third(session))
    try:
        with placement.keep_off(session.machine.cores if session.isolated else []):
            yield timed
    finally:
        with tolerating(session.result.notes):
            samples_file.write([*timed.samples, *timed.beside], session.output / filenames.SAMPLES)


def rounds(session: Session, timed: Timed) -> None:
    """Processes of each arm, until their interval is narrow enough or the budget is spent."""
    settings, phases = session.settings, session.watch.seconds
    already = sum(phases.values())
    while True:
        index, samples = len(timed.samples), timed.samples
        control = timed.due and index < settings.processes_min
        found, ready = one_round(session, timed, index, next_pairs(samples, settings), samples, control)
        timed.arms = {name: each.arm for name, each in ready.items()}
        spent = sum(phases.values()) - already
        interval = statistics.over_processes([s.log_ratio for s in samples], settings.confidence)
        precise = statistics.precise_enough(interval, settings.half_width)
        remaining = to_go_s(len(samples), spent, precise, settings)
        count = f"{len(samples)} process{'es' if len(samples) > 1 else ''}"
        session.progress.update(f"{count} measured", remaining_s=remaining)
        if settings.enough(len(samples), precise, spent):
            break
        timed.close_arms()
    look_at_load(session, timed.arms, found)
    baseline = timed.arms["baseline"]
    find_floor(session, samples, baseline)
    timed.differences = differences(timed.arms, session.result)
    look_enough(ready["candidate"], timed.order, settings.l2 == COLD)
    session.check_identities(timed.arms)


def judge_controls(session: Session, timed: Timed) -> None:
    """Judge the controls; those that failed are run again in new processes."""
    if not timed.due:
        return
    timed.controls = controls.judge(timed.samples, session.settings, expected(session, timed.samples))
    if controls.failed(timed.controls):
        measure_controls_again(session, timed)
        timed.controls = controls.judge(timed.beside, session.settings, expected(session, timed.beside))
    if timed.known:
        controls.remember(timed.known, timed.controls)


def explain_the_host(session: Session, timed: Timed) -> None:
    """Note which arms keep the GPU waiting, and measure the ratio on all cores where they do."""
    result, samples = session.result, timed.samples
    refuse_work_aside(result, samples)
    how_busy(result, samples)
    if waiting := host_bound(result):
        result.notes.append(waiting)
        machine, several = session.machine, session.settings.processes_max > 1
        if several and session.isolated and set(machine.cores) < machine.own_cores:
            measure_unbound(session, timed)
            timed.unbound = how_unbound(session, timed.beside[-1])
    say_how_to_lock(session, samples)


def to_go_s(done: int, spent_s: float, precise: bool, settings: MeasurementSettings) -> float:
    """A forecast of the remaining seconds: to the fewest processes, and to the budget's end while not `precise`."""
    each = max(spent_s / done, 1e-3)
    least = max(settings.processes_min - done, 0)
    budget = 0 if precise else max(0, ceil((settings.budget_s - spent_s) / each))
    return max(least, min(settings.processes_max - done, budget)) * each


def refuse_work_aside(result: Result, samples: Sequence[Sample]) -> None:
    """Refuse cold steps that leave work to another stream, as events on their own stream do not see it.

    Raises:
        Distrusted: An arm does so.
    """
    for name in ("baseline", "candidate"):
        busy_us = getattr(result, name).busy_us or 0.0
        counted = [p for s in samples for p in (*s.kept, *s.of(COLD)) if p.counts]
        cold = [timing for pair in counted if (timing := getattr(pair, name)).cold]
        if cold and (cold_us := median(timing.step_s for timing in cold) * 1e6) < ON_STREAM * busy_us:
            raise Distrusted(
                f"a step of the {name} keeps the GPU busy for {duration(busy_us / 1e6)} and its own stream for"
                f" {duration(cold_us / 1e6)}: that stream does not wait for all of the work",
            )


def how_busy(result: Result, samples: Sequence[Sample]) -> None:
    """Set `gpu_busy` of both arms: the share of a timed step in which the GPU works."""
    for name, share in busy_shares(result, samples).items():
        summary: ArmSummary = getattr(result, name)
        assert summary.busy_us is not None
        samples[-1].busy_s[name], summary.gpu_busy = summary.busy_us / 1e6, share


def host_bound(result: Result) -> str:
    """The arms that keep the GPU waiting, in words; empty where none does, or without a GPU."""
    arms = {"baseline": result.baseline.gpu_busy, "candidate": result.candidate.gpu_busy}
    said = [f"{busy:.0%} of the {arm}'s step" for arm, busy in arms.items() if busy is not None and busy < HOST_BOUND]
    return f"host-bound: the GPU is busy {' and '.join(said)}" if said else ""


def measure_unbound(session: Session, timed: Timed) -> None:
    """Measure one more process that is bound to no cores, as the speed of the host depends on them."""
    _, ready = one_round(session, timed, len(timed.samples), FEWEST_PAIRS, timed.beside, aim=UNBOUND, bound=False)
    for each in ready.values():
        each.arm.close()


def how_unbound(session: Session, found: Sample) -> str:
    """The ratio and both times of an unbound process, in words."""
    times = [median(getattr(pair, name).wall_s for pair in found.kept) for name in ("baseline", "candidate")]
    took = f"{duration(times[0])} and {duration(times[1])}"
    cores = len(session.machine.own_cores)
    return f"free on all {cores} cores it is {ratio(exp(found.log_ratio))} ({took}, one process)"


def say_how_to_lock(session: Session, samples: Sequence[Sample] = ()) -> None:
    """Note the command that locks the GPU's clocks, where asked for; optexp only reads clocks."""
    if not session.settings.lock_clocks:
        return
    readings = [reading for sample in samples for pair in sample.kept for reading in pair.readings]
    readings += [session.machine.gpu.read()] if session.machine.gpu and not readings else []
    clocks, text = [r.sm_mhz for r in readings if r.sm_mhz], "there are no GPU clocks to hold here"
    if session.machine.gpu and clocks:
        seen = f"they were {min(clocks):.0f} to {max(clocks):.0f} MHz"
        text = f"{seen}; an administrator holds them with {session.machine.gpu.lock_command(min(clocks))}"
    session.result.notes.append(f"lock_clocks: {text}")


def measure_controls_again(session: Session, timed: Timed) -> None:
    """Repeat controls in new processes: one in a hundred fails by chance."""
    for index in range(session.settings.processes_min):
        pairs = FEWEST_PAIRS * CONTROL_EVERY
        _, ready = one_round(session, timed, index, pairs, timed.beside, control=True, aim=RETRIED)
        for each in ready.values():
            each.arm.close()


def fingerprint(session: Session) -> str:
    """Digest of everything that controls depend on: device, workload and its code, baseline."""
    environment, config = session.result.environment, session.result.config
    facts = [
        {k: v for k, v in config.items() if k.startswith(("workload", "baseline", "dtype", "measurement"))},
        [environment.get(key) for key in ("gpu_uuid", "driver", "cpu", "torch", "triton")],
        session.machine.cores,
        [hashlib.sha256(code).hexdigest() for code in session.workload.code()],
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def room_for_a_third(session: Session) -> bool:
    """Whether a second baseline fits on the GPU, by the memory in its profile; if not, a note says so."""
    free = session.machine.gpu.free_mib() if session.machine.gpu else None
    arms = session.result.profile.arms()
    profiles = [arms[arm].metrics if arm in arms else {} for arm in ("baseline", "baseline", "candidate")]
    needed = [found.get("memory_reserved_mib", 0.0) + CONTEXT_MIB for found in profiles]
    if free is None or free > sum(needed):
        return True
    session.result.notes.append("no controls: the GPU has no room for a second baseline")
    return False


def one_round(
    session: Session,
    timed: Timed,
    index: int,
    pairs: int,
    into: list[Sample],
    control: bool = False,
    aim: str = "",
    bound: bool = True,
) -> tuple[Sample, Mapping[str, Ready]]:
    """Start one process of each arm, and measure them in turn.

    Args:
        into: Gets the sample before it is filled, so that an exception loses no block.
        control: A second baseline is measured, too.
        aim: See `Sample.aim`.
        bound: Arms are bound to their cores.

    Returns:
        The sample, and the arms, which still live.
    """
    gpu, since_s = session.machine.gpu, time.time()
    session.quiet.end()  # arms start beside others
    stacks = {"baseline": session.baseline, "candidate": session.stack}
    if control:
        stacks["again"] = session.baseline
    with session.working("arms", f"process {index + 1}: starting both arms"):
        specs = {name: session.spec(stack, seed_offset=index) for name, stack in stacks.items()}
        specs = specs if bound else {name: replace(spec, cores=()) for name, spec in specs.items()}
        starting = session.pool.start(specs)
        # Of processes started with warm caches and two at a time; the very first is in `cost`.
        told = {name: each.setup.wait() for name, each in starting.items()}
        arms = {name: each.arm for name, each in starting.items()}
        session.check_identities(arms)
        for name in told if bound else ():
            timed.setups_s.setdefault(name, []).append(told[name].setup_s)
    queue = max(setup.queue for setup in told.values())
    if session.quiet.others:
        session.begin_quiet()
        since_s = time.time()
    ahead = f" blocks of some {QUEUES * queue} steps, for loaders make {queue} batches ahead" if queue > 1 else ""
    doing = f"process {index + 1}: measuring pairs{ahead}"
    with session.working("measurement", doing):
        met = dict[str, str]()
        read = session.looking_out(since_s, met)
        tell = partial(session.progress.update, doing, total=pairs)
        into.append(found := Sample(aim=aim))
        enough = partial(pairs_suffice, session)
        ready = sample(arms, session.settings, timed.order, pairs, read, session.workload.variety, tell, found, enough)
        if gpu:
            found.foreign = others_on_the_gpu(session, gpu, arms, since_s, met)
    return found, ready


def others_on_the_gpu(
    session: Session, gpu: Gpu, arms: Mapping[str, Client[Arm]], since_s: float, met: dict[str, str]
) -> tuple[str, ...]:
    """Other processes that used the GPU while the arms were measured, in words.

    Args:
        since_s: Unix time at which the arms were started.
        met: Those that were seen between pairs, by process.
    """
    foreign, hidden = session.neighbours(since_s)
    # An arm without an entry of its own is counted as hidden: its id is another one in the driver's container.
    unseen = {arm.pid or os.getpid() for arm in arms.values()} - gpu.processes().keys()
    note_hidden(session.result, hidden - len(unseen))
    return tuple((met | {text.partition(",")[0]: text for text in foreign}).values())


def find_floor(session: Session, samples: Sequence[Sample], baseline: Client[Arm]) -> None:
    """Set the physical lower bound of a step in the last sample.

    Where a step beats it, the device's ceilings may have been measured beside other programs: they are measured again.
    Beside other programs there is no bound, as it would refuse honest steps.
    """
    found = samples[-1]
    found.floor_s = floor(session, baseline)
    if impossible(samples).ok:
        return
    recalibrate(session, baseline.call(Arm.calibrate, anew=True, keep=not found.foreign))
    found.floor_s = 0.0 if found.foreign else floor(session, baseline)


def floor(session: Session, baseline: Client[Arm]) -> float:
    """The physical lower bound of a step in seconds; 0 on a CPU, and where it is not known.

    A single operation reads all of its inputs and parameters; a larger program may not. A CPU's ceilings may have been
    measured beside other programs, so its bound is shown and refuses nothing.
    """
    calibration = session.calibration
    if session.machine.gpu is None or calibration is None:
        return 0.0
    whole = bound(session, session.contract)
    whole_s = (whole.us or 0.0) / 1e6 if whole is not None else 0.0
    if not session.workload.operation:
        return whole_s
    given, computed = session.experiment.dtype, session.contract.dtype or session.experiment.dtype
    narrower = SIZES.get(computed, 4) / SIZES[given]
    moved, cached = baseline.call(Arm.moved)
    return max(whole_s, floor_s(moved, cached, session.workload.flops, calibration, computed, min(1.0, narrower)))


def differences(arms: Mapping[str, Client[Arm]], result: Result) -> dict[str, str]:
    """Settings of torch, Python and the model that differ between both processes, as "one → other".

    The number of times that a profiled step waits for the GPU is among them.
    """
    theirs, ours = (arms[name].call(Arm.configuration) for name in ("baseline", "candidate"))
    found = {name: f"{theirs[name]} → {value}" for name, value in ours.items() if theirs.get(name) != value}
    traced = result.profile.arms()
    profiles = [traced[arm].metrics if arm in traced else {} for arm in ("baseline", "candidate")]
    before, after = (round(metrics.get("synchronisations") or 0) for metrics in profiles)
    return found if before == after else found | {"waits for the GPU in a step": f"{before} → {after}"}


def look_at_load(session: Session, arms: Mapping[str, Client[Arm]], found: Sample) -> None:
    """Measure energy and utilisation of each arm on a GPU, into the sample."""
    if session.machine.gpu is None or not session.settings.load_s or session.settings.l2 == COLD:
        return
    for name in ("baseline", "candidate"):
        with session.working("measurement", f"energy of the {name}"):
            step_s = median(getattr(pair, name).wall_s for pair in found.kept)
            found.load[name] = under_load(arms[name], session.machine.gpu, step_s, session.settings.load_s)


def next_pairs(samples: Sequence[Sample], settings: MeasurementSettings) -> int:
    """The number of pairs for the next process: few where processes differ more than blocks; half of all at first.

    The narrowest interval for the time spent has √(cost of a restart in pairs · variance of a pair / variance of a
    process) pairs; a median of n pairs has π/2 times the variance of their mean.
    """
    if len(samples) < 3:  # which is more, is not known yet
        half = min(settings.pairs, max(settings.pairs // 2, FEWEST_PAIRS))
        return settings.pairs if settings.processes_max == 1 else half
    if any(len(sample.kept) < 2 for sample in samples):
        return settings.pairs
    blocks = fmean(pi / 2 * variance([p.log_ratio for p in s.kept]) for s in samples)
    processes = variance([s.log_ratio for s in samples]) - blocks / fmean(len(s.kept) for s in samples)
    if processes <= 0:
        return settings.pairs
    return min(settings.pairs, max(FEWEST_PAIRS, round(sqrt(RESTART_PAIRS * blocks / processes))))
