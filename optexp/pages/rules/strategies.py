"""Strategies × workloads: a verdict of each pair, and how much of its difference causes explain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optexp.reporting import markdown
from optexp.result import Verdict
from optexp.support.units import duration

EXPLAINED = 0.95  # of a difference, at least


@dataclass(frozen=True)
class Pair:
    """A strategy on a workload.

    estimate, low, high: of the speedup; None where none was measured
    step_us:             of the baseline
    predicted:           the largest speedup that the strategy's bound allows; None where it has none
    explained:           share of the difference in time that causes add up to; None where nothing is explained
    memory_bytes:        difference in peak memory;  memory_explained: as `explained`
    """

    workload: str
    strategy: str
    verdict: str
    headline: str
    device: str
    seconds: float
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    step_us: float | None = None
    predicted: float | None = None
    explained: float | None = None
    memory_bytes: int | None = None
    memory_explained: float | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.workload, self.strategy

    @property
    def decided(self) -> bool:
        return self.verdict in (Verdict.FASTER, Verdict.SLOWER)

    @property
    def reason(self) -> str:
        return self.headline.partition(": ")[2]


def text(rows: Sequence[Mapping[str, Any]], table: str) -> str:
    """rows: fields of `Pair`;  table: a key of TABLES"""
    return TABLES[table]([Pair(**row) for row in rows])


def grid(pairs: Sequence[Pair]) -> str:
    """Rows of strategies, columns of workloads; reasons below."""
    found, reasons = {pair.key: pair for pair in pairs}, list[str]()
    columns = list(dict.fromkeys(pair.workload for pair in pairs))
    strategies = dict.fromkeys(pair.strategy for pair in pairs)
    rows = [[f"`{row}`", *(cell(found.get((name, row)), reasons) for name in columns)] for row in strategies]
    return "\n\n".join([markdown.table(["", *(f"`{name}`" for name in columns)], rows), *numbered(reasons)])


def intervals(pairs: Sequence[Pair]) -> str:
    """A row for each workload, with intervals; reasons below."""
    found, reasons = {pair.key: pair for pair in pairs}, list[str]()
    strategies, rows = list(dict.fromkeys(pair.strategy for pair in pairs)), []
    for name in dict.fromkeys(pair.workload for pair in pairs):
        of = [found.get((name, strategy)) for strategy in strategies]
        step_us = next((pair.step_us for pair in of if pair and pair.step_us), None)
        cells = [part for pair in of for part in (cell(pair, reasons), interval(pair))]
        rows.append([f"`{name}`", duration(step_us / 1e6) if step_us else "", *cells])
    heads = [head for strategy in strategies for head in (f"`{strategy}`", "interval")]
    return "\n\n".join([markdown.table(["workload", "step", *heads], rows), *numbered(reasons)])


def explained(pairs: Sequence[Pair]) -> str:
    """Of each measured pair, the shares of its differences in time and in peak memory that causes add up to."""
    rows, shares = list[list[str]](), list[float]()
    for pair in (pair for pair in pairs if pair.estimate is not None):
        share = pair.explained if pair.decided else None
        shares += [share or 0.0] if pair.decided else []
        shares += [pair.memory_explained] if pair.memory_explained is not None else []
        told = percent(share) if share is not None else "none" if pair.decided else ""
        memory = f"{pair.memory_bytes:+,} B" if pair.memory_bytes is not None else ""
        named = [f"`{pair.workload}`", f"`{pair.strategy}`", pair.verdict, f"{pair.estimate:.3g}×"]
        rows.append([*named, told, memory, percent(pair.memory_explained)])
    reached = sum(share >= EXPLAINED for share in shares)
    heads = ["workload", "strategy", "verdict", "step", "explained", "peak memory", "explained"]
    summary = f"{reached} of {len(shares)} differences are explained by at least {EXPLAINED:.0%}."
    return f"{summary}\n\n{markdown.table(heads, rows)}"


def cell(pair: Pair | None, reasons: list[str]) -> str:
    """The verdict, with the ratio where one was measured, else with the number of its reason."""
    if pair is None:
        return ""
    if pair.estimate is not None:
        return f"{pair.verdict} {pair.estimate:.3g}×"
    if pair.reason not in reasons:
        reasons.append(pair.reason)
    return f"{pair.verdict} {reasons.index(pair.reason) + 1}"


def interval(pair: Pair | None) -> str:
    return f"{pair.low:.3g} to {pair.high:.3g}" if pair is not None and pair.low and pair.high else ""


def numbered(reasons: Sequence[str]) -> list[str]:
    """A list, where there is any."""
    lines = [f"{number}. {' '.join(reason.split())}" for number, reason in enumerate(reasons, 1)]
    return ["\n".join(lines)] if lines else []


def percent(share: float | None) -> str:
    return f"{share:.0%}" if share is not None else ""


TABLES: Mapping[str, Callable[[Sequence[Pair]], str]] = {"grid": grid, "intervals": intervals, "explained": explained}
