"""Watchdogs: predicates over samples that refuse a measurement, leave it undecided, or remark on it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import hypot, pi, sqrt
from statistics import correlation, fmean, median, stdev

from optexp.measurement.gpu import POWER_CAP, between
from optexp.measurement.samples import COLD, MAIN, Sample
from optexp.records.measurement import About, Severity, Watch
from optexp.support.units import duration, ratio

REMARK, UNDECIDES, REFUSES, MACHINE = Severity.REMARK, Severity.UNDECIDES, Severity.REFUSES, About.MACHINE
FOREIGN, PILED = "foreign processes", "work ahead"
SLOW_START = 20.0  # single step over mean step of a block; short steps are below, though each waits for the device
TYPICAL = 0.5  # single step over mean step of a block, below which some steps do the work of others
ALIKE = 0.8  # the same ratio of the baseline, below which its batches differ in size
RESTLESS = 0.1  # share of its cores by which a waiting arm may be busier than the other arm when waiting
DROPPED = 0.1  # share of pairs that may be dropped
VISIBLE = 0.02  # relative gap of modes that can change a verdict; of drifts, half of it
ASIDE = 0.5  # block durations: most extra time, beyond the baseline's, that the candidate keeps its caller waiting
CROWDED = 0.1  # share of the time without a core; at most 0.06 on a machine that ran nothing else
RARE = 0.15  # share of blocks below which a second mode is a few disturbed blocks


def _blind(name: str, text: str, about: About = About.ARMS) -> Watch:
    """The watch of a watchdog that has no data."""
    return Watch(name, True, text, about=about, looked=False)


def recompilation(samples: Sequence[Sample]) -> Watch:
    """Refuse blocks in which torch.compile compiled: they hold more than steps."""
    count = sum(sample.recompiled for sample in samples)
    text = f"torch.compile compiled again while measuring, in {count} of {len(samples)} processes"
    return Watch("recompilation", count == 0, text if count else "none while measuring", severity=REFUSES)


def slow_start(samples: Sequence[Sample]) -> Watch:
    """Refuse an arm whose steps are slow only while blocks are planned, which makes its blocks short.

    Single steps and trial blocks set the length of blocks. The quickest single step counts, as another program may
    have disturbed the others. Where the baseline was as slow, or other programs took cores during blocks, the cause is
    unknown: the measurement is undecided.
    """
    slowdowns = {
        arm: median(_slowdown(sample, arm) for sample in samples)
        for arm in ("baseline", "candidate")
        if all(sample.alone.get(arm) for sample in samples)
    }
    slow = [arm for arm, slowdown in slowdowns.items() if slowdown >= SLOW_START]
    shared = _shared(samples)
    excused = shared or "baseline" in slow
    severity = UNDECIDES if excused else REFUSES
    if not slowdowns:
        return Watch("slow start", True, "no warm-up to compare with", severity, MACHINE)
    slowest, slowdown = max(slowdowns.items(), key=lambda item: item[1])
    text = f"steps of the {slowest} took {slowdown:.3g} times as long while warming up as in a block"
    if slow and excused:
        text += f", as may be due to other programs on its {shared or 'cores'}"
        text += ": its blocks may be too short to decide anything"
    return Watch("slow start", not slow, text, severity, MACHINE)


def _shared(samples: Sequence[Sample]) -> str:
    """The part of the machine that other programs used while arms were timed; empty if none."""
    if any(sample.foreign for sample in samples):
        return "GPU"
    return "" if cores(samples).ok else "cores"


def _slowdown(sample: Sample, arm: str) -> float:
    """Seconds of a step while blocks were planned over those of a step in a typical block, in one process."""
    single_s = min(sample.alone[arm]) - sample.timer_s.get(arm, 0.0)
    planned_s = sample.planned_s.get(arm, 0.0)
    block_step_s: float = median(getattr(pair, arm).wall_s for pair in sample.kept)
    return max(single_s, planned_s) / block_step_s


def ahead_of_steps(samples: Sequence[Sample]) -> Watch:
    """Refuse a candidate that computes the results of several steps in one.

    Its other steps do nothing, so a typical single step, which is waited for, takes less than the mean step of every
    block. An honest single step takes longer, as it holds all work of a step and the wait.

    An honest arm is refused only if other programs slow every block of a process to twice its typical single step, but
    no block of the baseline between them. With eight blocks, of which one in ten is disturbed, the chance is 1e-8
    (`chance`). Blocks are not independent while other programs come and go, so single steps are timed again after
    the blocks (`Sample.alone_later`). On a machine that is crowded, by the baseline's single steps or by the time
    without a core, the measurement is undecided.
    """
    if any(sample.queue > 1 for sample in samples) or any(p.candidate.cold for s in samples for p in s.kept):
        return _blind(PILED, "batches are made in the background, or caches are emptied between steps")
    shares = {
        arm: median(s.single_s(arm) / min(getattr(p, arm).wall_s for p in s.kept) for s in samples)
        for arm in ("baseline", "candidate")
        if all(s.alone.get(arm) for s in samples)
    }
    ours, theirs = shares.get("candidate", 1.0), shares.get("baseline", 1.0)
    text = (
        f"a single step of the candidate takes {ratio(ours)} the mean step of a block, of the baseline {ratio(theirs)}"
    )
    ok = ours >= TYPICAL or not ALIKE <= theirs < SLOW_START
    excused = not cores(samples).ok
    text += "" if ok else ", as may be due to other programs" * excused or ": one step computes the results of several"
    return Watch(PILED, ok, text, severity=UNDECIDES if excused else REFUSES)


def chance(disturbed: float, blocks: int) -> float:
    """Probability that all blocks are disturbed, each independently with probability `disturbed`."""
    return disturbed**blocks


def skipped_steps(samples: Sequence[Sample]) -> Watch:
    """Drop pairs with a step that a GradScaler left out, as it is shorter; refuse where too many are dropped."""
    pairs = [pair for sample in samples for pair in sample.of(MAIN)]
    skipped = sum(pair.skipped for pair in pairs)
    text = f"{skipped} of {len(pairs)} pairs dropped, because gradients overflowed in a step"
    fatal = skipped > DROPPED * len(pairs) or nothing_left(samples)
    return Watch("skipped steps", not skipped, text if skipped else "none", REFUSES if fatal else REMARK)


def throttling(samples: Sequence[Sample]) -> Watch:
    """Drop pairs in which heat or power supply slowed the GPU; refuse where too many are dropped."""
    pairs = [pair for sample in samples for kind in (MAIN, COLD) for pair in sample.of(kind)]
    clocks = [r.sm_mhz for pair in pairs for r in pair.readings if r.sm_mhz]
    if not any(pair.readings for pair in pairs):
        return _blind("throttling", "no clocks to read on this device", MACHINE)
    reasons = Counter(reason for pair in pairs for reason in pair.slowed)
    dropped = sum(bool(pair.slowed) for pair in pairs)
    text = f"SM clock {min(clocks):.0f} to {max(clocks):.0f} MHz" if clocks else "clocks unknown"
    if dropped:
        named = ", ".join(name for name, _ in reasons.most_common())
        text = f"the GPU was slowed ({named}): {dropped} of {len(pairs)} pairs dropped; {text}"
    severity = REFUSES if dropped > DROPPED * len(pairs) or nothing_left(samples) else REMARK
    return Watch("throttling", dropped == 0, text, severity, MACHINE)


def nothing_left(samples: Sequence[Sample]) -> bool:
    """Whether a process has no pair that counts; its statistic then uses dropped pairs."""
    return any(main and not any(pair.counts for pair in main) for main in (s.of(MAIN) for s in samples))


def power_cap(samples: Sequence[Sample]) -> Watch:
    """Remark on a GPU at its power cap: power then limits its speed, so energy says more than time."""
    looks = [between(pair.readings) for sample in samples for pair in sample.of(MAIN) if pair.readings]
    looks += [r.reasons for sample in samples for load in sample.load.values() for r in load.readings]
    capped = sum(POWER_CAP in reasons for reasons in looks)
    if not looks:
        return _blind("power cap", "no power to read on this device", MACHINE)
    if not capped:
        return Watch("power cap", True, "not reached", about=MACHINE)
    share = capped / len(looks)
    text = f"the GPU was at its power limit in {share:.0%} of the looks: compare energy/step"
    return Watch("power cap", False, text, about=MACHINE)


def foreign(samples: Sequence[Sample]) -> Watch:
    """Refuse a measurement beside other processes on the same GPU."""
    seen = dict.fromkeys(text for sample in samples for text in sample.foreign)
    if not seen:
        if not any(pair.readings for sample in samples for pair in sample.pairs):
            return _blind(FOREIGN, "not checked: no GPU, or none that can be read", MACHINE)
        return Watch(FOREIGN, True, "none seen on the GPU", about=MACHINE)
    return Watch(FOREIGN, False, f"on the GPU while measuring: {', '.join(seen)}", REFUSES, MACHINE)


def waiting_arm(samples: Sequence[Sample]) -> Watch:
    """Refuse a candidate that works while the other arm is timed, or after it has reported the end of its block.

    Both arms share cores, so this work slows the other arm, and the candidate's clock does not see it. If the baseline
    does this, the measurement is undecided.
    """
    idle, late = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for sample in samples:
        for arm, shares in sample.idle.items():
            idle[arm] += shares
        for arm, blocks in sample.late.items():
            late[arm].append(sum(block.worked_s for block in blocks) / sum(block.block_s for block in blocks))
    excesses = [
        *_excess(idle, "keeps its cores {:.1%} busy while the other is timed"),
        *_excess(late, "goes on for {:.1%} of a block on its cores after it"),
    ]
    gap, text, restless = max(excesses, default=(0.0, "the arms have no processes of their own", ""))
    ok, severity = gap < RESTLESS, UNDECIDES if restless == "baseline" else REFUSES
    return Watch("waiting arm", ok, text if ok else f"{text}: does a thread of it never rest?", severity, MACHINE)


def _excess(shares: Mapping[str, Sequence[float]], words: str) -> Iterator[tuple[float, str, str]]:
    """The difference of both arms' shares, the same in words, and the busier arm; an arm without data has share 0."""
    if shares:
        found = sorted((median(shares.get(arm, [0.0])), arm) for arm in ("baseline", "candidate"))
        (least, quiet), (most, restless) = found
        yield most - least, f"the {restless} {words.format(most)}, the {quiet} {least:.1%}", restless


