"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose cells stand on one line each, without a line break at its end."""
    first, *others = ("| " + " | ".join(map(_cell, row)) + " |" for row in (heads, *rows))
    return "\n".join([first, "|" + "---|" * len(heads), *others])


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
