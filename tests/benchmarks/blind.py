"""Is the injected cause named first? One program by itself, and the pair of it and the program without the cause.

python -m tests.benchmarks.blind [--programs fresh] [--record FOLDER]
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from optexp.pages.blocks import keep
from optexp.pages.machine import here
from optexp.pages.record import Record
from optexp.profiling.breakdown import breakdown
from optexp.profiling.calibration import calibrate
from optexp.profiling.diagnosis import diagnose
from optexp.profiling.explanation import difference
from optexp.profiling.view import View
from optexp.records.profile import Calibration
from optexp.trace import Trace, record, record_once
from optexp.workers.line_marks import lines_marked
from optexp.workers.module_marks import marked
from tests.benchmarks import blind_programs, blind_programs_fresh
from tests.benchmarks.blind_programs import Program, Step

STEPS = 6
SETS = {"first": blind_programs.PROGRAMS, "fresh": blind_programs_fresh.PROGRAMS}  # rules were tuned on the first


@dataclass(frozen=True)
class Answer:
    """Causes that were named of a program and of its pair."""

    program: Program
    bottlenecks: list[tuple[str, str]]
    causes: list[tuple[str, str]]
    explained: float

    @property
    def named(self) -> bool:
        """Whether the diagnosis names the cause first."""
        return bool(self.bottlenecks) and self.program.names(*self.bottlenecks[0])

    @property
    def found(self) -> bool:
        """Whether the explanation names the cause first."""
        return bool(self.causes) and self.program.explains(self.causes[0][0])


def answer(program: Program, device: torch.device, ceilings: Calibration | None, folder: Path) -> Answer:
    """Trace both versions of a program, and ask why."""
    views = []
    for injected in (False, True):
        torch.manual_seed(0)
        views.append(view(program.make(device, injected), device, ceilings, folder))
        gc.collect()
    bottlenecks = [(found.label, found.why) for found in diagnose(views[1])]
    changed = difference(*views)
    causes = [(cause.account, cause.words) for cause in changed.causes] if changed else []
    return Answer(program, bottlenecks, causes, (changed.explained or 0.0) if changed else 0.0)


def view(step: Step, device: torch.device, ceilings: Calibration | None, folder: Path) -> View:
    """A step as a comparison profiles it, places included."""
    for _ in range(3):
        step()
    path = folder / "trace.json.gz"
    record(step, STEPS, path, device)
    trace = Trace.read(path)
    with marked(nn.Module()), lines_marked():
        record_once(step, path, device)
    return View(trace, breakdown(trace, ceilings), Trace.read(path))


def as_record(answers: Sequence[Answer], machine: str) -> Record:
    """A row for each program."""
    rows = [
        {
            "program": each.program.name,
            "expected": [str(each.program.label), str(each.program.account)],
            "named": each.named,
            "found": each.found,
            "bottleneck": list(each.bottlenecks[0]) if each.bottlenecks else ["none", ""],
            "cause": each.causes[0][1] if each.causes else "none",
            "explained": each.explained,
        }
        for each in answers
    ]
    return Record("causes", machine, rows)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--programs", choices=SETS, default="first", help="the set of programs")
    parser.add_argument("--only", default="", help="programs whose name holds this")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="of the page's record")
    asked = parser.parse_args(arguments)
    device = torch.device(asked.device)
    on_gpu = device.type == "cuda"
    ceilings = calibrate(device) if on_gpu else None
    chosen = [p for p in SETS[asked.programs] if asked.only in p.name and (on_gpu or p.on_cpu)]
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        for each in chosen:
            answers.append(answer(each, device, ceilings, Path(folder)))
            last = answers[-1]
            print("ok  " if last.named else "MISS", "ok  " if last.found else "MISS", each.name, flush=True)
            print("     alone:", *last.bottlenecks[:2], sep="\n       ")
            print("     pair:", *(words for _, words in last.causes[:3]), sep="\n       ", flush=True)
    found = as_record(answers, here(asked.device))
    print(found.text())
    if asked.record:
        keep(found, "why" if asked.programs == "first" else "why.fresh", asked.record)
    return 0 if all(a.named and a.found for a in answers) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
