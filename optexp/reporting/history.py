"""A comparison over time: records of one fingerprint in their order, the steps in them, a table and a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, isfinite, nan
from pathlib import Path
from typing import Any

from rich.table import Table

from optexp.errors import ConfigError
from optexp.measurement import change_points
from optexp.measurement.arm_times import Arm, log_time
from optexp.measurement.change_points import Step
from optexp.reporting import markdown, matching
from optexp.reporting.recorded import Recorded
from optexp.reporting.tables import frameless
from optexp.reporting.titles import flatten, titles
from optexp.result import Result
from optexp.schema import shown
from optexp.support.units import low_to_high, microseconds

NEWEST = 1000  # records that a history reads, at most
COLUMNS = ("when", "commit", "verdict", "speedup", "time/step>", "step")
WIDTH, HEIGHT = 6.5, 2.8  # of a panel, in inches
TICKS = 8  # dates on an axis
COMMIT = 8  # digits


@dataclass(frozen=True)
class Series:
    """Records of the same work, the oldest first. Another torch continues the series.

    steps: of the candidate's time, by the record that follows; empty without the extra [watch]
    """

    title: str
    records: Sequence[Recorded]
    steps: Mapping[str, Step] = field(default_factory=dict)

    @property
    def timed(self) -> list[Recorded]:
        return [record for record in self.records if record.result.speedup]


def series(records: Iterable[Recorded]) -> list[Series]:
    """Group records, given in any order, by what was compared. Steps are found where ruptures is installed."""
    groups: dict[frozenset[tuple[str, str]], list[Recorded]] = {}
    for record in sorted(records, key=lambda record: record.started):
        facts = matching.identity(record.result)
        facts.pop(matching.TORCH)
        groups.setdefault(frozenset(facts.items()), []).append(record)
    return [Series(title, group, steps(group)) for title, group in zip(_titles(groups), groups.values(), strict=True)]


def _titles(groups: Mapping[frozenset[tuple[str, str]], Sequence[Recorded]]) -> list[str]:
    """Workload with the settings that differ between series, both stacks, and the device where there are several."""
    newest, facts = [group[-1].result for group in groups.values()], [dict(key) for key in groups]
    several = len({fact["device"] for fact in facts}) > 1
    named = []
    for title, result, fact in zip(titles(newest), newest, facts, strict=True):
        against = fact.get("baseline", "baseline")
        beside = f" against {against}" if against != "baseline" else ""
        place = f" on {fact['device']}" if several else ""
        named.append(f"{title} · {result.label}{beside}{place}")
    return named


def steps(group: Sequence[Recorded]) -> dict[str, Step]:
    """Steps of the candidate's time, by the id of the first run after each; none without the extra [watch]."""
    timed = [record for record in group if record.result.speedup and record.result.candidate.step_us]
    try:
        found = change_points.steps([record.result.candidate.step_us or 0.0 for record in timed])
    except ConfigError:
        return {}
    return {timed[step.index].run_id: step for step in found}


def fits(result: Result, wanted: Mapping[str, str]) -> bool:
    """Whether a result has these settings, as they are typed; the members of a stack come in any order."""
    flat = {key: shown(value) for key, value in flatten(result.config).items()}
    flat |= {"workload": result.workload, "strategy": members(result.label)}
    return all(flat.get(key) == (members(value) if key == "strategy" else value) for key, value in wanted.items())


def members(stack: str) -> str:
    """A stack in one order, however it is written."""
    return "+".join(sorted(stack.strip("[]").replace(",", "+").split("+"))) or "baseline"


# --- rows ------------------------------------------------------------------------------------------------------------


def row(one: Series, record: Recorded) -> list[str]:
    """Cells of `COLUMNS`."""
    result, step = record.result, one.steps.get(record.run_id)
    interval = result.speedup
    return [
        f"{record.started:%Y-%m-%d %H:%M}",
        commit(result),
        str(result.verdict),
        low_to_high(interval.low, interval.high) if interval else "",
        microseconds(result.candidate.step_us) if result.candidate.step_us else "",
        f"{step.change:+.1%}" if step else "",
    ]


def commit(result: Result) -> str:
    """Of the working folder, else of optexp's checkout; * where files were changed."""
    git: Mapping[str, Any] = result.environment.get("git") or result.environment.get("optexp_git") or {}
    return str(git.get("commit", ""))[:COMMIT] + ("*" if git.get("dirty") else "")


def table(one: Series) -> Table:
    """One line for each record."""
    made = frameless(*COLUMNS)
    for record in one.records:
        made.add_row(*row(one, record))
    return made


def page(every: Sequence[Series]) -> str:
    """All series as tables for a page, as of a job's summary."""
    heads = [name.removesuffix(">") for name in COLUMNS]
    tables = ((one.title, markdown.table(heads, [row(one, record) for record in one.records])) for one in every)
    return "\n".join(f"### {title}\n\n{table}\n" for title, table in tables)


# --- a picture -------------------------------------------------------------------------------------------------------


def draw(every: Sequence[Series], path: Path) -> bool:
    """Time/step and speedup of each series with their intervals, and the steps; False where nothing was timed."""
    from matplotlib.figure import Figure  # without pyplot: no backend, no global state

    drawn = [one for one in every if one.timed]
    if not drawn:
        return False
    figure = Figure(figsize=(2 * WIDTH, HEIGHT * len(drawn) + 0.4), layout="constrained")
    for one, (times, speedups) in zip(drawn, figure.subplots(len(drawn), 2, squeeze=False), strict=True):
        _panel(times, one, [_time_ms(record) for record in one.timed], "time/step, ms")
        _panel(speedups, one, [_speedup(record) for record in one.timed], "speedup")
        speedups.axhline(1, color="black", linewidth=1)
        times.set_title(one.title, loc="left", fontsize=10)
        _levels(times, one)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True


def _panel(axes: Any, one: Series, intervals: Sequence[tuple[float, float, float]], name: str) -> None:
    below = [estimate - low for estimate, low, _ in intervals]
    above = [high - estimate if isfinite(high) else nan for estimate, _, high in intervals]
    at = range(len(intervals))
    axes.errorbar(at, [estimate for estimate, _, _ in intervals], yerr=[below, above], fmt="o", ms=3, lw=1, capsize=2)
    ticks = [n for n in at if n % -(-len(intervals) // TICKS) == 0]
    axes.set_xticks(
        ticks, [f"{one.timed[n].started:%m-%d %H:%M}\n{commit(one.timed[n].result)}" for n in ticks], fontsize=7
    )
    axes.set_ylabel(name)
    axes.spines[["top", "right"]].set_visible(False)


def _levels(axes: Any, one: Series) -> None:
    for n, record in enumerate(one.timed):
        if step := one.steps.get(record.run_id):
            axes.axvline(n - 0.5, color="#c62828" if step.change > 0 else "#2e7d32", linewidth=1)
            axes.annotate(f"{step.change:+.1%}", (n - 0.4, 0.94), xycoords=("data", "axes fraction"), fontsize=8)


def _time_ms(record: Recorded) -> tuple[float, float, float]:
    result = record.result
    assert result.speedup
    assert result.measurement
    time = log_time(result.measurement, Arm.CANDIDATE, result.speedup.confidence)
    found = time.interval(result.speedup.confidence)
    middle = (result.candidate.step_us or exp(found.estimate)) / 1e3
    return middle, middle * exp(found.low - found.estimate), middle * exp(min(found.high - found.estimate, 700.0))


def _speedup(record: Recorded) -> tuple[float, float, float]:
    assert record.result.speedup
    return record.result.speedup.estimate, record.result.speedup.low, record.result.speedup.high
