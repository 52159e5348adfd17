"""Memory over steps as a stacked area, in pixels, drawn as SVG by a template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optexp.records.memory import CATEGORIES, MemoryProfile

WIDTH, HEIGHT = 720, 190
TOP = 1.04  # of the highest level, which the picture reaches


@dataclass(frozen=True)
class Area:
    """One category: points of a polygon."""

    category: str
    name: str
    points: str


@dataclass(frozen=True)
class Areas:
    """Memory of one arm over its recorded steps, in pixels.

    steps: where each step begins;  peak: height of the peak
    """

    width: int
    height: int
    areas: list[Area]
    steps: list[float]
    peak: float


@dataclass(frozen=True)
class CompositionRow:
    """Bytes of a category at the peak, by arm; change from the first to the last."""

    category: str
    name: str
    bytes: dict[str, int]
    change: int


def areas(found: MemoryProfile, highest: int) -> Areas:
    """Positions of a timeline's areas.

    Args:
        highest: Bytes at the top of the picture, the same for pictures that are compared.
    """
    timeline = found.timeline
    last = max(timeline.at[-1], 1) if timeline.at else 1

    def x(at: int) -> float:
        return round(WIDTH * at / last, 1)

    def y(size: float) -> float:
        return round(HEIGHT * (1 - size / (TOP * highest)), 1) if highest else float(HEIGHT)

    below, drawn = [0] * len(timeline.at), []
    for category, name in CATEGORIES.items():
        sizes = timeline.bytes.get(category)
        if sizes is None:
            continue
        above = [low + max(size, 0) for low, size in zip(below, sizes, strict=True)]
        edge = [(x(at), y(level)) for at, level in zip(timeline.at, above, strict=True)]
        back = [(x(at), y(level)) for at, level in zip(timeline.at, below, strict=True)][::-1]
        drawn.append(Area(category, name, _points([*edge, *back])))
        below = above
    return Areas(WIDTH, HEIGHT, drawn, [x(at) for at in timeline.steps], y(found.peak_bytes))


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in places)


def composition(arms: Mapping[str, MemoryProfile]) -> list[CompositionRow]:
    """Categories of the peaks, in the order of a picture."""
    rows = []
    for category, name in CATEGORIES.items():
        sizes = {arm: found.peak.get(category, 0) for arm, found in arms.items()}
        if any(sizes.values()):
            first, last = (list(sizes.values())[end] for end in (0, -1))
            rows.append(CompositionRow(category, name, sizes, last - first))
    return rows
