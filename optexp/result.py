"""What a comparison ends in: a verdict and everything that led to it. `result.json` is this, written down."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from math import inf, isfinite
from pathlib import Path
from typing import Any

from optexp.equivalence.finding import Verification


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
    VERIFIED = "VERIFIED"  # verify=only: nothing was timed

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
    """Absolute figures of one arm: times in µs a step, memory in MiB, throughput in samples/s.

    step_us:     one step of many, host's wall time
    device_us:   the same between events on the device
    busy_us:     the same with a kernel or a copy running, from the profile
    alone_us:    one step that is waited for, median; p5_us, p95_us and p99_us of the same
    load_us:     a step of steady work, which an arm does for energy alone: at its power limit a card is slower
    energy_j:    that step's, by the card's meter; power_w and utilisation (a share) of the same work
    cold_us:     device time of a step that finds nothing in the cache
    """

    step_us: float | None = None
    device_us: float | None = None
    busy_us: float | None = None
    alone_us: float | None = None
    p5_us: float | None = None
    p95_us: float | None = None
    p99_us: float | None = None
    cold_us: float | None = None
    load_us: float | None = None
    energy_j: float | None = None
    power_w: float | None = None
    utilisation: float | None = None
    throughput: float | None = None
    peak_mib: float | None = None
    setup_s: float | None = None
    kernels: float | None = None
    gpu_busy: float | None = None


TIMES = (
    "step_us", "device_us", "busy_us", "alone_us", "p5_us", "p95_us", "p99_us", "cold_us",
    "throughput", "load_us", "energy_j", "power_w", "utilisation",
)  # fmt: skip
TELLING = ("cost", "pairs", "dropped", "processes", "p_value", "p_holm")  # of the measurement: they hold the ratio
MACHINE = ("throttling", "power cap", "foreign processes", "cores")  # watchdogs that say nothing of an arm's speed


@dataclass(frozen=True)
class Problem:
    """An exception that ended a comparison; `worker` is the process that raised it."""

    type: str
    message: str
    traceback: str = ""
    worker: str = ""


@dataclass
class Result:
    """One comparison. Field names are `result.json`'s top-level keys, which dashboards depend on.

    by_itself:  {verdict, headline}, as they were before a sweep corrected them, and where the winner was measured
                again the folder (`again`) whose record replaced this one
    """

    verdict: Verdict
    headline: str
    workload: str
    strategy: list[str]
    device: str
    seed: int
    speedup: Speedup | None = None
    baseline: ArmSummary = field(default_factory=ArmSummary)
    candidate: ArmSummary = field(default_factory=ArmSummary)
    equivalence: Verification | None = None
    measurement: dict[str, Any] = field(default_factory=dict)
    evidence: list[dict[str, Any]] = field(default_factory=list)
    profile: dict[str, Any] = field(default_factory=dict)
    explanation: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    error: Problem | None = None
    by_itself: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The stack as people write it; `baseline` when it is empty."""
        return "+".join(self.strategy) or "baseline"

    def __repr__(self) -> str:
        return f"<{self.workload} · {self.label}: {self.headline}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from optexp.reporting.report import fragment

        return fragment(self)

    def withhold(self) -> None:
        """No ratio may leave with a verdict that shows none: neither the speedup, nor two times to divide."""
        if self.verdict is not Verdict.PROFILED:
            self.speedup, self.explanation = None, []
            for name in TELLING:
                self.measurement.pop(name, None)
            for part, name in (("l2", "cold"), ("placement", "unbound")):
                self.measurement.get(part, {}).pop(name, None)
            if watches := self.measurement.get("watchdogs"):  # some of the others say what both arms take
                self.measurement["watchdogs"] = [
                    w for w in watches if w["name"] in MACHINE or (w["fatal"] and not w["ok"])
                ]
            for arm, summary in (("baseline", self.baseline), ("candidate", self.candidate)):
                profile = self.profile.get(arm, {})
                for name in ("step_us", "median_kernel_us"):
                    profile.get("metrics", {}).pop(name, None)
                for entry in (*profile.get("top_kernels", ()), *profile.get("top_ops", ())):
                    entry.pop("us", None)  # what each takes of its step is left
                for name in TIMES:
                    setattr(summary, name, None)

    def write(self, path: Path) -> None:
        """JSON has no word for infinities: they become null. The digest is over all the rest."""
        record = json.loads(json.dumps(finite(asdict(self)), default=str, allow_nan=False))
        path.write_text(json.dumps({**record, "digest": digest(record)}, indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Result:
        return cls.of(json.loads(path.read_text()))

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Result:
        """From what `write` wrote."""
        data = {key: value for key, value in record.items() if key != "digest"}
        data["verdict"] = Verdict(data["verdict"])
        if speedup := data["speedup"]:  # an interval without an end was written as null
            data["speedup"] = Speedup(**speedup | {"high": inf if speedup["high"] is None else speedup["high"]})
        data["baseline"] = ArmSummary(**data["baseline"])
        data["candidate"] = ArmSummary(**data["candidate"])
        data["equivalence"] = Verification.of(data["equivalence"]) if data.get("equivalence") else None
        data["error"] = Problem(**data["error"]) if data.get("error") else None
        return cls(**data)


def against_itself(config: Mapping[str, Any]) -> bool:
    """Whether both stacks are the same, with the same options: then no difference in time is theirs."""
    options = {"strategy": dict[str, Any](), "baseline": dict[str, Any]()}
    for key, value in config.items():
        stack, _, option = key.partition(".")
        if stack in options:
            options[stack][option] = value
    return options["strategy"] == options["baseline"] != {}


def digest(record: Mapping[str, Any]) -> str:
    """Of a record as it stands in `result.json`, its own digest aside."""
    rest = {key: value for key, value in record.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def finite(value: Any) -> Any:
    """The same without the numbers that JSON has no word for."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
