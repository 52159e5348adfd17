"""How near honest strategies come to the gates' limits, and which mutants the gates catch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from optexp.reporting import markdown

HEADS = ("arithmetic", "strategy", "workloads", "verifications", "alarms", "most of a limit", "of")


def text(rows: Sequence[Mapping[str, Any]], reached: Sequence[int] = ()) -> str:
    """rows: one for each stack on one workload: `arithmetic`, `strategy`, `verifications`, `alarms`, `used` (largest
    share of a limit), `of` (its tensor) and `mutants`: by name, how many were caught and tried
    reached: combinations before the time was over, and all of them
    """
    verifications, alarms = (sum(row[key] for row in rows) for key in ("verifications", "alarms"))
    keys = list(dict.fromkeys((row["arithmetic"], row["strategy"]) for row in rows))
    honest = [stack(*key, [row for row in rows if (row["arithmetic"], row["strategy"]) == key]) for key in keys]
    most = max(row["used"] for row in rows)
    part = f" {reached[0]} of {reached[1]} combinations were reached." if reached else ""
    return "\n\n".join([
        f"{verifications} verifications raised {alarms} alarms. The nearest came to {most:.0%} of a limit.{part}",
        markdown.table(HEADS, honest),
        mutants(rows),
    ])  # fmt: skip


def stack(arithmetic: str, strategy: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A stack on all its workloads."""
    worst = max(rows, key=lambda row: row["used"])
    counts = [len(rows), sum(row["verifications"] for row in rows), sum(row["alarms"] for row in rows)]
    return [arithmetic, strategy, *map(str, counts), f"{worst['used']:.0%}", worst["of"]]


def mutants(rows: Sequence[Mapping[str, Any]]) -> str:
    """Caught of tried, by kind of arithmetic."""
    kinds, cells = sorted({row["arithmetic"] for row in rows}), dict[tuple[str, str], Counter[str]]()
    for row in rows:
        for name, (caught, tried) in row["mutants"].items():
            cells.setdefault((name, row["arithmetic"]), Counter()).update(caught=caught, tried=tried)
    names = dict.fromkeys(name for name, _ in cells)
    table = [[name, *(counted(cells.get((name, kind), Counter())) for kind in kinds)] for name in names]
    return markdown.table(["mutant caught", *kinds], table)


def counted(cell: Counter[str]) -> str:
    return f"{cell['caught']} of {cell['tried']}" if cell else "–"
