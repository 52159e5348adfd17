"""A study is a sweep with a question; its table answers it from what the jobs wrote down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isinf
from typing import Any

from omegaconf import DictConfig, OmegaConf

from optexp.errors import ConfigError
from optexp.records.profile import ArmProfile
from optexp.reporting import summary
from optexp.reporting.markdown import table as in_markdown
from optexp.result import ArmSummary, Result, Verdict
from optexp.schema import choice, plain, suggest, typed
from optexp.support.units import duration, ratio

STEP = "study.step"  # the key that tells a job which step it belongs to
LISTS = ("x", "y", "by", "show", "tell")  # a single name does as well
SHOWN_TERMS = 3
APART = 1.1  # between runs of one program, above which a reader is told
NO_NOISE = "No program ran twice, so what noise is stays unknown"
OVER = 1.1  # of a ceiling: what a smaller or larger product than the calibration's may reach


@dataclass
class Study:
    """The key `study` of a configuration. What it names are figures (below), settings as they are typed
    (`workload.size`), or metrics of an arm's profile (`memcpy`).

    question:  what the sweep is to answer
    x:         what varies, a panel of the plot for each; where there are several, the others stay at their first value.
               A figure that no job has, as `kernels` on a CPU, gives way to the settings in which the jobs differ
    y:         the figures that answer, a row of panels for each
    by:        what tells lines apart; `arm` shows the baseline beside what was compared with it
    show:      what else the table has
    tell:      what of the table stands below the plot, too, in words: the reasons
    log:       which axes are logarithmic
    steps:     sweeps to be run one after the other, by name, each as it is typed on the command line
    """

    question: str
    x: list[str]
    y: list[str]
    by: list[str] = field(default_factory=list)
    show: list[str] = field(default_factory=list)
    tell: list[str] = field(default_factory=list)
    log: str = choice("", "x", "y", "xy")
    steps: dict[str, str] = field(default_factory=dict)
    step: str | None = None  # set for each job

    @classmethod
    def of(cls, config: DictConfig) -> Study | None:
        """The study that a sweep belongs to; `ConfigError` where it is not one."""
        node = OmegaConf.select(config, "study")
        if node is None:
            return None
        if not isinstance(node, DictConfig):
            raise ConfigError(f"study={node} is not a study: experiments= names one")
        values = plain(node)
        lists = {key: [values[key]] for key in LISTS if isinstance(values.get(key), str)}
        return typed(cls, values | lists, "study")

    @property
    def columns(self) -> list[str]:
        """Of the table, without the verdict."""
        return list(dict.fromkeys([*self.x, *self.by, *self.y, *self.show, *self.tell]))


# --- points ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """What one job says about one of its arms (`baseline` or `candidate`)."""

    result: Result
    arm: str
    step: str = ""
    first: Point | None = None  # of the study
    noise: float | None = None  # of the study, see `between_jobs`

    @property
    def label(self) -> str:
        """The stack of this arm."""
        return self.result.label if self.arm == "candidate" else str(self.result.config.get("baseline", "baseline"))

    @property
    def summary(self) -> ArmSummary:
        found: ArmSummary = getattr(self.result, self.arm)
        return found

    @property
    def profile(self) -> ArmProfile:
        return self.result.profile.arms().get(self.arm, ArmProfile())

    @property
    def metrics(self) -> Mapping[str, float]:
        return self.profile.metrics

    def value(self, name: str) -> Any:
        """What the study calls `name`; None where this arm has none."""
        if name in FIGURES:
            return FIGURES[name].read(self)
        return self.result.config[name] if name in self.result.config else self.metrics.get(name)

    def cell(self, name: str) -> str:
        """The same as text."""
        value = self.value(name)
        if name in FIGURES:
            figure = FIGURES[name]
            return "" if value is None else figure.write(self) if figure.write else figure.show(value)
        if isinstance(value, float):
            return f"{value:.3g}"
        return "null" if value is None and name in self.result.config else "" if value is None else str(value)

    @property
    def undecided(self) -> bool:
        """Whether the measurement did not decide how this arm differs from the baseline."""
        return self.arm == "candidate" and self.result.verdict is Verdict.INCONCLUSIVE

    def doubtful(self, name: str) -> bool:
        """Whether `name` is a figure of this arm from which nothing follows."""
        if name == "gain":
            gain, noise = _gain(self), self.noise or 1.0
            return bool(gain and self.first and self.result is not self.first.result and 1 / noise <= gain <= noise)
        return self.undecided and name in ("speedup", "step_us", "throughput")

    def interval(self, name: str) -> tuple[float, float] | None:
        """The ends between which a figure of the comparison lies; None where it has none.

        Times and rates carry the interval of the ratio, with the baseline taken as it is; a program that was profiled
        alone has the 5th and the 95th percentile of its steps.
        """
        value, found, alone = self.value(name), self.result.speedup, self.summary
        if name == "step_us" and self.result.verdict is Verdict.PROFILED:
            return (alone.p5_us, alone.p95_us) if alone.p5_us and alone.p95_us else None
        if found is None or self.arm == "baseline" or not isinstance(value, (int, float)):
            return None
        ends = {
            "speedup": (found.low, found.high),
            "throughput": (value * found.low / found.estimate, value * found.high / found.estimate),
            "step_us": (value * found.estimate / found.high, value * found.estimate / found.low),
        }
        return ends.get(name)

    @property
    def verdict(self) -> str:
        """The job's, with the reason where there is no figure; of a baseline nothing is decided."""
        if self.arm == "baseline":
            return ""
        reason = "" if self.result.verdict.measured else summary.reason(self.result)
        return f"{self.result.verdict}: {reason}" if reason else str(self.result.verdict)


