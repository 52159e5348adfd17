"""How long a comparison will take, as soon as it is known how long a step takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from optexp.comparison.contributions import subsets
from optexp.config import Experiment
from optexp.equivalence.input_families import FEW, FEW_WITH_GRADIENTS
from optexp.equivalence.noise import RUNS
from optexp.equivalence.trajectory import PERTURBED
from optexp.equivalence.trajectory import STEPS as FOLLOWED
from optexp.measurement.machine_load import MachineLoad
from optexp.measurement.samples import CONTROL_EVERY, LOOK_EVERY
from optexp.measurement.settings import FEWEST, MeasurementSettings
from optexp.support.units import duration, rough

BESIDE_S = 20.0  # beside its measurement, a job is taken to need this for its arms and checks
LATE = 1.5  # times as long as was said is worth a sentence
TOLD_S = 120.0  # less is no news
LONG_STEP_S = 0.1  # shorter ones are repeated until a block is full, whatever they take
FP64 = 2.0  # times as long as in float32, at least
WARM = 3  # steps of a warm-up, at least
REPEATED = 16  # after timing: steps that are repeated, and run on batches not met before
PROFILED = 10  # traced steps, and those that warm them up


@dataclass(frozen=True)
class Steps:
    """Facts that are known after the set-up.

    wall_s:    one step of the baseline as it is timed, its feed included
    compute_s: without the feed
    setup_s:   of the slower arm
    verified:  consecutive steps that each set of inputs is checked on
    noisy:     gradients are compared, so that the baseline runs with a little noise, too
    followed:  a training is followed for many steps
    families:  sets of other inputs
    """

    wall_s: float
    compute_s: float
    setup_s: float
    verified: int = 1
    noisy: bool = False
    followed: bool = False
    families: int = 0


def guess(experiment: Experiment, slowdown: float = 1.0) -> tuple[float, str]:
    """Seconds of a job before anything is known of its steps, which are taken to be short; and their basis in words.

    Args:
        slowdown: Of all but the measurement, which has a budget of time (see `MachineLoad`).
    """
    beside_s = BESIDE_S * slowdown
    if experiment.verify == "only" or experiment.mode == "profile":
        return beside_s, "a guess"
    each_s = experiment.measurement.budget_s + beside_s
    if experiment.mode == "auto":
        trials = experiment.auto.trials
        most_s = (trials + 1) * each_s + beside_s if trials else experiment.auto.budget_s
        return min(experiment.auto.budget_s, most_s), "the search's time budget"
    if experiment.mode == "ablate":
        count = 1 + len(subsets([strategy.label for strategy in experiment.strategies]))
        return count * each_s, f"the preset's time budget, {count} times"
    return each_s, "the preset's time budget"


def welcome(experiment: Experiment, load: MachineLoad) -> tuple[float, str]:
    """Seconds of a job on the machine as it is, and the sentence at its start: how long, and whether it may end
    earlier."""
    seconds = guess(experiment, load.slowdown)[0]
    open_end = experiment.measurement.processes_max > experiment.measurement.processes_min
    ends = experiment.mode == "compare" and experiment.verify != "only" and open_end
    searched = experiment.mode == "auto" and seconds >= experiment.auto.budget_s
    how_long = f"at most {duration(seconds)} (auto.budget)" if searched else f"about {rough(seconds)}"
    parts = how_long, load.text, "it ends earlier when it is precise" if ends else ""
    return seconds, "; ".join(filter(None, parts))


def late(told_s: float, spent_s: float, left_s: float) -> str:
    """The sentence where a job takes much longer than it said at its start; empty where it does not.

    Args:
        spent_s: Until its arms were set up.
        left_s: Expected, now that steps and set-up are known.
    """
    if spent_s + left_s < LATE * told_s:
        return ""
    started = f"to start took {duration(round(spent_s))}"
    return f"longer than about {rough(told_s)}: {started}, and about {rough(left_s)} are left"


def verification_s(steps: Steps, settings: MeasurementSettings) -> float:
    """Both arms and fp64 on every set of inputs, and what precedes and follows."""
    few = len(FEW_WITH_GRADIENTS if steps.noisy else FEW)
    sets = settings.verification_seeds + (steps.families if settings.thorough else min(steps.families, few))
    each = steps.verified * (2 + FP64 + (RUNS if steps.noisy else 0))
    many = FOLLOWED * (PERTURBED + 2) if settings.thorough and steps.followed else 0
    return steps.compute_s * (sets * each + many)


def process_s(steps: Steps, settings: MeasurementSettings) -> float:
    """One process of each arm."""
    if steps.wall_s < LONG_STEP_S:
        return steps.setup_s + settings.warmup_s + settings.process_s
    pairs = max(min(settings.pairs, FEWEST), min(settings.pairs, int(settings.process_s / (2 * steps.wall_s))))
    beside = 2 * pairs / LOOK_EVERY + (3 * pairs / CONTROL_EVERY if settings.controls else 0)
    warm = 2 * max(WARM * steps.wall_s, min(settings.warmup_s, 20 * steps.wall_s))
    return steps.setup_s + warm + steps.wall_s * (2 * pairs + beside)


def total_s(steps: Steps, settings: MeasurementSettings, measured: bool = True) -> float:
    """From the set-up to the verdict. measured: the arms are timed, too."""
    seconds = verification_s(steps, settings) + 2 * PROFILED * steps.wall_s
    if not measured:
        return seconds
    each = process_s(steps, settings)
    in_budget = ceil(settings.budget_s / each)
    processes = min(max(settings.processes_min, in_budget), settings.processes_max)
    return seconds + processes * each + 2 * REPEATED * steps.wall_s


def announcement(
    steps: Steps, settings: MeasurementSettings, measured: bool, others: Mapping[str, MeasurementSettings]
) -> str:
    """One sentence for people; empty where there is nothing to wait for.

    others: quicker presets, by name
    """
    seconds = total_s(steps, settings, measured)
    if seconds < TOLD_S:
        return ""
    quicker = {name: total_s(steps, other, measured) for name, other in others.items() if name != settings.preset}
    ways = [f"measurement={name} takes about {rough(s)}" for name, s in quicker.items() if s < 0.7 * seconds]
    if measured:
        ways.append(f"verify=only about {rough(total_s(steps, settings, measured=False))}")
    why = f"measurement={settings.preset} measures that long"
    if max(steps.wall_s, steps.compute_s) >= LONG_STEP_S:
        why = f"a step of the baseline takes {duration(steps.wall_s)}"
        ways.append("a smaller workload takes less")
    return f"this will take about {rough(seconds)}: {why}{'; ' if ways else ''}{', '.join(ways)}"
