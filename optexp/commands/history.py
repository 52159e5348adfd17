"""`python -m optexp.history workload=mlp [strategy=fusion]`: recorded comparisons over time, from the MLflow store.

KEY=VALUE  settings that the comparisons have, as they were typed: workload, strategy, device, dtype, workload.dim ...

A table for each series of equal settings on one device: when, commit, verdict, interval of the speedup, time per step,
and the steps in it. Steps need the extra [watch].
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from optexp.commands.parsing import parser_of
from optexp.config import Tracking
from optexp.errors import ConfigError, TrackingError
from optexp.reporting import history, recorded, terminal
from optexp.reporting.history import Series


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options.

    Raises:
        SystemExit: an option does not exist.
    """
    parser = parser_of("history", __doc__)
    add = parser.add_argument
    add("settings", nargs="*", metavar="KEY=VALUE")
    add("--plot", type=Path, metavar="FILE", help="draw time per step and speedup with their intervals")
    add("--markdown", action="store_true", help="print the tables for a page, as for a job's summary")
    add("--experiment", default=Tracking().experiment, help="name in MLflow, or a run's id, or a tag (default: optexp)")
    add("--store", metavar="URI", help="MLflow store; by default as a comparison finds it")
    return parser.parse_args(list(arguments))


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0; 1 where nothing is recorded or the store cannot be read."""
    options = parse(arguments)
    try:
        found = read(options.settings, options.experiment, options.store)
    except (ConfigError, TrackingError) as mistake:
        print(f"optexp.history: {mistake}", file=sys.stderr)
        return 1
    if options.markdown:
        print(history.page(found))
    else:
        show(found)
    if options.plot and not history.draw(found, options.plot):
        print("optexp.history: nothing was timed: there is no picture", file=sys.stderr)
        return 1
    return 0


def read(settings: Sequence[str], experiment: str, store: str | None = None) -> list[Series]:
    """Series of records with these settings.

    Args:
        settings: KEY=VALUE.
        experiment: Name of an experiment, id of a run, or a tag.

    Raises:
        ConfigError: a setting is malformed, or no record has all of them.
        TrackingError: the store cannot be read.
    """
    if wrong := [text for text in settings if "=" not in text]:
        raise ConfigError(f"cannot read {wrong[0]!r}: write key=value, as in workload=mlp")
    wanted = dict(text.split("=", 1) for text in settings)
    records = recorded.records(Tracking(uri=store), experiment, wanted.get("workload"), history.NEWEST)
    found = [record for record in records if history.fits(record.result, wanted)]
    if not found:
        every = recorded.records(Tracking(uri=store), experiment, None, history.NEWEST)
        names = ", ".join(dict.fromkeys(record.result.workload for record in every))
        known = f"; its workloads: {names}" if names else ""
        raise ConfigError(f"{experiment} has no record with {' '.join(settings) or 'any settings'}{known}")
    return history.series(found)


def show(found: Sequence[Series]) -> None:
    """Print a table for each series."""
    console = terminal.output()
    for one in found:
        console.print(f"{one.title}, {len(one.records)} record{'s' * (len(one.records) > 1)}")
        console.print(history.table(one), "", sep="\n")