def points(study: Study, jobs: Iterable[tuple[Result, str]]) -> list[Point]:
    """One for each job (a result and its step); with `by: arm` also the baseline that it was compared with.

    Several jobs have the same baseline where only the strategy varies: the first one's stands for all.
    """
    found: list[Point] = []
    baselines = set()
    for result, step in jobs:
        baseline = Point(result, "baseline", step)
        if result.verdict is Verdict.PROFILED:
            found.append(baseline)
            continue
        where = tuple(str(baseline.value(key)) for key in study.x)
        if "arm" in study.by and result.strategy and baseline.summary.step_us and where not in baselines:
            baselines.add(where)
            found.append(baseline)
        found.append(Point(result, "candidate", step))
    noise = between_jobs(found)
    return [replace(point, first=found[0], noise=noise) for point in found]


def completed(study: Study, jobs: Sequence[tuple[Result, str]]) -> Study:
    """With the settings that tell jobs apart where the table does not: somebody swept more than it names."""
    arms = ["baseline" if result.verdict is Verdict.PROFILED else "candidate" for result, _ in jobs]
    each = [Point(result, arm, step) for (result, step), arm in zip(jobs, arms, strict=True)]
    study = replace(study, x=[x for x in study.x if x not in FIGURES or any(p.value(x) is not None for p in each)])
    alike: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for result, step in jobs:
        point = Point(result, "candidate", step)
        named = (step, result.workload, result.label, *(str(point.value(name)) for name in (*study.x, *study.by)))
        alike.setdefault(named, []).append(result.config)
    groups, more = list(alike.values()), []
    for key in dict.fromkeys(key for group in groups for config in group for key in config):
        parts = [_parted(group, key) for group in groups]
        if any(len(part) > 1 for part in parts):
            more.append(key)
            groups = [group for part in parts for group in part]
    return replace(study, x=[*study.x, *more] or ["workload"])


def _parted(configs: Iterable[Mapping[str, Any]], key: str) -> list[list[Mapping[str, Any]]]:
    """Those that have the same value each."""
    parts: dict[str, list[Mapping[str, Any]]] = {}
    for config in configs:
        parts.setdefault(str(config.get(key)), []).append(config)
    return list(parts.values())


def remarks(study: Study, found: Sequence[Point]) -> list[str]:
    """What a reader of the table must know: names that no job has, and ceilings that cannot be right."""
    settings = dict.fromkeys(key for point in found for key in point.result.config)
    sentences = [
        f"study: no job has {name!r}{suggest(name, [*FIGURES, *settings])}"
        for name in study.columns
        if name not in FIGURES and name not in settings and not any(name in point.metrics for point in found)
    ]
    highest = max((_of_ceiling(point) or 0.0 for point in found), default=0.0)
    if "of_ceiling" in study.columns and highest > OVER:
        sentences.append(
            f"The measured ceiling is too low, since a product reached {summary.share(highest)} of it: shares of it say"
            " nothing here. Ceilings are measured once and cached, perhaps while something else ran: remove"
            " calibration-*.json from ~/.cache/optexp and run again on a quiet machine."
        )
    noise = between_jobs(found)
    if any(point.cell("gain") for point in found) and "gain" in study.columns:
        known = f"Runs of one program differed by up to {noise - 1:.1%} here: less is noise" if noise else NO_NOISE
        sentences.append(f"{heading('gain')}: of jobs that ran one after the other, so it has no interval. {known}.")
    elif noise and noise > APART:
        sentences.append(
            f"Jobs measured the same baseline up to {ratio(noise)} apart: compare rows by their speedups, each over a"
            " baseline that ran beside it."
        )
    return sentences


