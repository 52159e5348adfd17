"""The commit that changed the speed of a workload.

    python -m optexp.bisect --good v1.2 --bad HEAD workload=module workload.path=net.py

The ends are compared first; then each commit in the middle of what is left, beside the good one. Times alone decide.
Exit status: 0 a commit is named; 1 an error; 3 none can be named.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from math import ceil, log2
from pathlib import Path
from typing import Any

from optexp.commands.ending import exit_status
from optexp.commands.parsing import parser_of
from optexp.comparison import gpu_lock
from optexp.config import Experiment
from optexp.duets import workloads
from optexp.duets.bisection import Bisection, Effort, Tried
from optexp.duets.outcome import Outcome, write
from optexp.duets.repository import Commit, Repository
from optexp.duets.versions import Version, home
from optexp.reporting.terminal import Progress
from optexp.result import Result
from optexp.support.nvml_count import count_by_nvml
from optexp.workers.home import Home, Homes

UNNAMED = 3  # exit status
UNVERIFIED = "times alone"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options.

    Raises:
        SystemExit: an option does not exist, or an end is not named.
    """
    parser = parser_of("bisect", __doc__)
    add = parser.add_argument
    add("words", nargs="*", metavar="KEY=VALUE", help="keys, as python -m optexp takes them")
    add("--good", required=True, metavar="REF", help="commit with the speed that is compared with")
    add("--bad", required=True, metavar="REF", help="later commit with another speed, slower or faster")
    add("--json", type=Path, metavar="FILE", help="write everything that was found")
    return parser.parse_intermixed_args(list(arguments))


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    options = parse(arguments)
    count_by_nvml()
    return exit_status("bisect", lambda: search(options))


def search(options: argparse.Namespace) -> int:
    """Search, and name the commit; returns the exit status.

    Raises:
        ConfigError: The request cannot be met.
    """
    repository = Repository.here()
    good, bad = repository.commit(options.good), repository.commit(options.bad)
    found = bisected(repository, good, bad, workloads.experiment_of(options.words))
    print(conclusion(found))
    if options.json:
        write(options.json, to_dict(good, found))
    return 0 if len(found.suspects) == 1 else UNNAMED


def bisected(repository: Repository, good: Commit, bad: Commit, experiment: Experiment) -> Bisection:
    """Search, and print a line for each commit that is tried.

    Raises:
        ConfigError: There are no commits between both.
    """
    commits = repository.between(good, bad)
    print(f"{len(commits)} commits after {good.short}: the ends, then at most {ceil(log2(len(commits)))} between them")
    with ExitStack() as held:
        device = held.enter_context(gpu_lock.locked(experiment.device, gpu_lock.announced))
        base = held.enter_context(home(Version(good), repository))
        progress = held.enter_context(Progress())

        def measure(commit: Commit, effort: Effort) -> Result:
            asked = workloads.with_effort(experiment, effort.times, effort.half_width)
            return compared(repository, base, (good, commit), asked, device, progress)

        found = Bisection(commits, measure, lambda tried: print(row(tried), flush=True))
        found.run()
    return found


def compared(
    repository: Repository,
    base: Home,
    commits: tuple[Commit, Commit],
    experiment: Experiment,
    device: str,
    progress: Progress,
) -> Result:
    """Times of a commit beside the good one's, whose home is `base`."""
    good, commit = (Version(each) for each in commits)
    with tempfile.TemporaryDirectory(prefix="optexp-bisect-") as output, home(commit, repository) as head:
        labels = workloads.Labels(good.label, commit.label)
        return workloads.duet(experiment, device, Homes(base, head), labels, Path(output), progress, verified=False)


def row(tried: Tried) -> str:
    """One commit of the table."""
    side = tried.side or "?"
    again = f" ({tried.rounds} comparisons)" if tried.rounds > 1 else ""
    return f"  {side:<5} {tried.commit.short}  {tried.commit.subject[:40]:<40}  {tried.result.headline}{again}"


def conclusion(found: Bisection) -> str:
    """The search's result in a sentence."""
    count, end = len(found.tried) - 1, found.tried[0]
    if not found.suspects:
        return f"no commit to name: the ends are not known to differ: {end.result.headline}"
    if len(found.suspects) == 1:
        commit = found.suspects[0]
        return f"{commit.short} changed the speed: {commit.subject} ({count} commits compared between the ends)"
    names = ", ".join(commit.short for commit in found.suspects)
    return f"one of {names} changed the speed: those between could not be decided"


def to_dict(good: Commit, found: Bisection) -> dict[str, Any]:
    """Everything, for a file."""
    tried = [
        {
            "commit": each.commit.hash,
            "subject": each.commit.subject,
            "side": each.side,
            "comparisons": each.rounds,
            **Outcome(good.short, each.commit.short, "step", UNVERIFIED, each.result).to_dict(),
        }
        for each in found.tried
    ]
    return {"good": good.hash, "suspects": [commit.hash for commit in found.suspects], "tried": tried}
