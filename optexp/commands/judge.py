"""`python -m optexp.judge SUITE CANDIDATES`: many implementations judged against their references.

SUITE       a folder of KernelBench problems, a problem file, or a folder of kernel definitions (flashinfer-bench,
            SOL-ExecBench); FILE.py:Name names another class than Model
CANDIDATES  a folder of files with ModelNew that are named as the problems, one such file, or solutions in JSON;
            left out with --strategy

Each candidate's line of JSON goes to stdout as soon as it is judged; progress and the table go to stderr.
Exit status: 0 every candidate is right, 1 an error, 3 not equivalent or not to be trusted, 4 not applicable.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from rich.console import Console

from optexp.commands.ending import exit_status
from optexp.commands.parsing import parser_of
from optexp.comparison import visible_cards
from optexp.errors import ConfigError
from optexp.judging import crew, definition_files, problem_files, table
from optexp.judging.fast_p import fast_p
from optexp.judging.job import DEVICES, Settings, Suite
from optexp.judging.line import Line, encoded, written_schema
from optexp.judging.problem_files import Target
from optexp.judging.store import Store
from optexp.records.verdict import Verdict
from optexp.schema import suggest

WIDTH = 160  # columns of the table, where stderr is no terminal


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options.

    Raises:
        SystemExit: an option does not exist.
    """
    parser = parser_of("judge", __doc__)
    parser.add_argument("suite", metavar="SUITE", nargs="?")
    parser.add_argument("candidates", metavar="CANDIDATES", nargs="?")
    add = parser.add_argument
    add("--into", type=Path, metavar="FILE", help="append the lines to a file; candidates that it holds are skipped")
    add("--again", nargs="+", default=[], metavar="VERDICT", help="judge those of FILE again that ended so")
    add("--preset", default="default", choices=["quick", "default", "rigorous"], help="how long is measured")
    add("--verify-only", action="store_true", help="correctness alone: nothing is timed")
    add("--device", default="auto", choices=DEVICES, help="auto takes every visible card, with a worker for each")
    add("--strategy", default="", help="judge each problem against itself under a stack, as in fusion")
    add("--only", nargs="+", default=[], metavar="WORD", help="jobs whose title has one of these words")
    add("--at-once", type=int, metavar="N", help="jobs on each card, all but the timed one paused (up to 4; a CPU: 1)")
    add("--workloads", type=int, metavar="N", help="at most N workloads of each kernel definition")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="longest answer of a process")
    add("--limit", type=float, default=1800.0, metavar="SECONDS", help="longest job")
    add("--records", type=Path, metavar="FOLDER", help="keep the complete record and the report of each job")
    add("--summary", type=Path, metavar="FILE", help="write fast_p of every entrant as JSON")
    add("--track", action="store_true", help="a run in MLflow for each job")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other keys, as python -m optexp takes them")
    add("--schema", action="store_true", help="print the JSON schema of a line")
    return parser.parse_args(list(arguments))


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    options = parse(arguments)
    if options.schema:
        sys.stdout.write(written_schema())
        return 0
    return exit_status("judge", lambda: judge(options))


def judge(options: argparse.Namespace) -> int:
    """Judge what is missing, then show all.

    Raises:
        ConfigError: the request cannot be met.
    """
    cards = visible_cards.cards(options.device)
    settings, again = settings_of(options, cards), verdicts(options.again)
    suite = chosen(options, settings)
    console = Console(stderr=True)
    console = console if console.is_terminal else Console(stderr=True, width=WIDTH)
    for remark in suite.remarks:
        console.print(remark, markup=False, highlight=False)
    store = Store.open(options.into)
    missing = [job for job in suite.jobs if not store.has(job.key, again)]
    if skipped := len(suite.jobs) - len(missing):
        console.print(f"{skipped} of {len(suite.jobs)} are in {options.into}: skipped", highlight=False)
    done = 0

    def add(line: Line) -> None:
        nonlocal done
        store.add(line)
        with store.lock:
            done += 1
            with suppress(BrokenPipeError):  # who reads may have seen enough; the file of lines goes on
                sys.stdout.buffer.write(encoded(line) + b"\n")
                sys.stdout.buffer.flush()
            said = f"{done}/{len(missing)}  {line.seconds:5.1f} s  {line.title}: {line.verdict}"
            console.print(said, markup=False, highlight=False)

    def put_off(line: Line, reason: str) -> None:
        with store.lock:
            said = f"later  {line.seconds:5.1f} s  {line.title}, with the card to itself: {reason}"
            console.print(said, markup=False, highlight=False)

    try:
        crew.judge_all(missing, settings, cards, add, put_off)
    finally:
        lines = [store.lines[job.key] for job in suite.jobs if job.key in store.lines]
        if lines:
            table.show(lines, console)
        if options.summary:
            options.summary.write_bytes(msgspec.json.encode(fast_p(lines)) + b"\n")
    return table.status(lines)


def settings_of(options: argparse.Namespace, cards: Sequence[str | None]) -> Settings:
    """Raises ConfigError where several jobs share a CPU."""
    at_once = visible_cards.at_once(cards) if options.at_once is None else options.at_once
    if at_once < 1 or (at_once > 1 and not options.verify_only and cards == [None]):
        raise ConfigError(f"--at-once {at_once}: name 1 or more; on a CPU, where each job is timed on all cores, 1")
    return Settings(
        preset=options.preset,
        verify_only=options.verify_only,
        device=options.device,
        strategy=options.strategy,
        track=options.track,
        timeout_s=options.timeout,
        limit_s=options.limit,
        records=str(options.records.resolve()) if options.records else None,
        overrides=options.set,
        at_once=at_once,
    )


def verdicts(names: Sequence[str]) -> set[Verdict]:
    """Raises ConfigError where there is no such verdict."""
    known = {verdict.value: verdict for verdict in Verdict}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--again {unknown[0]}: there is no such verdict (allowed: {', '.join(known)})")
    return {known[name] for name in names}


def chosen(options: argparse.Namespace, settings: Settings) -> Suite:
    """The jobs that the command line asks for.

    Raises:
        ConfigError: there are none.
    """
    if options.suite is None or (options.candidates is None) is not bool(settings.strategy):
        raise ConfigError("name a suite and its candidates, or a suite and --strategy (--help shows both)")
    place = Target.of(options.suite)
    candidates = Target.of(options.candidates) if options.candidates else None
    for target in (place, candidates):
        if target is not None and not target.path.exists():
            raise ConfigError(f"{target.path}: there is no such file or folder")
    if options.workloads is not None and options.workloads < 1:
        raise ConfigError(f"--workloads {options.workloads}: name 1 or more")
    if settings.strategy:
        require_strategies(settings.strategy)
    if place.path.is_dir() and definition_files.is_suite(place.path):
        path = candidates.path if candidates else None
        found = definition_files.suite(place.path, path, settings, options.workloads)
    else:
        found = problem_files.suite(place, candidates, settings)
    jobs = [job for job in found.jobs if not options.only or any(word in job.title for word in options.only)]
    if not jobs:
        raise ConfigError(f"--only {' '.join(options.only)}: no job has such a title")
    return Suite(jobs, found.remarks)


def require_strategies(stack: str) -> None:
    """Raises ConfigError where a stack names a strategy that does not exist."""
    from optexp.config import search_path  # Hydra takes a while to import

    known = search_path.options("strategy")
    for name in re.sub(r"\[[^]]*\]", "", stack).split("+"):
        if name.strip() not in known:
            raise ConfigError(f"--strategy {stack}: {name} is not a choice{suggest(name, known)}")
