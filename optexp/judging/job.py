"""A job for a worker (one candidate and its reference), and the settings that all jobs share. Needs no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from optexp.user_code.definitions import CaseSpec

KEY_LENGTH = 32  # hexadecimal digits
DEVICES = ("auto", "cpu", "cuda")
READY = b"ready"  # beginning of a worker's first line


@dataclass(frozen=True)
class Settings:
    """Settings of a judgement.

    preset:      of the measurement: "quick", "default" or "rigorous"
    verify_only: whether nothing is timed
    device:      "auto", "cpu" or "cuda" (all visible cards)
    strategy:    a stack to judge in place of candidates, such as "fusion"
    track:       whether each job becomes a run in MLflow
    timeout_s:   longest wait for an answer of an arm
    limit_s:     longest job; then the job is ended with all its processes
    records:     folder that keeps the record of each job; None keeps no record
    overrides:   other keys of the configuration, as in "measurement.pairs=10"
    at_once:     jobs on each card; all but one are paused while that one is timed
    shared:      address of the `SharedCard` of a worker's card; None where it has the card to itself
    """

    preset: str = "default"
    verify_only: bool = False
    device: str = "auto"
    strategy: str = ""
    track: bool = False
    timeout_s: float = 300.0
    limit_s: float = 1800.0
    records: str | None = None
    overrides: list[str] = field(default_factory=list)
    at_once: int = 1
    shared: str | None = None

    @property
    def deciding(self) -> list[Any]:
        """Settings that a verdict depends on."""
        return [self.preset, self.verify_only, self.device, self.strategy, self.overrides]


@dataclass(frozen=True)
class Defined:
    """The parts of a job on a kernel definition.

    definition, solution: paths of JSON files; no solution where a strategy is judged
    case:                 sizes and sources of inputs, with absolute paths of files
    by_name:              names of random inputs determine their values, as in SOL-ExecBench
    """

    definition: str
    case: CaseSpec
    solution: str | None
    by_name: bool


@dataclass(frozen=True)
class Job:
    """One candidate on one problem, or on one workload of it.

    key:       hash of all that a verdict depends on (`key_of`)
    problem, candidate: names within the suite and among the candidates; candidate "" is the problem itself
    entrant:   name of a set of candidates that scores together: an author, or the number of a sample
    case:      name of the workload;  axes: its sizes
    workload:  keys of `workload=module`
    strategy:  options by strategy; empty where `Settings.strategy` or a solution is judged
    files:     hashes of the files behind the key, by path
    """

    key: str
    suite: str
    problem: str
    candidate: str
    entrant: str = ""
    case: str = ""
    axes: dict[str, int] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, dict[str, Any]] = field(default_factory=dict)
    defined: Defined | None = None
    files: dict[str, str] = field(default_factory=dict)

    @property
    def edited(self) -> list[str]:
        """Files that changed since the key was made."""
        return [path for path, known in self.files.items() if hash_of(Path(path)) != known]

    @property
    def title(self) -> str:
        """The job in a line of text."""
        sizes = " ".join(f"{name}={size}" for name, size in self.axes.items())
        return " · ".join(filter(None, (self.problem, sizes, self.candidate)))


@dataclass(frozen=True)
class Request:
    """A job for a worker. The worker's answer begins with the secret."""

    secret: str
    job: Job


@dataclass(frozen=True)
class Suite:
    """All jobs of a judgement.

    remarks: sentences about files that were left out
    """

    jobs: list[Job]
    remarks: list[str] = field(default_factory=list)


def hash_of(path: Path) -> str:
    """The hash of a file's content; empty where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def key_of(sources: Sequence[Path | bytes], settings: Settings) -> str:
    """The hash of all that a verdict depends on: sources and settings."""
    digest = hashlib.sha256(msgspec.json.encode(settings.deciding))
    for source in sources:
        content = source if isinstance(source, bytes) else source.read_bytes()
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()[:KEY_LENGTH]
