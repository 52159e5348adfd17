"""Tables and lines on a terminal, without frames."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from optexp.records.verdict import Verdict

COLOURS = {
    Verdict.FASTER: "bold green",
    Verdict.SLOWER: "bold red",
    Verdict.SAME: "bold cyan",
    Verdict.INCONCLUSIVE: "bold yellow",
    Verdict.PROFILED: "bold cyan",
    Verdict.VERIFIED: "bold green",
    Verdict.UNSUPPORTED: "bold yellow",
    Verdict.NOT_ENGAGED: "bold yellow",
}
ALARM = "bold red"  # ERROR, NOT_EQUIVALENT, UNVERIFIED, INVALID


def frameless(*columns: str) -> Table:
    """A table without a frame; a name that ends in > is a column of figures."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for name in columns:
        figures = name.endswith(">")
        table.add_column(
            name.removesuffix(">"), justify="right" if figures else "left", no_wrap=figures, overflow="fold"
        )
    return table


def labelled(pairs: Iterable[tuple[str, str]]) -> Table:
    """Short label, long text; pairs without a text are left out."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, min_width=8)
    grid.add_column(overflow="fold")
    for label, text in pairs:
        if text:
            grid.add_row(label, Text(text))
    return grid


def spaced(parts: Iterable[RenderableType]) -> Iterator[RenderableType]:
    """Parts with an empty line between them; tables without a row are left out."""
    for index, part in enumerate(part for part in parts if not isinstance(part, Table) or part.row_count):
        if index:
            yield Text()
        yield part
