"""Predicates over samples: what makes a measurement untrustworthy, or worth a remark."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import hypot, pi, sqrt
from statistics import correlation, fmean, median, stdev

from optexp.measurement.gpu import POWER_CAP, between
from optexp.measurement.samples import COLD, MAIN, Sample
from optexp.records.measurement import About, Severity, Watch
from optexp.support.units import duration

REMARK, UNDECIDES, REFUSES, MACHINE = Severity.REMARK, Severity.UNDECIDES, Severity.REFUSES, About.MACHINE
FOREIGN, PILED = "foreign processes", "work ahead"
SLOW_START = 20.0  # waiting for every step costs a short one several times its own time
TYPICAL = 0.5  # of the mean step of a block: a typical single step that takes less leaves its work to others
ALIKE = 0.8  # the same of the baseline: below, its steps differ as its batches do
RESTLESS = 0.1  # share of its cores that an arm may keep busy while it waits, beyond what the other does
DROPPED = 0.1  # share of pairs that a slowed card may cost
VISIBLE = 0.02  # modes nearer than this, and drifts below half of it, change no verdict
ASIDE = 0.5  # of what an arm calls a block: how much longer than the baseline's it may keep its caller waiting
CROWDED = 0.1  # of the time; on a machine that did nothing else it was 0.06 at most
RARE = 0.15  # share of blocks below which a second mode is a few disturbed blocks


def _blind(name: str, text: str, about: About = About.ARMS) -> Watch:
    """A watchdog that had nothing to look at."""
    return Watch(name, True, text, about=about, looked=False)


def recompilation(samples: Sequence[Sample]) -> Watch:
    """A compiler that works while the clock runs makes the figures meaningless."""
    count = sum(sample.recompiled for sample in samples)
    text = f"torch.compile compiled again while measuring, in {count} of {len(samples)} processes"
    return Watch("recompilation", count == 0, text if count else "none while measuring", severity=REFUSES)


def slow_start(samples: Sequence[Sample]) -> Watch:
    """Blocks are planned by what single steps and trial blocks take: an arm that is slow only then makes them short.

    Of single steps the quickest counts: another program may have disturbed the others. Where others wanted the cores
    in blocks too, or the baseline was as slow, nobody can tell whether it was they: nothing is held against the
    candidate, and nothing is decided.
    """
    ratios = {
        arm: median(
            max(min(s.alone[arm]) - s.timer_s.get(arm, 0.0), s.planned_s.get(arm, 0.0))
            / median(getattr(pair, arm).wall_s for pair in s.kept)
            for s in samples
        )
        for arm in ("baseline", "candidate")
        if all(s.alone.get(arm) for s in samples)
    }
    slow = [arm for arm, ratio in ratios.items() if ratio >= SLOW_START]
    arm, ratio = max(ratios.items(), key=lambda item: item[1], default=("", 1.0))
    text = f"steps of the {arm} took {ratio:.3g} times as long while warming up as in a block"
    excused = "baseline" in slow or not cores(samples).ok
    if slow and excused:
        text += ", as may be due to other programs on its cores: its blocks may be too short to decide anything"
    text = text if ratios else "no warm-up to compare with"
    return Watch("slow start", not slow, text, UNDECIDES if excused else REFUSES, MACHINE)


def ahead_of_steps(samples: Sequence[Sample]) -> Watch:
    """A step that computes the results of several leaves nothing to the others: a typical single step, which is waited
    for, then takes less than the mean step of any block, though it holds all that a step of a block does.

    An honest arm wakes this only where every block of a process takes twice as long as its typical single step, and
    not every one of the baseline's between them: `chance` of that, for blocks that are disturbed independently, is
    1e-8 where one of ten is and eight are measured. Where other programs come and go, blocks are not independent: then
    single steps are looked at again after the blocks (`Sample.alone_later`). On a machine so busy that most are, which
    the baseline's single steps or the arms' waiting for cores tell, nothing is held against the candidate.
    """
    if any(sample.queue > 1 for sample in samples) or any(p.candidate.cold for s in samples for p in s.kept):
        return _blind(PILED, "batches are made in the background, or caches are emptied between steps")
    shares = {
        arm: median(s.single_s(arm) / min(getattr(p, arm).wall_s for p in s.kept) for s in samples)
        for arm in ("baseline", "candidate")
        if all(s.alone.get(arm) for s in samples)
    }
    ours, theirs = shares.get("candidate", 1.0), shares.get("baseline", 1.0)
    text = f"a single step of the candidate takes {ours:.2g} of the mean step of a block, of the baseline {theirs:.2g}"
    ok = ours >= TYPICAL or not ALIKE <= theirs < SLOW_START
    excused = not cores(samples).ok
    text += "" if ok else ", as may be due to other programs" * excused or ": one step computes the results of several"
    return Watch(PILED, ok, text, severity=UNDECIDES if excused else REFUSES)


def chance(disturbed: float, blocks: int) -> float:
    """Probability that all blocks are disturbed, where each is with that probability."""
    return disturbed**blocks


def skipped_steps(samples: Sequence[Sample]) -> Watch:
    """A step that a GradScaler leaves out is shorter than others: such pairs are dropped."""
    pairs = [pair for sample in samples for pair in sample.of(MAIN)]
    skipped = sum(pair.skipped for pair in pairs)
    text = f"{skipped} of {len(pairs)} pairs dropped, because gradients overflowed in a step"
    fatal = skipped > DROPPED * len(pairs) or nothing_left(samples)
    return Watch("skipped steps", not skipped, text if skipped else "none", REFUSES if fatal else REMARK)


def throttling(samples: Sequence[Sample]) -> Watch:
    """Too hot, or too little power delivered: those pairs are dropped, and too many of them are no measurement."""
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
    """Whether a process has no pair that counts: then its statistic is of pairs that do not."""
    return any(main and not any(pair.counts for pair in main) for main in (s.of(MAIN) for s in samples))


def power_cap(samples: Sequence[Sample]) -> Watch:
    """At its power cap a card is as fast as its supply lets it be: energy then says more than time."""
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
    """Somebody else's work on the same card."""
    seen = dict.fromkeys(text for sample in samples for text in sample.foreign)
    if not seen:
        if not any(pair.readings for sample in samples for pair in sample.pairs):
            return _blind(FOREIGN, "nobody looked: no GPU, or none that tells", MACHINE)
        return Watch(FOREIGN, True, "none seen on the GPU", about=MACHINE)
    return Watch(FOREIGN, False, f"on the GPU while measuring: {', '.join(seen)}", REFUSES, MACHINE)


