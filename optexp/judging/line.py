"""The outcome of one job as a line of JSON, whose schema is published as `line.schema.json`. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from optexp.judging.job import Job, Settings
from optexp.records.roofline import PhysicalBound
from optexp.records.verdict import Verdict
from optexp.result import Result

SCHEMA = 1
SCHEMA_FILE = Path(__file__).with_name("line.schema.json")


@dataclass(frozen=True)
class Interval:
    """Ratio of step times, reference over candidate, with its interval; `high` is None where it has no upper end."""

    estimate: float
    low: float
    high: float | None
    confidence: float
    processes: int


@dataclass(frozen=True)
class Bound:
    """The physical lower bound of a step.

    us:     least µs of any program, by the bytes and operations of the reference; None where unknown
    ratio:  the candidate's step over `us`; None where nothing was timed
    reason: why `us` is unknown
    """

    us: float | None = None
    ratio: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Line:
    """One candidate on one problem.

    key:          hash of sources and settings: a later run skips lines that it finds
    suite:        "files" or "definitions"
    problem, candidate, entrant, case, axes: see `optexp.judging.job.Job`
    strategy:     stack that was judged; "replace" for a candidate's file
    verdict:      see docs/verdicts.md;  reason: the verdict in a sentence
    blame:        process that failed: "candidate", "bare" (the reference implementation), ...; empty where none failed
    error:        class of its error, as "OutOfMemoryError"
    speedup:      None where the verdict shows none
    reference_us, candidate_us: median step
    peak_mib:     peak memory of the candidate's step
    inputs, seed: key of the inputs' seeds (`replay=` draws them again), and the parameters' seed; secret during the job
    seconds:      of the whole job;  phases: seconds by phase
    record:       folder of the complete record; None where no record is kept
    versions:     of optexp, torch, triton, cuda and the device's name
    """

    key: str
    suite: str
    problem: str
    candidate: str
    verdict: Verdict
    reason: str
    entrant: str = ""
    case: str = ""
    axes: dict[str, int] = field(default_factory=dict)
    strategy: str = ""
    device: str = ""
    dtype: str = ""
    preset: str = ""
    contract: str = ""
    blame: str = ""
    error: str = ""
    speedup: Interval | None = None
    reference_us: float | None = None
    candidate_us: float | None = None
    peak_mib: float | None = None
    bound: Bound = Bound()
    notes: list[str] = field(default_factory=list)
    inputs: str | None = None
    seed: int | None = None
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    record: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def title(self) -> str:
        """Problem, sizes and candidate."""
        sizes = " ".join(f"{name}={size}" for name, size in self.axes.items())
        return " · ".join(filter(None, (self.problem, sizes, self.candidate)))


def encoded(line: Line) -> bytes:
    return msgspec.json.encode(line)


def decoded(text: str | bytes) -> Line:
    """A line from its JSON.

    Raises:
        msgspec.DecodeError: it does not follow the schema.
    """
    return msgspec.json.decode(text, type=Line)


def schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a line."""
    found = msgspec.json.schema(Line)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A line of optexp.judge", **found}


def written_schema() -> str:
    """The text of `line.schema.json`."""
    return msgspec.json.format(msgspec.json.encode(schema()), indent=2).decode() + "\n"


def failed(job: Job, settings: Settings, reason: str, seconds: float, blame: str = "") -> Line:
    """The line of a job that ended without a result."""
    return Line(**_named(job, settings), verdict=Verdict.ERROR, reason=reason, blame=blame, seconds=round(seconds, 2))


def of(job: Job, settings: Settings, result: Result, seconds: float, record: str | None) -> Line:
    """The line of a result.

    Args:
        seconds: Time of the whole job.
        record: Folder of the record; None where no record is kept.
    """
    speedup, found, environment = result.speedup, result.equivalence, result.environment
    names = ("optexp", "torch", "triton", "cuda", "gpu", "cpu")
    return Line(
        **_named(job, settings),
        verdict=result.verdict,
        reason=result.headline.removeprefix(result.verdict).lstrip(":, "),
        device=result.device,
        dtype=str(result.config.get("dtype", "")),
        contract=found.contract if found else "",
        blame=result.error.worker if result.error else "",
        error=result.error.type if result.error else "",
        speedup=Interval(
            speedup.estimate,
            speedup.low,
            speedup.high if isfinite(speedup.high) else None,
            speedup.confidence,
            speedup.processes,
        )
        if speedup
        else None,
        reference_us=result.baseline.step_us,
        candidate_us=result.candidate.step_us,
        peak_mib=result.candidate.peak_mib,
        bound=_bound(result),
        notes=list(result.notes),
        inputs=result.draws.key if result.draws else None,
        seed=result.seed if result.draws else None,
        seconds=round(seconds, 2),
        phases={name: round(value, 3) for name, value in result.seconds.items()},
        record=record,
        versions={name: str(environment[name]) for name in names if environment.get(name)},
    )


def _named(job: Job, settings: Settings) -> dict[str, Any]:
    names = ("key", "suite", "problem", "candidate", "entrant", "case", "axes")
    return {name: getattr(job, name) for name in names} | {
        "preset": settings.preset,
        "strategy": settings.strategy or "replace",
    }


def _bound(result: Result) -> Bound:
    arm = result.profile.candidate
    found: PhysicalBound | None = arm.roofline.bound if arm and arm.roofline else None
    if found is None:
        return Bound()
    timed = result.candidate.device_us or result.candidate.step_us
    ratio = timed / found.us if timed and found.us else None
    return Bound(found.us, ratio, found.reason)