def aside(samples: Sequence[Sample]) -> Watch:
    """Refuse a candidate that works where its own clock does not see it.

    The caller's clock shows how long the caller waited beyond the reported steps. The CPU time of processes that the
    arm started shows work that it handed on to them; these processes are not bound to the arm's cores.
    """
    if any(sample.queue > 1 for sample in samples):
        return _blind("work aside", "batches are made in the background")
    pairs = [pair for sample in samples for pair in sample.kept]
    helped_s = median(pair.candidate.helped_s - pair.baseline.helped_s for pair in pairs)
    if helped_s >= RESTLESS * (step_s := median(pair.candidate.wall_s for pair in pairs)):
        text = f"other processes work {duration(helped_s)} for a step of the candidate that takes {duration(step_s)}"
        return Watch("work aside", False, f"{text}: work that it has handed on is not its own", severity=REFUSES)
    waits_s = sorted(pair.candidate.aside_s - pair.baseline.aside_s for pair in pairs)
    more = waits_s[len(waits_s) // 5]  # the 20th percentile, as a busy machine delays single calls by chance
    block_s = median(pair.candidate.wall_s * (pair.candidate.steps + 1) for pair in pairs)
    text = f"beside blocks of {duration(block_s)} the candidate keeps its caller waiting {duration(abs(more))}"
    text += f" {'longer' if more > 0 else 'less'} than the baseline"
    ok = more < ASIDE * block_s
    return Watch(
        "work aside", ok, text if ok else f"{text}: that is work that its clock does not see", severity=REFUSES
    )


def cores(samples: Sequence[Sample]) -> Watch:
    """Remark on arms that waited for a core: other programs slow dispatch, but not kernels."""
    shares = {
        arm: fmean(queued)
        for arm in ("baseline", "candidate")
        if (queued := [t.queued for s in samples for p in s.kept if (t := getattr(p, arm)).queued is not None])
    }
    if not shares:
        return _blind("cores", "it is not known whether they were free", MACHINE)
    arm, most = max(shares.items(), key=lambda item: item[1])
    text, ok = f"the {arm} had to wait for a core for {most:.0%} of its time", most < CROWDED
    return Watch("cores", ok, text if ok else f"{text}: other programs run here", about=MACHINE)


def constant_inputs(samples: Sequence[Sample]) -> Watch:
    """Remark on constant inputs: zeros switch few transistors, so a GPU draws less power and runs faster."""
    names = dict.fromkeys(name for sample in samples for name in sample.constant)
    if not names:
        return Watch("inputs", True, "no input is one value over and over")
    text = f"input {', '.join(names)} is one value over and over (zeros?): real data may run slower"
    return Watch("inputs", False, text)


def same_batches(samples: Sequence[Sample]) -> Watch:
    """Leave the measurement undecided if the arms were timed on batches of different sizes."""
    why = next((sample.uneven for sample in samples if sample.uneven), "")
    text = f"the arms were timed on different batches of a loader whose sizes differ, for {why}: pad them, or use fewer"
    return Watch(
        "batches", not why, f"{text} workers" if why else "blocks of both arms meet the same", severity=UNDECIDES
    )


def order_effect(samples: Sequence[Sample]) -> Watch:
    """Remark on a ratio that depends on which arm of a pair runs first."""
    pairs = [pair for sample in samples for pair in sample.kept]
    first = [p.log_ratio for p in pairs if p.baseline_first]
    second = [p.log_ratio for p in pairs if not p.baseline_first]
    if min(len(first), len(second)) < 5:
        return _blind("order", "too few pairs of each order to compare")
    gap = abs(median(first) - median(second))
    chance = 3 * sqrt(pi / 2) * hypot(*(stdev(ratios) / sqrt(len(ratios)) for ratios in (first, second)))
    text = f"ratio differs by {gap:.1%} between baseline-first and candidate-first pairs"
    return Watch("order", gap < max(0.05, chance), text)


def drift(samples: Sequence[Sample]) -> Watch:
    """Remark on a ratio that moves with time inside a process."""
    long = [ratios for s in samples if len(ratios := [p.log_ratio for p in s.kept]) >= 10 and len(set(ratios)) > 1]
    if not long:
        return _blind("drift", "too few pairs to see a drift")
    steady = median(correlation(range(len(ratios)), _ranks(ratios)) for ratios in long)
    third = [len(ratios) // 3 for ratios in long]
    change = median(median(r[-n:]) - median(r[:n]) for r, n in zip(long, third, strict=True))
    if abs(steady) < 0.7 or abs(change) < VISIBLE / 2:
        return Watch("drift", True, f"rank correlation of the ratio with time: {steady:+.2f}")
    text = f"the ratio moves by {change:+.1%} within a process (rank correlation with time {steady:+.2f})"
    return Watch("drift", False, f"{text}: the arms were not steady")


def _ranks(values: Sequence[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0] * len(values)
    for rank, index in enumerate(order):
        ranks[index] = rank
    return ranks


def two_modes(samples: Sequence[Sample]) -> Watch:
    """Remark on an arm with two speeds, as it has no typical one."""
    sentences = []
    times = {arm: [[getattr(p, arm).step_s for p in s.kept] for s in samples] for arm in ("baseline", "candidate")}
    for arm, other in (("baseline", "candidate"), ("candidate", "baseline")):
        modes = split([step for steps in times[arm] for step in steps])
        luck = [median(steps) for steps in times[other]]  # by process: a speed that both arms share is no mode
        if modes and split([step / by for steps, by in zip(times[arm], luck, strict=True) for step in steps]):
            (fast, share), (slow, rest) = modes
            sentences.append(
                f"the {arm} takes {duration(fast)} in {share:.0%} of its blocks, {duration(slow)} in {rest:.0%}"
            )
    return Watch("modes", not sentences, "; ".join(sentences) or "one mode in each arm")


def split(times: Sequence[float]) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """Median and share of each of two groups of times; None where the times form one group.

    The cut minimizes the variance within both groups (Otsu). In sums of both standard deviations, the halves of a
    normal distribution are 1.3 apart, those of a uniform one 1.7; two modes are more than 3 apart.
    """
    ordered = sorted(times)
    n, total = len(ordered), sum(ordered)
    if n < 10:
        return None
    sums, squares = list(accumulate(ordered)), list(accumulate(value * value for value in ordered))

    def spread(count: int, first: float, second: float) -> float:
        return max(0.0, second - first * first / count)

    def within(cut: int) -> float:
        left = spread(cut, sums[cut - 1], squares[cut - 1])
        return left + spread(n - cut, total - sums[cut - 1], squares[-1] - squares[cut - 1])

    smallest = max(2, round(RARE * n))
    cut = min(range(smallest, n - smallest + 1), key=within)
    fast, slow = ordered[:cut], ordered[cut:]
    deviations = [sqrt(spread(len(g), sum(g), sum(v * v for v in g)) / len(g)) for g in (fast, slow)]
    gap = sum(slow) / len(slow) - sum(fast) / len(fast)
    if gap < VISIBLE * median(ordered) or gap < 3 * sum(deviations):
        return None
    return (median(fast), len(fast) / n), (median(slow), len(slow) / n)


def impossible(samples: Sequence[Sample]) -> Watch:
    """Refuse a candidate that is faster than memory and arithmetic allow: it left work out.

    The floor of a step counts only work that every honest program does (`optexp.profiling.bounds`). A floor that the
    baseline beats is wrong, and refuses nothing.
    """
    floor = max(sample.floor_s for sample in samples)
    if not floor:
        return _blind("physical floor", "not known: a CPU, a step that fake tensors cannot run, or a small one")
    typical = [median(getattr(p, arm).step_s for s in samples for p in s.kept) for arm in ("baseline", "candidate")]
    below = typical[1] < floor <= typical[0]
    text = f"no program can do this in less than {duration(floor)} here"
    text += f", and the candidate takes {duration(typical[1])}" * below
    return Watch("physical floor", not below, text, severity=REFUSES)


def device_beats_wall(samples: Sequence[Sample]) -> Watch:
    """Remark on a gain on the device that does not reach the user.

    Device time is the time of traced kernels and copies; a span between events would include waits for the host.
    """
    pairs = [p for s in samples for p in s.kept if not p.baseline.cold]
    busy = next((s.busy_s for s in reversed(samples) if s.busy_s), {})
    if not pairs or not all(busy.get(arm) for arm in ("baseline", "candidate")):
        return _blind("device and wall", "no device time on this device")
    wall = median(p.baseline.wall_s / p.candidate.wall_s for p in pairs)
    device = busy["baseline"] / busy["candidate"]
    lost = device > max(1.0, 1.05 * wall)
    text = f"device time improves {device:.2f}×, wall time {wall:.2f}×"
    return Watch("device and wall", not lost, text + (": the gain does not reach the user" if lost else ""))


WATCHDOGS = (
    slow_start,
    ahead_of_steps,
    skipped_steps,
    throttling,
    power_cap,
    foreign,
    recompilation,
    waiting_arm,
    aside,
    constant_inputs,
    impossible,
    cores,
    same_batches,
    two_modes,
    drift,
    order_effect,
    device_beats_wall,
)