def waiting_arm(samples: Sequence[Sample]) -> Watch:
    """Both arms are bound to the same cores: one that works while it waits slows the other, and seems the faster. So
    does one that goes on working after it has said that it is done, where its clock does not see it.

    A baseline that does so refuses nobody: beside it, nothing is decided.
    """
    idle, late = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for sample in samples:
        for arm, shares in sample.idle.items():
            idle[arm] += shares
        for arm, blocks in sample.late.items():
            late[arm].append(sum(block.worked_s for block in blocks) / sum(block.block_s for block in blocks))
    found = [
        *_excess(idle, "keeps its cores {:.1%} busy while the other is timed"),
        *_excess(late, "goes on for {:.1%} of a block on its cores after it"),
    ]
    gap, text, restless = max(found, default=(0.0, "the arms have no processes of their own", ""))
    ok, severity = gap < RESTLESS, UNDECIDES if restless == "baseline" else REFUSES
    return Watch("waiting arm", ok, text if ok else f"{text}: does a thread of it never rest?", severity, MACHINE)


def _excess(shares: Mapping[str, Sequence[float]], words: str) -> Iterator[tuple[float, str, str]]:
    """By how much the busier arm is busier, in words too, and its name; an arm that nobody looked at is quiet."""
    if shares:
        found = sorted((median(shares.get(arm, [0.0])), arm) for arm in ("baseline", "candidate"))
        (least, quiet), (most, restless) = found
        yield most - least, f"the {restless} {words.format(most)}, the {quiet} {least:.1%}", restless


