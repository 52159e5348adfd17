"""A comparison in MLflow: parameters, metrics, tags and a description. Names are fixed: dashboards depend on them.

Parameters are the settings that people compare; every other setting stands in the artifact config.yaml.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from optexp.reporting import summary
from optexp.reporting.titles import as_typed, flatten
from optexp.result import Result, Verdict
from optexp.support.units import at_least, low_to_high, ratio

VALUE_LIMIT = 6000  # characters of a param that MLflow keeps
TAG_LIMIT = 8000
NAME_LIMIT = 250
DIGITS = 4  # of a metric: one more than any interval supports
COMPARED = ("workload", "strategy", "baseline", "device", "dtype", "measurement")
VERSIONS = ("torch", "cuda", "triton", "driver", "python", "optexp")  # of the environment, as tags
CARD = {"sm_mhz": "gpu_sm_clock_mhz", "power_w": "gpu_power_usage_watts", "temperature_c": "gpu_temperature_celsius"}
MAX_POINTS = 50  # of a system metric
ROUNDING: dict[str, Callable[[float], float]] = {  # an interval is not made narrower; all else to the nearest
    "speedup/low": math.floor,
    "speedup/high": math.ceil,
}


def name(result: Result) -> str:
    """The name of the run in lists; a search's stack is found later."""
    mode = result.config.get("mode")
    stack = "auto" if mode == "auto" else result.label
    return f"{result.workload} · {stack}{' taken apart' if mode == 'ablate' else ''}"


def case(result: Result) -> str:
    """The workload with the keys that tell it from others, `mlp dim=512`: speedups of one case are compared."""
    flat = flatten(result.config)
    keys = (key for key in result.compared if key in flat)
    settings = (f"{key.removeprefix('workload.')}={as_typed(flat[key])}" for key in keys)
    return " ".join([result.workload, *settings])[:NAME_LIMIT]


def params(result: Result) -> dict[str, str]:
    """The settings that people compare: workload and its changed keys, stack, baseline, device, dtype and preset."""
    flat = flatten(result.config)
    found = {key: flat[key] for key in COMPARED if key in flat}
    found |= {"workload": result.workload, "strategy": result.label, "device": result.device}
    found |= {key: flat[key] for key in result.compared if key in flat}
    return {_as_name(key): as_typed(value)[:VALUE_LIMIT] for key, value in found.items()}


def _as_name(key: str) -> str:
    """A name that MLflow accepts: a key of a user's mapping may be any text, as in strategy.replace.names.*.weight."""
    return re.sub(r"[^\w.\-:/ ]", "_", key)[:NAME_LIMIT]


def metrics(result: Result) -> dict[str, float]:
    """Every figure that runs are compared by; without steps, so that the UI draws bars. Unknown ones are left out."""
    found: dict[str, float | str | None] = {}
    if result.speedup is not None:  # MLflow's comparison of runs draws the first
        found |= {f"speedup/{end}": getattr(result.speedup, end) for end in ("low", "estimate", "high")}
        if result.verdict is not Verdict.INCONCLUSIVE:
            found["cost/break_even_steps"] = result.measurement.cost.break_even_steps if result.measurement else None
    found["cost/setup_s"] = result.candidate.setup_s
    for arm, figures in (("baseline", result.baseline), ("candidate", result.candidate)):
        found |= {
            f"time/{arm}_us": figures.step_us,
            f"time/{arm}_device_us": figures.device_us,
            f"time/{arm}_p99_us": figures.p99_us,
            f"energy/{arm}_j": figures.energy_j,
            f"throughput/{arm}": figures.throughput,
            f"memory/{arm}_peak_mib": figures.peak_mib,
        }
        arms = result.profile.arms()
        physics = arms[arm].roofline if arm in arms else None
        found[f"bound/{arm}_us"] = physics.bound.us if physics and physics.bound else None
        profiled = arms[arm].metrics if arm in arms else {}
        found |= {f"profile/{arm}/{name}": value for name, value in profiled.items()}
        by_category = arms[arm].memory if arm in arms else None
        found |= {
            f"memory/{arm}_{name}_mib": size / 2**20 for name, size in (by_category.peak if by_category else {}).items()
        }
    for one in result.profile.predictions:
        found[f"prediction/{one.name.replace('=', ' ')}"] = one.speedup
    if tested := result.profile.prediction:
        bound = tested.prediction
        found |= {"prediction/bound_us": bound.bound_us, "prediction/speedup": bound.speedup}
        found["prediction/measured_over_bound"] = tested.ratio
    if result.equivalence:
        found["equivalence/error_ratio"] = result.equivalence.error_ratio
        found["equivalence/max_ratio"] = result.equivalence.max_ratio
    numbers = {key: v for key, v in found.items() if isinstance(v, (int, float)) and math.isfinite(v)}
    return {key: _rounded(value, ROUNDING.get(key, round)) for key, value in numbers.items()}


