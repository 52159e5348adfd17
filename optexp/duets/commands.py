"""Comparison of two commands: every round runs both, and the first once more as a control."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from random import Random

import torch

from optexp.comparison.adjudicate import Decision, Facts, measured, refused
from optexp.comparison.conclusion import measurement_of, summarize
from optexp.duets.program import Program
from optexp.measurement import controls, statistics
from optexp.measurement.clock import Timing
from optexp.measurement.environment import describe
from optexp.measurement.gpu import Gpu
from optexp.measurement.neighbours import neighbours
from optexp.measurement.samples import MAIN, SAME, Pair, Sample
from optexp.measurement.settings import MeasurementSettings
from optexp.reporting.wording import headline
from optexp.result import Result, Speedup, Verdict
from optexp.support.stopwatch import Stopwatch

Tell = Callable[[str], None]


def duet(
    base: Program, head: Program, settings: MeasurementSettings, device: str, allow_foreign: bool, tell: Tell
) -> Result:
    """Measure two commands, after one run of each that does not count.

    Args:
        device: Device whose instruments are read, "cpu" or "cuda:0"; the commands choose their own device.
        allow_foreign: Other programs may use the card.
        tell: Called with a sentence on the next action.

    Raises:
        ConfigError, Failure: See `Program.run`.
    """
    watch, gpu, order = Stopwatch(), Gpu.open(torch.device(device)), Random()
    with watch.phase("warm-up"):
        for program in (base, head):
            tell(f"warming up: one run of command {program.name}")
            program.run()
    samples: list[Sample] = []
    with watch.phase("measurement"):
        while not _enough(samples, settings, watch):
            tell(f"process {len(samples) + 1} of each command")
            samples.append(_round({"baseline": base, "candidate": head, "again": base}, order, gpu))
            if len(samples) > 1 and unlike_work(samples):
                break
    result = concluded(samples, settings, device, allow_foreign)
    result.seconds = watch.rounded()
    return result


def _enough(samples: list[Sample], settings: MeasurementSettings, watch: Stopwatch) -> bool:
    """Whether the measurement is complete, by the rule of every other comparison."""
    if not samples:
        return False
    interval = statistics.over_processes([sample.log_ratio for sample in samples], settings.confidence)
    precise = statistics.precise_enough(interval, settings.half_width)
    return settings.enough(len(samples), precise, time.monotonic() - watch.begin)


def _round(programs: Mapping[str, Program], order: Random, gpu: Gpu | None) -> Sample:
    """One run of each program, in random order."""
    since_s, timings = time.time(), dict[str, Timing]()
    before = gpu.read() if gpu else None
    for name in order.sample(list(programs), len(programs)):
        timings[name] = programs[name].run()
    after = gpu.read() if gpu else None
    readings = (before, after) if before and after else ()
    turns = list(timings)
    pairs = [
        Pair(timings["baseline"], timings[name], turns.index("baseline") < turns.index(name), kind, readings)
        for name, kind in (("candidate", MAIN), ("again", SAME))
    ]
    foreign = neighbours(gpu, [os.getpid()], since_s)[0] if gpu else []
    return Sample(pairs, foreign=tuple(foreign))


def unlike_work(samples: Sequence[Sample]) -> str:
    """A sentence if the second command prints another number of steps than the first; else empty.

    Numbers are not compared if the first command's own runs differ: it then runs for a time, not a number of steps.
    """
    pairs = [pair for sample in samples for pair in sample.pairs]
    ours = {pair.candidate.steps for pair in pairs if pair.kind == MAIN}
    theirs = {pair.baseline.steps for pair in pairs} | {pair.candidate.steps for pair in pairs if pair.kind == SAME}
    if len(theirs) != 1 or ours <= theirs:
        return ""
    counts = f"{min(theirs)} of A and {' or '.join(map(str, sorted(ours)))} of B"
    return (
        f"the commands print different numbers of steps: {counts} count; their work differs, and so no ratio is shown"
    )


def concluded(samples: list[Sample], settings: MeasurementSettings, device: str, allow_foreign: bool) -> Result:
    """The result of timed processes, by the same rules as in unlike comparisons."""
    judged = controls.judge(samples, settings)
    measurement = measurement_of(samples, settings, allow_foreign)
    measurement.controls = {name: control for name, control in judged.items() if name == controls.NAMES[SAME]}
    facts = Facts(measurement=measurement, confidence=settings.confidence)
    unlike = unlike_work(samples)
    decision = (
        (Decision(Verdict.INVALID, unlike) if unlike else None)
        or refused(facts)
        or measured(facts)
        or Decision(Verdict.ERROR, "nothing was measured")
    )
    result = Result(decision.verdict, "", "commands", [], device, 0, environment=describe(torch.device(device)))
    result.measurement, interval = measurement, facts.interval
    if decision.reason or interval is None:
        result.headline = f"{decision.verdict}: {decision.reason}"
        result.withhold()
        return result
    for name in ("baseline", "candidate"):
        summarize(getattr(result, name), name, samples, 1)
    result.speedup = Speedup(*interval.ratios(), confidence=settings.confidence, processes=len(samples))
    result.headline = headline(result, "float32", "baseline", None)
    return result
