"""`python -m optexp.watch list.yaml`: comparisons that run again and again, their history, and the steps in it.

LIST  a YAML file: comparisons, and if wanted experiment, plot and on_alert

Each round runs every comparison, redraws the history, and reports steps that no round before has reported. A step
needs about five records after it. Exit status of --once: 1 a comparison ended in an error, 3 one is not equivalent or
not to be trusted, 5 a series stepped to a slower level or a comparison raised an alarm, 0 none of these.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optexp.commands.ending import exit_status
from optexp.commands.parsing import parser_of
from optexp.comparison.regression import send
from optexp.config import Tracking
from optexp.config.watch_list import WatchList
from optexp.errors import ConfigError
from optexp.measurement import change_points
from optexp.measurement.change_points import Step
from optexp.records.verdict import REGRESSION_STATUS
from optexp.reporting import history, recorded, tracking
from optexp.reporting.history import Series
from optexp.reporting.recorded import Recorded
from optexp.support.units import duration, seconds

TAG = "optexp.step"  # MLflow tag of the first run after a reported step; its value is the report
REPORTED = (1, 3, REGRESSION_STATUS)  # statuses of a comparison, the worst first
MOVED = 3  # records by which later ones may move a step that was reported


@dataclass(frozen=True)
class Found:
    """A step that was not reported before. `record`: the first one after it."""

    series: Series
    record: Recorded
    step: Step

    @property
    def text(self) -> str:
        before, after = (duration(level / 1e6) for level in (self.step.before, self.step.after))
        since = f"since {self.record.started:%Y-%m-%d %H:%M}, commit {history.commit(self.record.result) or 'unknown'}"
        return f"{self.series.title}: {before} → {after} a step ({self.step.change:+.1%}) {since}"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options.

    Raises:
        SystemExit: an option does not exist.
    """
    parser = parser_of("watch", __doc__)
    parser.add_argument("list", type=Path, metavar="LIST")
    often = parser.add_mutually_exclusive_group()
    often.add_argument("--every", default="1h", metavar="TIME", help="from one round's start to the next: 30m, 1h, 24h")
    often.add_argument("--once", action="store_true", help="one round, for cron or a CI job")
    return parser.parse_args(list(arguments))


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    options = parse(arguments)
    return exit_status("watch", lambda: watch(options))


def watch(options: argparse.Namespace) -> int:
    """Round after round; returns the exit status of the only one.

    Raises:
        ConfigError: the list or a time cannot be read.
        TrackingError: the store cannot be read or written.
    """
    watched = WatchList.read(options.list)
    try:
        every_s = seconds(options.every, "--every")
    except ValueError as mistake:
        raise ConfigError(str(mistake)) from None
    change_points.require()
    while True:
        began = time.monotonic()
        status = one_round(watched)
        if options.once:
            return status
        time.sleep(max(0.0, every_s - (time.monotonic() - began)))


def one_round(watched: WatchList) -> int:
    """Run every comparison once, draw the history and report new steps; returns the exit status.

    Raises:
        TrackingError: the store cannot be read or written.
    """
    statuses = {text: compare(text, watched.experiment) for text in watched.comparisons}
    every = history.series(recorded.records(Tracking(), watched.experiment, limit=history.NEWEST))
    history.draw(every, Path(watched.plot))
    found = new_steps(every)
    for new in found:
        print(new.text)
        mark(new)
        if watched.on_alert and new.step.change > 0:
            send(watched.on_alert, alert(new))
    for text, status in statuses.items():
        if status in REPORTED:
            print(f"optexp.watch: status {status}: {text}", file=sys.stderr)
    slower = {REGRESSION_STATUS} if any(new.step.change > 0 for new in found) else set[int]()
    return next((status for status in REPORTED if status in {*statuses.values(), *slower}), 0)


def compare(text: str, experiment: str) -> int:
    """One comparison in a process of its own; returns its exit status."""
    words = [*shlex.split(text), f"tracking.experiment={experiment}"]
    child = subprocess.Popen([sys.executable, "-m", "optexp", *words])
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)  # it ends its own processes, and closes its record
        child.wait()
        raise


def new_steps(every: Sequence[Series]) -> list[Found]:
    """Steps of all series that no run near them is marked with."""
    found = []
    for one in every:
        timed = one.timed
        reported = [n for n, record in enumerate(timed) if record.tags.get(TAG)]
        for n, record in enumerate(timed):
            step = one.steps.get(record.run_id)
            if step and not any(abs(n - other) <= MOVED for other in reported):
                found.append(Found(one, record, step))
    return found


def mark(new: Found) -> None:
    """Note in MLflow that a step was reported."""
    tracking.reopen(Tracking(), new.record.run_id).log_batch(tags={TAG: new.text})


def alert(new: Found) -> dict[str, str]:
    """Facts for the user's command."""
    result = new.record.result
    return {
        "SUMMARY": new.text,
        "WORKLOAD": result.workload,
        "STRATEGY": result.label,
        "RUN": new.record.run_id,
        "CHANGE": f"{1 + new.step.change:.4f}",
    }
