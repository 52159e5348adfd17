"""`python -m optexp.read a.json.gz [b.json.gz]`: where the time of any torch trace goes, and why two traces differ.

A trace is a file that `torch.profiler` exports (`export_chrome_trace`, `tensorboard_trace_handler`). Nothing is run and
nothing is verified: whether two programs compute the same is not asked.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from optexp.commands.parsing import parser_of
from optexp.comparison.suggestions import answered, installed
from optexp.errors import ConfigError
from optexp.profiling import any_trace, calibration
from optexp.profiling.bounds import Bound, bounds
from optexp.profiling.breakdown import Breakdown, breakdown
from optexp.profiling.diagnosis import diagnose
from optexp.profiling.explanation import difference, explain
from optexp.profiling.tables import tables
from optexp.profiling.view import View
from optexp.records.difference import Difference
from optexp.records.profile import ArmProfile, Bottleneck
from optexp.reporting import operators_page, profile_tables, terminal
from optexp.trace import Trace

ROWS = 15  # of a table on a terminal
NOT_VERIFIED = "not verified: nothing was run, and whether the programs compute the same is not known"


@dataclass(frozen=True)
class Reading:
    """A trace and what it shows."""

    path: Path
    trace: Trace
    breakdown: Breakdown
    bottlenecks: list[Bottleneck]
    bounds: list[Bound]
    beside: Trace | None = None

    def profile(self) -> ArmProfile:
        """The tables of a record, with all rows."""
        return tables(self.breakdown.metrics(), self.trace, self.trace)

    def to_dict(self) -> dict[str, Any]:
        """Everything, for a file."""
        return {
            "trace": str(self.path),
            "steps": self.breakdown.steps,
            "device": self.trace.device,
            "verified": False,
            "profile": asdict(self.profile()),
            "bottlenecks": [asdict(bottleneck) for bottleneck in self.bottlenecks],
            "bounds": [asdict(bound) for bound in self.bounds],
        }


def reading(path: Path, step: str | None = None, beside: Trace | None = None) -> Reading:
    """Read and diagnose a trace.

    Args:
        step: See `any_trace.read`.
        beside: The trace of the same work launched kernel by kernel, by which kernels in a graph are classed.

    Raises:
        ConfigError: See `any_trace.read`.
    """
    trace = any_trace.read(path, step)
    ceilings = calibration.of_device(trace.device) if trace.device else None
    found = breakdown(trace, ceilings, beside)
    bottlenecks, _ = answered(diagnose(View(trace, found, trace, beside)), installed(), trace, ceilings)
    return Reading(path, trace, found, bottlenecks, bounds(found), beside)


def compared(before: Reading, after: Reading) -> tuple[Difference | None, list[str]]:
    """The difference between two readings, and the same in words."""
    arms = [View(each.trace, each.breakdown, each.trace, each.beside) for each in (before, after)]
    found = difference(arms[0], arms[1])
    return found, explain(arms[0], arms[1], found)


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0, or 2 where a file cannot be read."""
    parser = parser_of("read", __doc__)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="one trace, or two to be compared")
    parser.add_argument("--step", metavar="REGEX", help="names of the ranges that are steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write tables of operators, modules and calls")
    asked = parser.parse_args(arguments)
    if len(asked.traces) > 2:
        parser.error("one trace, or two")
    try:
        first = reading(asked.traces[0], asked.step)
        found = [first, *(reading(path, asked.step, first.trace) for path in asked.traces[1:])]
    except ConfigError as mistake:
        print(f"optexp.read: {mistake}", file=sys.stderr)
        return 2
    changed, why = compared(first, found[1]) if len(found) == 2 else (None, [])
    console = Console(width=None if sys.stdout.isatty() else terminal.PIPE_WIDTH)
    for each in found:
        device = f" on {each.trace.device}" if each.trace.device else ""
        title = f"{each.path.name}: {each.breakdown.steps} steps of {each.breakdown.wall_us / 1e3:.3g} ms{device}"
        console.print(profile_tables.reading(title, each.profile(), each.bottlenecks, each.bounds, ROWS))
    console.print(profile_tables.sentences("why", why, NOT_VERIFIED))
    if asked.json:
        written = {"traces": [each.to_dict() for each in found], "why": why}
        written["difference"] = asdict(changed) if changed else None
        asked.json.write_text(json.dumps(written, indent=1) + "\n")
    if asked.markdown:
        asked.markdown.write_text("\n".join(operators_page.markdown(e.path.name, e.profile()) for e in found))
    return 0