def _rounded(value: float, way: Callable[[float], float]) -> float:
    """The digits that a measurement supports."""
    if value == 0:
        return 0.0
    place = 10.0 ** (DIGITS - 1 - math.floor(math.log10(abs(value))))
    return float(f"{way(value * place) / place:.{DIGITS}g}")


@dataclass(frozen=True)
class Point:
    """One value of a system metric; `at_s` since the run began."""

    name: str
    value: float
    at_s: float
    step: int


def system(result: Result) -> list[Point]:
    """Clock, power and temperature of the card while it was measured, and the host's load before."""
    load = result.environment.get("load")
    points = [Point("system/cpu_load_average", float(load), 0.0, 0)] if load is not None else []
    for column, name in CARD.items():
        readings = list(_readings(result, column))
        thinned = readings[:: math.ceil(len(readings) / MAX_POINTS) or 1]
        points += [Point(f"system/{name}", value, at_s, step) for step, (at_s, value) in enumerate(thinned)]
    return points


def _readings(result: Result, column: str) -> Iterator[tuple[float, float]]:
    for process in result.series:
        for at_s, value in zip(process["at_s"], process.get(column, ()), strict=False):
            if at_s is not None and value is not None:
                yield at_s, value


def tags(result: Result) -> dict[str, str]:
    """Tags that runs are found by, and a summary to read."""
    facts = result.environment
    found = {
        "optexp.verdict": str(result.verdict),
        "optexp.workload": result.workload,
        "optexp.case": case(result),
        "optexp.strategy": result.label,
        "optexp.device": result.device_model,
        "optexp.evidence": "; ".join(summary.evidence(result)),
        "optexp.fingerprint": result.fingerprint,
        **({"optexp.regression": summary.regression(result)} if result.regression else {}),
        **({"optexp.replay": result.draws.key} if result.draws and result.draws.replayed else {}),
        **{f"optexp.{name}": str(facts[name]) for name in VERSIONS if facts.get(name)},
        "mlflow.note.content": note(result),
    }
    return {name: value[:TAG_LIMIT] for name, value in found.items()}


def note(result: Result) -> str:
    """A Markdown summary. MLflow's lists show its beginning: the verdict and the three figures that matter."""
    parts = [brief(result), result.headline]
    if result.verdict.measured:
        parts.append(
            "| | baseline | candidate | |\n|---|--:|--:|--:|\n"
            + "\n".join(f"| {r.name} | {r.baseline} | {r.candidate} | {r.change} |" for r in summary.rows(result))
        )
    lines = [
        *(f"Verified: {text}" for text in [summary.verified(result)] if text),
        *(f"Evidence: {text}" for text in summary.evidence(result)),
        *result.explanation,
        *summary.memory_reasons(result),
        *(f"Cost: {text}" for text in [summary.cost(result)] if text),
        *(f"Try next: {text}" for text in [summary.suggestion(result)] if text),
    ]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in lines)]).strip()


def brief(result: Result) -> str:
    """Verdict, speedup, time and peak memory in one line."""
    if not result.verdict.measured:
        return f"**{result.verdict}**"
    speedup = result.speedup
    sure = speedup and result.verdict is Verdict.FASTER
    gain = ""
    if speedup and result.verdict is Verdict.INCONCLUSIVE:
        gain = f" {low_to_high(speedup.low, speedup.high)}×"
    elif speedup and result.verdict is Verdict.SLOWER:
        gain = f" at least {at_least(speedup.inverse.low)}×"
    elif speedup:
        gain = f" at least {at_least(speedup.low)}×" if sure else f" {ratio(speedup.estimate)}"
    shown = {row.name: row for row in summary.rows(result)}
    figures = [
        f"{shown[name].baseline} → {shown[name].candidate} {what}"
        for name, what in (("time/step", "a step"), ("peak memory", "of memory"))
        if name in shown
    ]
    return " · ".join([f"**{result.verdict}{gain}**", *figures])
