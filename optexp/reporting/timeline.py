"""Pictures of a measurement, as positions in pixels: how its blocks are distributed, and how it went over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Any

from optexp.reporting.wording import duration
from optexp.result import Result

WIDTH, HEIGHT, MARGIN = 720, 64, 24
BINS = 60
ARMS = ("baseline", "candidate")
CARD = (("sm_mhz", "SM clock", "MHz"), ("power_w", "power", "W"), ("temperature_c", "temperature", "°C"))


@dataclass(frozen=True)
class Panel:
    """A strip of the timeline: dots of each process by series, between the two values that its title names."""

    title: str
    lines: list[tuple[str, list[list[tuple[float, float]]]]]  # (series, processes of (x, y))


def panels(result: Result) -> list[Panel]:
    """What the blocks took, relative to the arm's median, and below it what the card said at the same time."""
    series = result.measurement.get("series") or []
    pairs = result.measurement.get("pairs") or []
    if not series or len(series) != len(pairs):
        return []
    times = _without_pauses([process["at_s"] for process in series])
    end = times[-1][-1] or 1.0

    def x(seconds: float) -> float:
        return round(MARGIN + seconds / end * (WIDTH - 2 * MARGIN), 1)

    def panel(title: Callable[[float, float], str], lines: dict[str, list[list[float | None]]]) -> Panel | None:
        known = sorted(v for processes in lines.values() for values in processes for v in values if v is not None)
        if not known:
            return None
        low, high = (known[len(known) // 100], known[-1 - len(known) // 100])  # single blocks beyond sit on the edge
        span = high - low or abs(high) or 1.0

        def y(value: float) -> float:
            share = (min(max(value, low), high) - low) / span if high > low else 0.5
            return round(HEIGHT - 6 - share * (HEIGHT - 26), 1)

        def dots(process: int, values: Sequence[float | None]) -> list[tuple[float, float]]:
            return [(x(at), y(v)) for at, v in zip(times[process], values, strict=True) if v is not None]

        drawn = [(name, [dots(i, values) for i, values in enumerate(processes)]) for name, processes in lines.items()]
        return Panel(title(low, high), drawn)

    typical = [median(pair[place] for process in pairs for pair in process) for place in (0, 1)]
    blocks: dict[str, list[list[float | None]]] = {
        arm: [[pair[place] / typical[place] for pair in process] for process in pairs] for place, arm in enumerate(ARMS)
    }
    found = [panel(lambda low, high: f"block times, {low - 1:+.1%} to {high - 1:+.1%} of the arm's median", blocks)]
    for key, name, unit in CARD:
        lines = {key: [process.get(key) or [None] * len(process["at_s"]) for process in series]}
        found.append(panel(lambda low, high, n=name, u=unit: f"{n}, {low:.0f} to {high:.0f} {u}", lines))  # type: ignore[misc]
    return [drawn for drawn in found if drawn]


def _without_pauses(times: Sequence[Sequence[float]]) -> list[list[float]]:
    """Processes one after the other: what passes between them, while the next ones start, is cut short."""
    pause = 0.02 * sum(process[-1] - process[0] for process in times)
    begin, found = 0.0, []
    for process in times:
        found.append([begin + at - process[0] for at in process])
        begin = found[-1][-1] + pause
    return found


def histograms(result: Result) -> list[dict[str, Any]]:
    """How long the blocks of each arm took a step: bars of equal width over 98 % of them, the rest at the ends."""
    pairs = [pair for process in result.measurement.get("pairs") or [] for pair in process]
    found = []
    for place, arm in enumerate(ARMS if len(pairs) >= 10 else ()):
        ordered = sorted(pair[place] for pair in pairs)
        low, high = ordered[len(ordered) // 100], ordered[-1 - len(ordered) // 100]
        width = (high - low) / BINS or 1.0
        counts = [0] * BINS
        for value in ordered:
            counts[min(BINS - 1, max(0, ceil((value - low) / width) - 1))] += 1
        bar = (WIDTH / 2 - 2 * MARGIN) / BINS
        bars = [
            {"x": round(MARGIN + i * bar, 1), "height": round(40 * count / max(counts), 1)}
            for i, count in enumerate(counts)
            if count
        ]
        text = (
            f"{arm}: {duration(low / 1e6)} to {duration(high / 1e6)} a step, median {duration(median(ordered) / 1e6)}"
        )
        found.append({"arm": arm, "text": text, "bars": bars, "width": round(bar, 2)})
    return found