def aside(samples: Sequence[Sample]) -> Watch:
    """The arms tell how long their steps took; their caller has a clock too, and knows how long it waited. A process
    that an arm starts is bound to no core that was given to it, and is not looked into."""
    if any(sample.queue > 1 for sample in samples):
        return _blind("work aside", "batches are made in the background")
    pairs = [pair for sample in samples for pair in sample.kept]
    helped_s = median(pair.candidate.helped_s - pair.baseline.helped_s for pair in pairs)
    if helped_s >= RESTLESS * (step_s := median(pair.candidate.wall_s for pair in pairs)):
        text = f"other processes work {duration(helped_s)} for a step of the candidate that takes {duration(step_s)}"
        return Watch("work aside", False, f"{text}: work that it has handed on is not its own", severity=REFUSES)
    every = sorted(pair.candidate.aside_s - pair.baseline.aside_s for pair in pairs)
    more = every[len(every) // 5]  # at least, in most pairs: how long a busy machine keeps anybody waiting is chance
    told = median(pair.candidate.wall_s * (pair.candidate.steps + 1) for pair in pairs)
    text = f"beside blocks of {duration(told)} the candidate keeps its caller waiting {duration(abs(more))}"
    text += f" {'longer' if more > 0 else 'less'} than the baseline"
    ok = more < ASIDE * told
    return Watch(
        "work aside", ok, text if ok else f"{text}: that is work that its clock does not see", severity=REFUSES
    )


def cores(samples: Sequence[Sample]) -> Watch:
    """What the host has to dispatch is slower where others want its cores too, and what it need not is not."""
    shares = {
        arm: fmean(told)
        for arm in ("baseline", "candidate")
        if (told := [t.queued for s in samples for p in s.kept if (t := getattr(p, arm)).queued is not None])
    }
    if not shares:
        return _blind("cores", "nobody tells whether they were free", MACHINE)
    arm, most = max(shares.items(), key=lambda item: item[1])
    text, ok = f"the {arm} had to wait for a core for {most:.0%} of its time", most < CROWDED
    return Watch("cores", ok, text if ok else f"{text}: other programs run here", about=MACHINE)


def constant_inputs(samples: Sequence[Sample]) -> Watch:
    """Zeros switch no transistors: a card draws less power on them, and runs faster than on any real data."""
    names = dict.fromkeys(name for sample in samples for name in sample.constant)
    if not names:
        return Watch("inputs", True, "no input is one value over and over")
    text = f"input {', '.join(names)} is one value over and over (zeros?): real data may run slower"
    return Watch("inputs", False, text)


def same_batches(samples: Sequence[Sample]) -> Watch:
    """Of a loader's batches, where they differ in size, both arms must be timed on the same ones."""
    why = next((sample.uneven for sample in samples if sample.uneven), "")
    text = f"the arms were timed on different batches of a loader whose sizes differ, for {why}: pad them, or use fewer"
    return Watch(
        "batches", not why, f"{text} workers" if why else "blocks of both arms meet the same", severity=UNDECIDES
    )


def order_effect(samples: Sequence[Sample]) -> Watch:
    """Does it matter which arm of a pair runs first?"""
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
    """Does the ratio move with time inside a process?"""
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
    """An arm with two speeds has no typical one: both are reported."""
    found = []
    times = {arm: [[getattr(p, arm).step_s for p in s.kept] for s in samples] for arm in ("baseline", "candidate")}
    for arm, other in (("baseline", "candidate"), ("candidate", "baseline")):
        modes = split([step for steps in times[arm] for step in steps])
        luck = [median(steps) for steps in times[other]]  # of a process, which is no mode where both arms have it
        if modes and split([step / by for steps, by in zip(times[arm], luck, strict=True) for step in steps]):
            (fast, share), (slow, rest) = modes
            found.append(
                f"the {arm} takes {duration(fast)} in {share:.0%} of its blocks, {duration(slow)} in {rest:.0%}"
            )
    return Watch("modes", not found, "; ".join(found) or "one mode in each arm")


def split(times: Sequence[float]) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """Median and share of two groups of times; None where they are one.

    The cut is where the squares within both groups are least (Otsu); two halves of one bell are 1.3 of their summed
    standard deviations apart, those of a uniform distribution 1.7, two modes more than 3.
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
    """Faster than memory and arithmetic allow: the work was not done. A floor that the baseline breaks is wrong.

    The floor of a whole step counts only work that no honest program can leave out (`optexp.profiling.bounds`).
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
    """A gain on the device that does not reach the user. Between two events a card that waits for the host would count
    as well: how long it works is known from traced steps."""
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
