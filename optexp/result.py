"""What a comparison ends in: a verdict and everything that led to it. `result.json` is this, written down."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import Any


class Verdict(StrEnum):
    """First that applies; `exit_status` is what a shell sees."""

    ERROR = "ERROR"
    UNSUPPORTED = "UNSUPPORTED"
    NOT_ENGAGED = "NOT_ENGAGED"
    NOT_EQUIVALENT = "NOT_EQUIVALENT"
    UNVERIFIED = "UNVERIFIED"
    INVALID = "INVALID"
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    SAME = "SAME"
    INCONCLUSIVE = "INCONCLUSIVE"
    PROFILED = "PROFILED"  # mode=profile: there is nothing to compare

    @property
    def exit_status(self) -> int:
        return _EXIT_STATUS.get(self, 0)

    @property
    def measured(self) -> bool:
        """Whether a speedup may be shown with it."""
        return self in (Verdict.FASTER, Verdict.SLOWER, Verdict.SAME, Verdict.INCONCLUSIVE)


_EXIT_STATUS = {
    Verdict.ERROR: 1,
    Verdict.NOT_EQUIVALENT: 3,
    Verdict.UNVERIFIED: 3,
    Verdict.INVALID: 3,
    Verdict.UNSUPPORTED: 4,
    Verdict.NOT_ENGAGED: 4,
}


def worst_status(verdicts: Iterable[Verdict]) -> int:
    """The exit status of a sweep: the worst job's, where a job that could not apply here fails nothing."""
    statuses = {0 if verdict is Verdict.UNSUPPORTED else verdict.exit_status for verdict in verdicts}
    return next((status for status in (1, 3, 5, 4) if status in statuses), 0)


@dataclass
class Speedup:
    """Ratio of step times, baseline over candidate, with its confidence interval over processes."""

    estimate: float
    low: float
    high: float
    confidence: float
    processes: int


@dataclass
class ArmSummary:
    """Absolute figures of one arm: times in µs a step, memory in MiB, throughput in samples/s."""

    step_us: float | None = None
    device_us: float | None = None
    p95_us: float | None = None
    throughput: float | None = None
    peak_mib: float | None = None
    setup_s: float | None = None
    kernels: float | None = None
    gpu_busy: float | None = None


@dataclass
class Result:
    """One comparison. Field names are `result.json`'s top-level keys, which dashboards depend on."""

    verdict: Verdict
    headline: str
    workload: str
    strategy: list[str]
    device: str
    seed: int
    speedup: Speedup | None = None
    baseline: ArmSummary = field(default_factory=ArmSummary)
    candidate: ArmSummary = field(default_factory=ArmSummary)
    equivalence: dict[str, Any] = field(default_factory=dict)
    measurement: dict[str, Any] = field(default_factory=dict)
    evidence: list[dict[str, Any]] = field(default_factory=list)
    profile: dict[str, Any] = field(default_factory=dict)
    explanation: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    error: dict[str, Any] | None = None

    @property
    def label(self) -> str:
        """The stack as people write it; `baseline` when it is empty."""
        return "+".join(self.strategy) or "baseline"

    def __repr__(self) -> str:
        return f"<{self.workload} · {self.label}: {self.headline}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from optexp.report import fragment

        return fragment(self)

    def withhold(self) -> None:
        """No ratio may leave with a verdict that shows none: neither the speedup, nor two times to divide."""
        if self.verdict is not Verdict.PROFILED:
            self.speedup = None
            self.measurement.pop("cost", None)
            for summary in (self.baseline, self.candidate):
                summary.step_us = summary.device_us = summary.p95_us = summary.throughput = None

    def write(self, path: Path) -> None:
        """JSON has no word for infinities: they become null."""
        path.write_text(json.dumps(_finite(asdict(self)), indent=2, default=str, allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> Result:
        data = json.loads(path.read_text())
        data["verdict"] = Verdict(data["verdict"])
        data["speedup"] = Speedup(**data["speedup"]) if data["speedup"] else None
        data["baseline"] = ArmSummary(**data["baseline"])
        data["candidate"] = ArmSummary(**data["candidate"])
        return cls(**data)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
