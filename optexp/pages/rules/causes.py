"""Programs with a cause of slowness that was built in: the cause that is named first, alone and beside its pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optexp.reporting import markdown

HEADS = ("program", "bottleneck named first", "first cause of the pair", "explained")


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """rows: one for each program: `program`, `expected` (labels of bottleneck and of cause), `named` and `found` (they
    come first), `bottleneck` (label and words), `cause` (words), `explained` (share)
    """
    named, found = (sum(row[key] for row in rows) for key in ("named", "found"))
    answer = f"**Answer.** {named} of {len(rows)} programs, {found} of {len(rows)} pairs."
    return f"{answer}\n\n{markdown.table(HEADS, list(map(cells, rows)))}"


def cells(row: Mapping[str, Any]) -> list[str]:
    label, account = row["expected"]
    missed = "" if row["named"] else f"**missed ({label}):** "
    lost = "" if row["found"] else f"**missed ({account}):** "
    return [
        row["program"],
        missed + ": ".join(row["bottleneck"]),
        lost + row["cause"],
        f"{100 * row['explained']:.0f} %",
    ]
