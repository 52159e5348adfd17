"""Two versions side by side: commits, Python environments, or any two commands.

    python -m optexp.ab --base origin/main workload=module workload.path=net.py
    python -m optexp.ab --base-env ../torch-2.11 workload=module workload.path=net.py
    python -m optexp.ab "python old.py" "python new.py" --step "^iteration"

A version is a commit (--base, --head) or the working tree. Other words are keys, as `python -m optexp` takes them.
Exit status: 0 FASTER, SLOWER, SAME or INCONCLUSIVE; 1 an error; 3 not equivalent, or not to be trusted.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from optexp.commands.ending import exit_status
from optexp.commands.parsing import parser_of
from optexp.comparison import gpu_lock
from optexp.duets import commands, workloads
from optexp.duets.outcome import Outcome, write
from optexp.duets.program import Program, Steps
from optexp.duets.repository import Repository
from optexp.duets.versions import Version, home, labels
from optexp.errors import ConfigError
from optexp.reporting.terminal import Progress
from optexp.result import Verdict
from optexp.support.nvml_count import count_by_nvml
from optexp.workers.home import Homes

KEY = re.compile(r"[\w.+~@/]+=")
USE = "name another version, as in --base origin/main, or two commands in quotes (--help)"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options.

    Raises:
        SystemExit: an option does not exist.
    """
    parser = parser_of("ab", __doc__)
    add = parser.add_argument
    add(
        "words", nargs="*", metavar="KEY=VALUE", help="keys, as python -m optexp takes them; or two commands, then keys"
    )
    add("--base", metavar="REF", help="commit that is compared against; else the working tree")
    add("--head", metavar="REF", help="commit under test; else the working tree")
    add("--base-env", default="", metavar="VENV", help="virtual environment, or its Python, that runs the base")
    add("--no-verify", action="store_true", help="compare times alone, whatever the versions compute")
    add("--step", type=re.compile, metavar="REGEX", help="lines of the commands' output that end a step")
    add("--skip", type=int, default=3, metavar="N", help="steps of a command that do not count, at its beginning")
    add("--json", type=Path, metavar="FILE", help="write everything that was found")
    return parser.parse_intermixed_args(list(arguments))


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    options = parse(arguments)
    count_by_nvml()
    return exit_status("ab", lambda: compare(options))


def compare(options: argparse.Namespace) -> int:
    """Compare, and show the outcome; returns the exit status.

    Raises:
        ConfigError, Failure: The request cannot be met, or a command fails.
    """
    outcome = of_versions(options) if options.base or options.head or options.base_env else of_commands(options)
    print(outcome.line)
    if outcome.result.error and outcome.result.error.traceback:
        print(outcome.result.error.traceback, file=sys.stderr)
    if options.json:
        write(options.json, outcome.to_dict())
    return outcome.result.verdict.exit_status


def of_versions(options: argparse.Namespace) -> Outcome:
    """Compare a workload of two versions.

    Raises:
        ConfigError: The request cannot be met.
    """
    experiment = workloads.experiment_of(options.words)
    repository = Repository.here() if options.base or options.head else None
    base = Version(repository.commit(options.base) if repository and options.base else None, options.base_env)
    head = Version(repository.commit(options.head) if repository and options.head else None)
    unverified = "--no-verify" if options.no_verify else "another environment" if options.base_env else ""
    with ExitStack() as held:
        output = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="optexp-ab-")))
        device = held.enter_context(gpu_lock.locked(experiment.device, gpu_lock.announced))
        homes = Homes(*(held.enter_context(home(version, repository)) for version in (base, head)))
        progress = held.enter_context(Progress())
        named = labels(base, head, homes)
        result = workloads.duet(experiment, device, homes, named, output, progress, not unverified)
    if result.verdict in (Verdict.NOT_EQUIVALENT, Verdict.UNVERIFIED):
        result.headline += "; --no-verify compares times alone"
    return Outcome(named.base, named.head, "step", unverified, result)


def of_commands(options: argparse.Namespace) -> Outcome:
    """Compare two commands.

    Raises:
        ConfigError, Failure: The request cannot be met, or a command fails.
    """
    words = options.words[:2]
    if len(words) < 2 or any(KEY.match(word) for word in words):
        raise ConfigError(USE)
    experiment = workloads.experiment_of(options.words[2:])
    steps = Steps(options.step, options.skip) if options.step else None
    base, head = (Program.of(name, word, steps, experiment.timeout_s) for name, word in zip("AB", words, strict=True))
    with gpu_lock.locked(experiment.device, gpu_lock.announced) as device, Progress() as progress:
        allowed = experiment.environment.allow_foreign

        def tell(text: str) -> None:
            progress.phase("commands", text)

        result = commands.duet(base, head, experiment.measurement.with_several(), device, allowed, tell)
    return Outcome("A", "B", "step" if steps else "run", "commands", result)
