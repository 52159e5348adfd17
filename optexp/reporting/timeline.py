"""Pictures of a measurement, as positions in pixels: histograms of its blocks, and their times in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from statistics import median

from optexp.result import Result
from optexp.support.units import duration

WIDTH, HEIGHT, MARGIN = 720, 64, 24
BINS = 60
ARMS = ("baseline", "candidate")
CARD = (("sm_mhz", "SM clock", "MHz"), ("power_w", "power", "W"), ("temperature_c", "temperature", "°C"))


Tick = tuple[float, str]  # place in pixels, and label


@dataclass(frozen=True)
class Bar:
    """One bar of a histogram, in pixels."""

    x: float
    height: float


@dataclass(frozen=True)
class Histogram:
    """Block times of one arm.

    text:  the same in words
    width: of each bar, in pixels
    """

    arm: str
    text: str
    bars: list[Bar]
    width: float
    ticks: list[Tick]


@dataclass(frozen=True)
class Panel:
    """A strip of the timeline.

    title: names the values at its lower and upper edge
    lines: name of each series, with the dots (x, y) of each process
    """

    title: str
    lines: list[tuple[str, list[list[tuple[float, float]]]]]


def panels(result: Result) -> list[Panel]:
    """Block times relative to the arm's median, and below them the GPU's readings at the same time.

    Where block times are withheld, the readings stand alone, as no ratio follows from them.
    """
    series, pairs = result.series, result.measurement.pairs if result.measurement else []
    if not series or len(series) != len(pairs or series):
        return []
    times, end = _times(series)

    def x(seconds: float) -> float:
        return round(MARGIN + seconds / end * (WIDTH - 2 * MARGIN), 1)

    def panel(title: Callable[[float, float], str], lines: dict[str, list[list[float | None]]]) -> Panel | None:
        known = sorted(v for processes in lines.values() for values in processes for v in values if v is not None)
        if not known:
            return None
        low, high = (known[len(known) // 100], known[-1 - len(known) // 100])  # the outermost 1 % lie on the edges
        span = high - low or abs(high) or 1.0

        def y(value: float) -> float:
            share = (min(max(value, low), high) - low) / span if high > low else 0.5
            return round(HEIGHT - 6 - share * (HEIGHT - 26), 1)

        def dots(process: int, values: Sequence[float | None]) -> list[tuple[float, float]]:
            return [(x(at), y(v)) for at, v in zip(times[process], values, strict=True) if v is not None]

        drawn = [(name, [dots(i, values) for i, values in enumerate(processes)]) for name, processes in lines.items()]
        return Panel(title(low, high), drawn)

    blocks: dict[str, list[list[float | None]]] = {}
    for place, arm in enumerate(ARMS if pairs else ()):
        typical = median(pair[place] for process in pairs for pair in process)
        shares = [iter([pair[place] / typical for pair in process]) for process in pairs]
        blocks[arm] = [
            [next(of_kept) if kept else None for kept in process.get("kept") or [1] * len(process["at_s"])]
            for process, of_kept in zip(series, shares, strict=True)
        ]
    found = [panel(lambda low, high: f"block times, {low - 1:+.1%} to {high - 1:+.1%} of the arm's median", blocks)]
    for key, name, unit in CARD:
        lines = {key: [process.get(key) or [None] * len(process["at_s"]) for process in series]}
        found.append(panel(lambda low, high, n=name, u=unit: f"{n}, {low:.0f} to {high:.0f} {u}", lines))  # type: ignore[misc]
    return [drawn for drawn in found if drawn]


def axis(result: Result) -> list[Tick]:
    """Ticks at round times, below the panels."""
    series = result.series
    if not series:
        return []
    _, end = _times(series)
    return [(MARGIN + at / end * (WIDTH - 2 * MARGIN), f"{at:.{places}f} s") for at, places in ticks(0.0, end)]


def _times(series: Sequence[Mapping[str, Sequence[float | None]]]) -> tuple[list[list[float]], float]:
    """Begin of each pair by process, and of the last pair, in seconds."""
    times = _without_pauses([[at for at in process["at_s"] if at is not None] for process in series])
    return times, times[-1][-1] or 1.0


def ticks(low: float, high: float, most: int = 8) -> list[tuple[float, int]]:
    """Round numbers between the ends, in at most `most` intervals, each with its decimal places."""
    raw = (high - low) / most
    power = 10.0 ** floor(log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    places = max(0, -floor(log10(step)))
    return [(index * step, places) for index in range(ceil(low / step), floor(high / step) + 1)]


def _without_pauses(times: Sequence[Sequence[float]]) -> list[list[float]]:
    """The times of all processes in a row, with the pauses between processes cut short."""
    pause = 0.02 * sum(process[-1] - process[0] for process in times)
    begin, found = 0.0, []
    for process in times:
        found.append([begin + at - process[0] for at in process])
        begin = found[-1][-1] + pause
    return found


def histograms(result: Result) -> list[Histogram]:
    """Step times of each arm's blocks: equal bars over the middle 98 %, of which the outermost have the rest."""
    pairs = [pair for process in result.measurement.pairs for pair in process] if result.measurement else []
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
            Bar(round(MARGIN + i * bar, 1), round(40 * count / max(counts), 1))
            for i, count in enumerate(counts)
            if count
        ]
        text = (
            f"{arm}: {duration(low / 1e6)} to {duration(high / 1e6)} a step, median {duration(median(ordered) / 1e6)}"
        )
        scale = ticks(low, high, most=4) if high > low else [(low, 0)]
        marks = [(round(MARGIN + (at - low) / width * bar, 1), duration(at / 1e6)) for at, _ in scale]
        found.append(Histogram(arm, text, bars, round(bar, 2), marks))
    return found