def between_jobs(found: Sequence[Point]) -> float | None:
    """How far the step times of one and the same program lie apart between jobs, and between both arms of a
    comparison with itself: a ratio above 1. None where no program ran twice.
    """
    groups: dict[str, list[float]] = {}
    for result in {id(point.result): point.result for point in found}.values():
        if result.baseline.step_us is None or result.verdict is Verdict.PROFILED:
            continue
        settings = {k: v for k, v in result.config.items() if k == "dtype" or k.startswith(("workload.", "baseline"))}
        group = groups.setdefault(f"{result.workload} {settings}", [])
        group.append(result.baseline.step_us)
        if not result.strategy and result.candidate.step_us and settings.get("baseline") == "baseline":
            group.append(result.candidate.step_us)
    return max((max(times) / min(times) for times in groups.values() if len(times) > 1), default=None)


# --- figures ---------------------------------------------------------------------------------------------------


Units = Sequence[tuple[str, float]]
TIMES: Units = (("s", 1e6), ("ms", 1e3), ("µs", 1.0))
SETUPS: Units = (("s", 1.0), ("ms", 1e-3))
RATES: Units = (("G/s", 1e9), ("M/s", 1e6), ("k/s", 1e3), ("per s", 1.0))
SIZES: Units = (("GiB", 1024.0), ("MiB", 1.0), ("KiB", 2**-10))
FLOPS: Units = (("TFLOP/s", 1e12), ("GFLOP/s", 1e9))
PERCENT: Units = (("%", 0.01),)
TIMES_AS_FAST: Units = (("×", 1.0),)


@dataclass(frozen=True)
class Figure:
    """A quantity of a point: how it is read, how a value is shown, and how a table writes it.

    units: of an axis, the largest first: name, and how much of the value it is
    """

    heading: str
    read: Callable[[Point], Any]
    show: Callable[[Any], str] = str
    write: Callable[[Point], str] | None = None
    units: Units = ()


def _speedup(point: Point) -> float | None:
    speedup = point.result.speedup
    return speedup.estimate if speedup and point.arm == "candidate" else None


def _interval(point: Point) -> str:
    """Never the estimate alone: without its ends it would be read as a finding. Nor where nothing was found."""
    found = point.result.speedup
    if found is None:
        return ""
    ends = f"{found.low:.3g} to {'∞' if isinf(found.high) else f'{found.high:.3g}'}"
    return f"undecided, {ends}" if point.undecided else f"{ratio(found.estimate)} ({ends})"


def _gain(point: Point) -> float | None:
    """Over the study's first row, in samples a second: of two jobs, not of an interleaved pair."""
    before = point.first.summary.throughput if point.first else None
    return point.summary.throughput / before if point.summary.throughput and before else None


def _beyond_noise(point: Point) -> str:
    gain = _gain(point)
    return "" if gain is None else f"undecided, {ratio(gain)}" if point.doubtful("gain") else ratio(gain)


def _rate(point: Point) -> float | None:
    """Floating-point operations a second in matrix products, over the whole step."""
    flop, us = point.metrics.get("matrix_flop"), point.summary.step_us
    return flop / us * 1e6 if flop and us else None


def _of_ceiling(point: Point) -> float | None:
    """Against the same product's best rate on this device, where the dtype is known: in a stack it may be another."""
    rate = _rate(point)
    calibration = point.result.profile.calibration
    ceilings = calibration.matrix if calibration else {}
    ceiling = ceilings.get(str(point.result.config.get("dtype")))
    return rate / ceiling if rate and ceiling and point.label == "baseline" else None


def _kernel(point: Point) -> str | None:
    """The one that takes most time: of the GPU, else the operator on the CPU."""
    top = point.profile.top_kernels or point.profile.top_ops
    return top[0].name if top else None


def _paid_back(point: Point) -> Any:
    decided = _speedup(point) and point.result.verdict is not Verdict.INCONCLUSIVE
    return point.result.measurement.cost.break_even_steps if decided and point.result.measurement else None


def _why(point: Point) -> str:
    if point.result.verdict is Verdict.PROFILED:
        label, bracket, why = summary.reason(point.result).partition(" (")
        return label.replace("_", " ") + bracket + why
    reasons = [line for line in point.result.explanation if not line.endswith(":")]
    return next(iter(reasons), "") if point.arm == "candidate" else ""


