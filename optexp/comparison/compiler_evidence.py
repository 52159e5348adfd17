"""Compiler evidence of an arm: its structured log is kept, read, and written as text files beside the record."""

from __future__ import annotations

import shutil
from dataclasses import replace

from optexp.comparison.session import Session
from optexp.profiling.compiler_log import read
from optexp.profiling.kernel_resources import kernel_resources, ran
from optexp.records import filenames
from optexp.records.compiler import CompilerEvidence
from optexp.reporting.compiler_words import problems
from optexp.result import Result
from optexp.trace import Trace
from optexp.workers.arm import Arm
from optexp.workers.client import Client
from optexp.workers.spec import Spec

LOG = "structured_log"
MOST_KERNELS = 60  # rows of the table in the record
MOST_SASS = 8  # foreign kernels that a comparison disassembles; mode=profile disassembles all


def logged(session: Session, spec: Spec, name: str) -> Spec:
    """The same with torch.compile's log kept, for an arm that is examined and not timed.

    Objects in this process share one compiler, so that their logs cannot be told apart: they keep none.
    """
    folder = session.output / filenames.COMPILER / name
    shutil.rmtree(folder, ignore_errors=True)  # an earlier attempt's
    kept = session.isolated and bool(session.experiment.profile.details)
    return replace(spec, compiler_log=str((folder / LOG).resolve())) if kept else spec


def compiler_evidence(session: Session, arm: Client[Arm], name: str, trace: Trace) -> CompilerEvidence | None:
    """Graphs and kernels that were compiled in an arm, also as text files; None without any."""
    folder = session.output / filenames.COMPILER / name
    log = read(folder / LOG)
    log.write(folder)
    shown = f"{filenames.COMPILER}/{name}"
    found = log.evidence(shown, f"{shown}/{LOG}" if (folder / LOG).is_dir() else "")
    if trace.kernels and session.experiment.profile.details:
        most = None if session.experiment.mode == "profile" else MOST_SASS
        codes = arm.call(Arm.code, folder=str(session.output / "code" / name), ran=ran(trace), most_sass=most)
        limits = arm.call(Arm.device_limits)
        found = replace(found, kernels=kernel_resources(trace, codes, limits, f"{filenames.CODE}/{name}", MOST_KERNELS))
    return found or None


def name_breaks(result: Result) -> None:
    """Graph breaks and recompilations of each arm as notes, unless a strategy's evidence names them."""
    said = " ".join(engagement.text for engagement in result.evidence)
    for name, found in result.profile.arms().items():
        if found.compiler is not None:
            result.notes += [f"{name}: {text}" for where, text in problems(found.compiler) if where not in said]
