"""The figures that a study can name: how each is read from a job, shown as text, and scaled on an axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optexp.records.profile import ArmProfile
from optexp.reporting import summary
from optexp.result import ArmSummary, Result, Verdict
from optexp.support import units

SHOWN_TERMS = 3


@dataclass(frozen=True)
class Point:
    """One arm of one job.

    arm:   baseline or candidate
    step:  name of the study's step that the job belongs to
    first: the study's first point, over which gains are
    noise: of the study, by `study.between_jobs`
    """

    result: Result
    arm: str
    step: str = ""
    first: Point | None = None
    noise: float | None = None

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
        """The value of a figure, a setting or a metric of the profile; None where this arm has none."""
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
        """Whether a figure of this arm lies within noise, or within an interval that decides nothing."""
        if name == "gain":
            gain, noise = _gain(self), self.noise or 1.0
            return bool(gain and self.first and self.result is not self.first.result and 1 / noise <= gain <= noise)
        return self.undecided and name in ("speedup", "step_us", "throughput")

    def interval(self, name: str) -> tuple[float, float] | None:
        """The interval of a figure, in the figure's unit; None where it has none.

        The interval of a time or a rate is that of the ratio, with the baseline's time taken as exact. A program that
        was profiled alone has the 5th and the 95th percentile of its steps.
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
        """The job's verdict, with its reason where there is no figure; empty for a baseline."""
        if self.arm == "baseline":
            return ""
        reason = "" if self.result.verdict.measured else summary.reason(self.result)
        return f"{self.result.verdict}: {reason}" if reason else str(self.result.verdict)


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
    """A quantity of a point.

    read:  the value of a point, in the record's unit
    show:  a value as text
    write: a point's cell in a table, where that is more than the value as text
    units: of an axis, the largest first: name, and size in the record's unit
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
    """The estimate with its ends, as an estimate alone reads like a finding; empty where there is no speedup."""
    found = point.result.speedup
    if found is None:
        return ""
    ends = units.low_to_high(found.low, found.high)
    return f"undecided, {ends}" if point.undecided else f"{units.ratio(found.estimate)} ({ends})"


def _gain(point: Point) -> float | None:
    """Throughput over that of the study's first row: of two jobs, which no interleaving compares."""
    before = point.first.summary.throughput if point.first else None
    return point.summary.throughput / before if point.summary.throughput and before else None


def _beyond_noise(point: Point) -> str:
    gain = _gain(point)
    return "" if gain is None else f"undecided, {units.ratio(gain)}" if point.doubtful("gain") else units.ratio(gain)


def _rate(point: Point) -> float | None:
    """FLOP/s of the matrix products, over the time of the whole step."""
    flop, us = point.metrics.get("matrix_flop"), point.summary.step_us
    return flop / us * 1e6 if flop and us else None


def of_ceiling(point: Point) -> float | None:
    """The rate over the device's best one for this dtype; None for a stack, whose dtype may be another."""
    rate = _rate(point)
    calibration = point.result.profile.calibration
    ceilings = calibration.matrix if calibration else {}
    ceiling = ceilings.get(str(point.result.config.get("dtype")))
    return rate / ceiling if rate and ceiling and point.label == "baseline" else None


def _kernel(point: Point) -> str | None:
    """The GPU's kernel, else the CPU's operator, that takes most time."""
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
    return ", ".join(f"{name} {units.share(share)}" for name, share in ranked)


def _per_second(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e11 else f"{rate / 1e9:.3g} GFLOP/s"


def _steps(count: Any) -> str:
    return f"{count:,}" if isinstance(count, int) else str(count)


FIGURES: Mapping[str, Figure] = {
    "workload": Figure("workload", lambda p: p.result.workload),
    "strategy": Figure("strategy", lambda p: p.result.label),
    "arm": Figure("strategy", lambda p: p.label),
    "step": Figure("step", lambda p: p.step),
    "step_us": Figure("time/step", lambda p: p.summary.step_us, units.microseconds, units=TIMES),
    "device_us": Figure("device time/step", lambda p: p.summary.device_us, units.microseconds, units=TIMES),
    "throughput": Figure("throughput", lambda p: p.summary.throughput, units.rate, units=RATES),
    "peak_mib": Figure("peak memory", lambda p: p.summary.peak_mib, units.mebibytes, units=SIZES),
    "kernels": Figure("kernels/step", lambda p: p.summary.kernels, units.count),
    "gpu_busy": Figure("GPU busy", lambda p: p.summary.gpu_busy, units.share, units=PERCENT),
    "setup_s": Figure("set-up", lambda p: p.summary.setup_s, units.duration, units=SETUPS),
    "speedup": Figure("speedup", _speedup, units.ratio, _interval, TIMES_AS_FAST),
    "gain": Figure("× first row", _gain, units.ratio, _beyond_noise, TIMES_AS_FAST),
    "flops": Figure("products", _rate, _per_second, units=FLOPS),
    "of_ceiling": Figure("of the measured ceiling", of_ceiling, units.share, units=PERCENT),
    "kernel": Figure("longest kernel", _kernel),
    "paid_back": Figure("paid back after steps", _paid_back, _steps),
    "shares": Figure("where a step goes", _shares, _largest, units=PERCENT),
    "memcpy": Figure("copies that nothing hides", lambda p: p.metrics.get("memcpy"), units.share, units=PERCENT),
    "why": Figure("why", _why),
}


def heading(name: str) -> str:
    """A column's or an axis' name."""
    return FIGURES[name].heading if name in FIGURES else name.rpartition(".")[2].replace("_", " ")