def _shares(point: Point) -> dict[str, float] | None:
    return dict(summary.parts(point.metrics)) or None


def _largest(shares: Mapping[str, float]) -> str:
    ranked = sorted(shares.items(), key=lambda term: -term[1])[:SHOWN_TERMS]
    return ", ".join(f"{name} {summary.share(share)}" for name, share in ranked)


def _per_second(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e11 else f"{rate / 1e9:.3g} GFLOP/s"


def _steps(count: Any) -> str:
    return f"{count:,}" if isinstance(count, int) else str(count)


FIGURES: Mapping[str, Figure] = {
    "workload": Figure("workload", lambda p: p.result.workload),
    "strategy": Figure("strategy", lambda p: p.result.label),
    "arm": Figure("strategy", lambda p: p.label),
    "step": Figure("step", lambda p: p.step),
    "step_us": Figure("time/step", lambda p: p.summary.step_us, summary.microseconds, units=TIMES),
    "device_us": Figure("device time/step", lambda p: p.summary.device_us, summary.microseconds, units=TIMES),
    "throughput": Figure("throughput", lambda p: p.summary.throughput, summary.rate, units=RATES),
    "peak_mib": Figure("peak memory", lambda p: p.summary.peak_mib, summary.mebibytes, units=SIZES),
    "kernels": Figure("kernels/step", lambda p: p.summary.kernels, summary.count),
    "gpu_busy": Figure("GPU busy", lambda p: p.summary.gpu_busy, summary.share, units=PERCENT),
    "setup_s": Figure("set-up", lambda p: p.summary.setup_s, duration, units=SETUPS),
    "speedup": Figure("speedup", _speedup, ratio, _interval, TIMES_AS_FAST),
    "gain": Figure("× first row", _gain, ratio, _beyond_noise, TIMES_AS_FAST),
    "flops": Figure("products", _rate, _per_second, units=FLOPS),
    "of_ceiling": Figure("of the measured ceiling", _of_ceiling, summary.share, units=PERCENT),
    "kernel": Figure("longest kernel", _kernel),
    "paid_back": Figure("paid back after steps", _paid_back, _steps),
    "shares": Figure("where a step goes", _shares, _largest, units=PERCENT),
    "memcpy": Figure("copies that nothing hides", lambda p: p.metrics.get("memcpy"), summary.share, units=PERCENT),
    "why": Figure("why", _why),
}


def heading(name: str) -> str:
    """A column's or an axis' name."""
    return FIGURES[name].heading if name in FIGURES else name.rpartition(".")[2].replace("_", " ")


# --- the table -------------------------------------------------------------------------------------------------


def table(study: Study, found: Sequence[Point]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows, in the order of the jobs; columns that nothing fills are left out."""
    rows = [[*(point.cell(name) for name in study.columns), point.verdict] for point in found]
    names = [*(heading(name) for name in study.columns), "verdict"]
    filled = [index for index in range(len(names)) if any(row[index] for row in rows)]
    return [names[i] for i in filled], [[row[i] for i in filled] for row in rows]


def raw(study: Study, found: Sequence[Point]) -> tuple[list[str], list[list[Any]]]:
    """The same as numbers, for other programs: names as the study has them, values in the unit of records."""
    ends = ("low", "high")
    rows = [
        [*(point.value(name) for name in study.columns), *_ends(point), _decided(point), point.arm] for point in found
    ]
    return [*study.columns, *(f"speedup_{end}" for end in ends), "verdict", "of"], rows


def _decided(point: Point) -> str:
    return "" if point.arm == "baseline" and point.result.strategy else str(point.result.verdict)


def _ends(point: Point) -> tuple[float | None, float | None]:
    return point.interval("speedup") or (None, None)


def markdown(name: str, study: Study, found: Sequence[Point], picture: str | None = None) -> str:
    """The study as a page: question, table, picture, and where it was measured."""
    parts = [f"## {name}", study.question, in_markdown(*table(study, found))]
    if picture:
        parts.append(f"![{name}]({picture})")
    return "\n\n".join([*parts, *remarks(study, found), _where(found)]) + "\n"


def _where(found: Sequence[Point]) -> str:
    result = found[0].result
    preset = result.config.get("measurement")
    facts = [result.device_model, f"torch {result.environment.get('torch')}"]
    return ", ".join([*facts, *([f"measurement={preset}"] if preset else [])]) + "."
