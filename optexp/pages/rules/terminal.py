"""The terminal's lines of one comparison, as a console block."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from optexp.reporting.terminal import PIPE_WIDTH, render
from optexp.result import Result


def text(rows: Sequence[Mapping[str, Any]], typed: str) -> str:
    """rows: one `result.json`;  typed: the command's overrides"""
    (row,) = rows
    shown = io.StringIO()
    Console(file=shown, width=PIPE_WIDTH, highlight=False, markup=False).print(render(Result.of(row)), soft_wrap=False)
    lines = re.sub(r" +$", "", shown.getvalue(), flags=re.MULTILINE).strip()
    return f"```console\n$ python -m optexp {typed}\n{lines}\n```"
