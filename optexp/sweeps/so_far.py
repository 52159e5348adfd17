"""What an interrupted sweep has found: the ranking of the jobs that are done."""

from __future__ import annotations

from pathlib import Path

from optexp.reporting import summary, terminal
from optexp.result import Result
from optexp.sweeps import selection, sweep


def show(folder: Path, count: int) -> None:
    """Print the ranking, and write it beside the jobs. No winner is measured again.

    Args:
        count: Of the sweep's jobs; 0: unknown.
    """
    done = [result for job in sweep.jobs(folder) if (result := _record(job / "result.json")) is not None]
    console = terminal.output()
    if done:
        results = summary.ranked(selection.corrected(done))
        sweep.record(results, folder)
        console.print("", terminal.sweep_table(results), "", sep="\n")
    of = f" of {count}" if count else ""
    goes_on = "the same command with sweep.resume=true does the rest"
    console.print(f"INTERRUPTED: {len(done)}{of} jobs are done, in {folder}; {goes_on}", soft_wrap=True)


def _record(file: Path) -> Result | None:
    """Of a job that reached its end."""
    try:
        result = Result.read(file)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if result.error and result.error.type == "Interrupted" else result
