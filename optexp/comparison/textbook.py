"""The usual way to measure, for teaching: one warm-up, a few trials, their mean, baseline first. No verdict."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean, median

from optexp.comparison.adjudicate import Facts
from optexp.comparison.session import Session
from optexp.measurement import placement, samples_file
from optexp.measurement.clock import Timing
from optexp.measurement.samples import MAIN, SAME, TEXTBOOK, Pair, Sample
from optexp.records import filenames
from optexp.records.folder import tolerating
from optexp.records.measurement import Measurement, Textbook
from optexp.support.units import ratio
from optexp.workers.arm import Arm
from optexp.workers.client import Client

REPEATS = 4  # in each process


def measure(session: Session, facts: Facts) -> None:
    """The usual way's ratios here, and how often it sees a difference where there is none."""
    settings, result = session.settings, session.result
    equal, compared, samples = list[float](), list[tuple[float, float]](), list[Sample]()
    stacks = {"baseline": session.baseline, "candidate": session.stack, "again": session.baseline}
    with placement.keep_off(session.machine.cores if session.isolated else []):
        for index in range(settings.processes_min):
            with session.working("arms", f"process {index + 1}: starting the arms"):
                specs = {name: session.spec(stack, seed_offset=index) for name, stack in stacks.items()}
                starting = session.pool.start(specs)
                for each in starting.values():
                    each.setup.wait()
                arms = {name: each.arm for name, each in starting.items()}
            with session.working("measurement", f"process {index + 1}: measuring"):
                samples.append(Sample(aim=TEXTBOOK))
                for _ in range(REPEATS):
                    trials = {name: _trials(arms, name, settings.trials) for name in ("baseline", "candidate", "again")}
                    means = {name: fmean(trial.wall_s for trial in found) for name, found in trials.items()}
                    compared.append((means["baseline"], means["candidate"]))
                    equal.append(means["baseline"] / means["again"])
                    for kind, second in ((MAIN, "candidate"), (SAME, "again")):
                        both = zip(trials["baseline"], trials[second], strict=True)
                        samples[-1].pairs += [Pair(*blocks, True, kind) for blocks in both]
            for arm in arms.values():
                arm.close()
    with tolerating(result.notes):
        samples_file.write(samples, session.output / filenames.SAMPLES)
    for place, name in enumerate(("baseline", "candidate")):
        summary, step_s = getattr(result, name), median(pair[place] for pair in compared)
        summary.step_us, summary.throughput = step_s * 1e6, session.samples / step_s
    effect = 1 + settings.min_effect
    wrong = sum(not 1 / effect <= found <= effect for found in equal)
    ratios = [before / after for before, after in compared]
    text = (
        f"1 warm-up and the mean of {settings.trials} trials give {ratio(min(ratios))} to"
        f" {ratio(max(ratios))} in {len(ratios)} repetitions, and call the baseline different from itself in {wrong} of"
        f" {len(equal)}: measurement=default gives a verdict"
    )
    found = Measurement(preset=settings.preset, textbook=Textbook(ratios, equal, wrong, text))
    facts.measurement = result.measurement = found


def _trials(arms: Mapping[str, Client[Arm]], name: str, trials: int) -> list[Timing]:
    return [arms[name].call(Arm.block, steps=1, lead_in=int(trial == 0)) for trial in range(trials)]
