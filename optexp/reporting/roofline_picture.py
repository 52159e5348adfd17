"""The roofline as positions in pixels, and the table beside it: operators below the device's measured ceilings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, log10, sqrt

from optexp.profiling.work import amount
from optexp.records.profile import Calibration
from optexp.records.roofline import PhysicalBound, Roofline, RooflinePoint
from optexp.reporting.timeline import Tick
from optexp.result import Result

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 64, 16, 16, 40
LARGEST, SMALLEST = 22.0, 3.0  # radii, of all the time and of next to none
LABELS = 4  # of an arm's largest operators
ROWS = 25

Scale = Callable[[float], float]  # from a value to pixels


@dataclass(frozen=True)
class Roof:
    """A ceiling: a line from `start` to `end`, with its name beside it."""

    start: tuple[float, float]
    end: tuple[float, float]
    text: str
    slanted: bool = False


@dataclass(frozen=True)
class Dot:
    """One operator of one arm; `text` says it in words, `label` is written beside it where it is among the largest."""

    arm: str
    x: float
    y: float
    radius: float
    text: str
    label: str = ""
    anchor: str = "start"


@dataclass(frozen=True)
class Picture:
    """Both axes are logarithmic: flop/byte, and flop/s."""

    width: int
    height: int
    bottom: int
    left: int
    roofs: list[Roof]
    dots: list[Dot]
    columns: list[Tick]
    rows: list[Tick]


@dataclass(frozen=True)
class TableRow:
    """Work of one operator, and the shares that it reaches of both ceilings; a share is "" where it has none."""

    point: RooflinePoint
    bandwidth: float | None
    compute: float | None


@dataclass(frozen=True)
class Shown:
    """A report's section.

    bounds: by arm;  tables: by arm;  picture: None where nothing computes, or no time is shown
    beyond: whether a row of the tables is above a ceiling
    """

    calibration: Calibration | None
    picture: Picture | None
    bounds: Mapping[str, PhysicalBound]
    tables: Mapping[str, list[TableRow]]
    arms: Mapping[str, Roofline] = field(default_factory=dict)
    beyond: bool = False


def shown(result: Result) -> Shown | None:
    """The roofline of a report; None where no arm has one."""
    arms = {name: found.roofline for name, found in result.profile.arms().items() if found.roofline}
    if not arms:
        return None
    ceilings = result.profile.calibration
    bounds = {name: found.bound for name, found in arms.items() if found.bound}
    tables = {name: table(found.points, ceilings) for name, found in arms.items() if found.points}
    every = [share or 0.0 for rows in tables.values() for row in rows for share in (row.bandwidth, row.compute)]
    beyond = max(every, default=0.0) > 1
    return Shown(ceilings, picture(arms, ceilings), bounds, tables, arms, beyond) if bounds or tables else None


def table(points: Sequence[RooflinePoint], ceilings: Calibration | None) -> list[TableRow]:
    """The operators with most time."""
    rows = []
    for point in points[:ROWS]:
        bandwidth = point.bandwidth / ceilings.bandwidth if ceilings and point.bandwidth else None
        rows.append(TableRow(point, bandwidth, point.rate / point.ceiling if point.rate and point.ceiling else None))
    return rows


def picture(arms: Mapping[str, Roofline], ceilings: Calibration | None) -> Picture | None:
    """Operators that compute and were timed, as circles whose area is their share of the time."""
    points = {name: [point for point in found.points if point.rate] for name, found in arms.items()}
    every = [point for found in points.values() for point in found]
    if not every or ceilings is None or not ceilings.matrix:
        return None
    highest, ridge = max(ceilings.matrix.values()), max(ceilings.matrix.values()) / ceilings.bandwidth
    rates = [point.rate or 1.0 for point in every]
    across = decades([*(point.intensity for point in every), ridge])
    up = decades([*rates, highest, min(ceilings.matrix.values())])

    def x(intensity: float) -> float:
        return round(LEFT + (log10(intensity) - across[0]) / (across[1] - across[0]) * (WIDTH - LEFT - RIGHT), 1)

    def y(rate: float) -> float:
        return round(HEIGHT - BOTTOM - (log10(rate) - up[0]) / (up[1] - up[0]) * (HEIGHT - BOTTOM - TOP), 1)

    dots = [dot for name, found in points.items() for dot in circles(name, found, x, y)]
    return Picture(
        width=WIDTH,
        height=HEIGHT,
        bottom=HEIGHT - BOTTOM,
        left=LEFT,
        roofs=roofs(ceilings, across, up, x, y),
        dots=sorted(dots, key=lambda dot: -dot.radius),
        columns=[(x(10.0**decade), power(decade)) for decade in range(across[0], across[1] + 1)],
        rows=[(y(10.0**decade), f"{amount(10.0**decade)}FLOP/s") for decade in range(up[0], up[1] + 1)],
    )


def circles(arm: str, points: Sequence[RooflinePoint], x: Scale, y: Scale) -> list[Dot]:
    """The largest ones have labels, on the side where there is room."""
    found = []
    for place, point in enumerate(sorted(points, key=lambda point: -point.share)):
        at, rate = x(point.intensity), point.rate or 1.0
        text = f"{arm}: {point.name} ({point.shapes}), {point.share:.1%} of the time, {amount(rate)}FLOP/s at"
        text += f" {point.intensity:.3g} FLOP/B"
        label = point.name.removeprefix("aten::") if place < LABELS else ""
        radius = max(SMALLEST, LARGEST * sqrt(point.share))
        found.append(Dot(arm, at, y(rate), round(radius, 1), text, label, "end" if at > WIDTH / 2 else "start"))
    return found


def roofs(ceilings: Calibration, across: tuple[int, int], up: tuple[int, int], x: Scale, y: Scale) -> list[Roof]:
    """The bandwidth as a slope up to the fastest arithmetic, and each dtype's arithmetic from that slope on."""
    speed, highest = ceilings.bandwidth, max(ceilings.matrix.values())
    lowest = max(10.0 ** across[0], 10.0 ** up[0] / speed)
    slope = Roof(
        (x(lowest), y(lowest * speed)),
        (x(highest / speed), y(highest)),
        f"{amount(speed)}B/s",
        slanted=True,
    )
    flat = [
        Roof((x(rate / speed), y(rate)), (float(WIDTH - RIGHT), y(rate)), f"{dtype} {amount(rate)}FLOP/s")
        for dtype, rate in sorted(ceilings.matrix.items(), key=lambda item: -item[1])
        if rate / speed >= lowest
    ]
    return [slope, *apart(flat)]


def apart(flat: Sequence[Roof]) -> list[Roof]:
    """One name for ceilings that are too near to each other for two."""
    found: list[Roof] = []
    for roof in flat:
        if found and roof.start[1] - found[-1].start[1] < 14:
            near = found.pop()
            found += [Roof(near.start, near.end, f"{near.text}, {roof.text}"), Roof(roof.start, roof.end, "")]
        else:
            found.append(roof)
    return found


def decades(values: Sequence[float]) -> tuple[int, int]:
    """Powers of ten around positive values."""
    logs = [log10(value) for value in values if value > 0]
    return floor(min(logs)), floor(max(logs)) + 1


def power(decade: int) -> str:
    """1e-2 as 0.01, 1e3 as 1000."""
    return f"{10.0**decade:g}"
