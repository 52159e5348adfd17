"""Steps in a series that detectors find: precision and recall over many series, and alarms where there is no step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optexp.reporting import markdown

TOLERANCE = 3  # points between a step and its alarm
OURS = "optexp.watch"
SHOWN = 12  # alarms of one detector

Rows = Sequence[Mapping[str, Any]]


@dataclass
class Count:
    """Alarms and steps, over many series."""

    hits: int = 0
    steps: int = 0
    alarms: int = 0
    found: dict[float, list[bool]] = field(default_factory=dict)

    def add(self, steps: Mapping[int, float], alarms: Sequence[int]) -> None:
        """An alarm hits the nearest step within the tolerance; a second alarm of a step is false.

        steps: by their index, their relative size
        """
        hit = {at for at in steps if any(abs(alarm - at) <= TOLERANCE for alarm in alarms)}
        self.hits += len(hit)
        self.steps += len(steps)
        self.alarms += len(alarms)
        for at, size in steps.items():
            self.found.setdefault(abs(size), []).append(at in hit)

    @property
    def precision(self) -> float:
        return self.hits / self.alarms if self.alarms else 1.0

    @property
    def recall(self) -> float:
        return self.hits / self.steps if self.steps else 1.0

    def by_size(self, sizes: Iterable[float]) -> list[str]:
        """Recall of the steps of each size."""
        return [percent(sum(self.found[size]) / len(self.found[size])) for size in sizes]


def text(rows: Rows, table: str) -> str:
    """table: a key of TABLES, which has the shape of its rows"""
    return TABLES[table](rows)


def synthetic(rows: Rows) -> str:
    """By detector, and of ours by noise.

    rows: one for each series: `noise`, `steps` as pairs of index and size, `alarms` by detector
    """
    sizes = sorted({abs(size) for row in rows for _, size in row["steps"]})
    heads = [percent(size) for size in sizes]
    totals = {name: counted(rows, name) for name in rows[0]["alarms"]}
    noises = {noise: [row for row in rows if row["noise"] == noise] for noise in sorted({row["noise"] for row in rows})}
    every = [
        [name, percent(total.precision), percent(total.recall), *total.by_size(sizes)] for name, total in totals.items()
    ]
    ours = [[f"{100 * noise:.1f} %", *counted(found, OURS).by_size(sizes)] for noise, found in noises.items()]
    return "\n\n".join([
        f"{len(rows)} series. Columns of sizes have the recall:",
        markdown.table(["detector", "precision", "recall", *heads], every),
        f"Recall of `{OURS}` by noise:",
        markdown.table(["noise", *heads], ours),
    ])  # fmt: skip


def equal(rows: Rows) -> str:
    """rows: one for each detector and drift: `detector`, `drift`, `series`, `points` of each, `alarms`"""
    drifts = list(dict.fromkeys(row["drift"] for row in rows))
    heads = [f"drift of {percent(drift)}" if drift else "no drift" for drift in drifts]
    cells = {(row["detector"], row["drift"]): f"{row['alarms']} in {row['series']} series" for row in rows}
    points = sum(row["series"] * row["points"] for row in rows if row["detector"] == OURS and row["drift"] == drifts[0])
    names = dict.fromkeys(row["detector"] for row in rows)
    return "\n\n".join([
        f"{points:,} equal points of each kind:",
        markdown.table(["detector", *heads], [[name, *(cells.get((name, d), "") for d in drifts)] for name in names]),
    ])  # fmt: skip


def growing(rows: Rows) -> str:
    """rows: one for each series that grew point by point: `points`, `alarms` of ours at any length"""
    alarms = sum(row["alarms"] for row in rows)
    return (
        f"While {rows[0]['points']:,} equal points came in one by one, in each of {len(rows)} series: {alarms} alarms."
    )


def public(rows: Rows) -> str:
    """rows: one for each detector: `detector`, `steps` as indices, `alarms`"""
    cells = []
    for row in rows:
        total = Count()
        total.add(dict.fromkeys(row["steps"], 0.0), row["alarms"])
        alarms = ", ".join(map(str, row["alarms"][:SHOWN])) + (", …" if len(row["alarms"]) > SHOWN else "")
        shares = [f"{total.hits} of {total.steps}", percent(total.precision), percent(total.recall)]
        cells.append([row["detector"], alarms, *shares])
    steps = ", ".join(map(str, rows[0]["steps"]))
    table = markdown.table(["detector", "alarms", "hits", "precision", "recall"], cells)
    return f"The levels part at {steps}:\n\n{table}"


def counted(rows: Rows, detector: str) -> Count:
    total = Count()
    for row in rows:
        total.add(dict(row["steps"]), row["alarms"][detector])
    return total


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


TABLES: Mapping[str, Callable[[Rows], str]] = {
    "synthetic": synthetic, "equal": equal, "growing": growing, "public": public,
}  # fmt: skip
