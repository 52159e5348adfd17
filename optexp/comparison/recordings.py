"""Recordings of one arm: cycles of steady steps, and a flame graph of the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from optexp.comparison.session import Session
from optexp.measurement.recorder import BRIEF_S, LONGEST_S
from optexp.profiling import flame
from optexp.records import filenames
from optexp.records.ranges import Cycle, Ranges, TraceFile
from optexp.trace import Trace
from optexp.workers.arm import Arm
from optexp.workers.client import Client

STACKED_STEPS = 2


def cycles(
    session: Session, arm: Client[Arm], name: str, brief: bool = False
) -> tuple[Trace, dict[str, float], list[Cycle]]:
    """Record steady steps `profile.repeat` times; the trace with the median step, counters, and all recordings.

    The shown trace is `traces/<name>.json.gz`, further ones have the number of their cycle.

    brief: of slow steps, two are enough
    """
    wanted, folder = session.experiment.profile, session.output / filenames.TRACES
    steps = session.settings.profile_steps if wanted.active is None else wanted.active
    found: list[tuple[float, int, Trace]] = []
    for cycle in range(wanted.repeat):
        counters = arm.call(
            Arm.profile,
            path=str(_path(folder, name, cycle)),
            steps=steps,
            wait=wanted.wait,
            warmup=wanted.warmup,
            exactly=wanted.active is not None,
            longest_s=BRIEF_S if brief else LONGEST_S,
        )
        trace = Trace.read(_path(folder, name, cycle))
        start, end = trace.window
        found.append(((end - start) / len(trace.steps), cycle, trace))
    _, chosen, shown = sorted(found, key=lambda item: item[0])[len(found) // 2]
    main = folder / f"{name}.json.gz"
    _path(folder, name, chosen).rename(main)
    if wanted.repeat == 1:
        return shown, counters, []
    paths = {cycle: main if cycle == chosen else _path(folder, name, cycle) for _, cycle, _ in found}
    told = [
        Cycle(f"{filenames.TRACES}/{paths[cycle].name}", len(trace.steps), cycle == chosen, step_us)
        for step_us, cycle, trace in found
    ]
    return shown, counters, told


def _path(folder: Path, name: str, cycle: int) -> Path:
    return folder / f"{name}_cycle{cycle + 1}.json.gz"


def stacked(session: Session, arm: Client[Arm], name: str, ranges: Ranges) -> Ranges:
    """Ranges with the files of a flame graph, where stacks are wanted."""
    wanted = session.experiment.profile.stacks
    if not (session.experiment.mode == "profile" if wanted is None else wanted):
        return ranges
    path = session.output / filenames.TRACES / f"{name}_stacks.json.gz"
    arm.call(Arm.profile_stacks, path=str(path), steps=STACKED_STEPS)
    trace = Trace.read(path)
    files = [*ranges.files, TraceFile(f"{filenames.TRACES}/{path.name}", "with Python frames")]
    if (root := flame.frames(trace)) is not None:
        folder = session.output / filenames.FLAME_GRAPHS
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.svg").write_text(flame.svg(root, f"{session.result.workload}, {name}"))
        (folder / f"{name}.txt").write_text(flame.collapsed(root))
        files += [
            TraceFile(f"{folder.name}/{name}.svg", "flame graph of the host", trace=False),
            TraceFile(f"{folder.name}/{name}.txt", "its stacks, for flamegraph.pl and speedscope", trace=False),
        ]
    return replace(ranges, files=files)
