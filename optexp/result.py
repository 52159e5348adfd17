"""The result of a comparison: a verdict and everything that led to it. `result.json` holds it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from optexp.records.measurement import Measurement, Watch, watch
from optexp.records.profile import ProfileRecord
from optexp.records.regression import Regression
from optexp.records.trials import Ablation, Search, Trial
from optexp.records.verdict import REGRESSION_STATUS
from optexp.records.verdict import Verdict as Verdict
from optexp.records.verdict import worst_status as worst_status
from optexp.records.verification import Verification
from optexp.support.draws import Draws

SCHEMA = 2  # of records: those of schema 1 are read, too


@dataclass
class Speedup:
    """Ratio of step times, baseline over candidate, with its confidence interval over processes."""

    estimate: float
    low: float
    high: float
    confidence: float
    processes: int

    @property
    def inverse(self) -> Speedup:
        """Candidate over baseline: how many times slower."""
        return replace(self, estimate=1 / self.estimate, low=1 / self.high, high=1 / self.low)


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

    def untimed(self) -> ArmSummary:
        """Memory, set-up and counts: figures that no ratio of times follows from."""
        return ArmSummary(peak_mib=self.peak_mib, setup_s=self.setup_s, kernels=self.kernels, gpu_busy=self.gpu_busy)


@dataclass(frozen=True)
class Problem:
    """An exception that ended a comparison; `worker` is the process that raised it."""

    type: str
    message: str
    traceback: str = ""
    worker: str = ""


@dataclass(frozen=True)
class Engagement:
    """The proof that a strategy engaged, or the reason why it did not."""

    strategy: str
    engaged: bool
    text: str


@dataclass(frozen=True)
class Placement:
    """Cores that both arms are bound to, and the same in words."""

    cpus: list[int]
    text: str


@dataclass(frozen=True)
class ByItself:
    """A job of a sweep before its correction.

    verdict, headline: then;  headline is empty where it showed a speedup that is no longer shown
    again:             folder of the record that replaced this one, where the winner was measured again
    """

    verdict: Verdict
    headline: str = ""
    again: str = ""


@dataclass
class Result:
    """One comparison. Field names are `result.json`'s top-level keys, which dashboards depend on.

    measurement: None where the verdict shows no speedup
    objections:  watchdogs that are shown without a measurement: those that refuse it or are about the machine
    series:      by process: start of each pair, readings of the card, and which pairs count
    notes:       for people: ignored options, remarks of the workload
    draws:       key of the inputs' seeds
    seconds:     of each phase
    by_itself:   where a sweep changed the verdict or measured again
    first_look:  speedup that a search's first look showed, where that ended the comparison
    trials:      comparisons of a mode that makes several
    ablation:    of mode=ablate
    search:      of mode=auto
    id:          of the comparison, by which a store knows it again
    compared:    keys of the workload that tell it from others: typed, or other than the class's default
    regression:  beside a recorded result; None where none was asked for
    schema:      of the record
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
    measurement: Measurement | None = None
    objections: list[Watch] = field(default_factory=list)
    series: list[dict[str, list[float | None]]] = field(default_factory=list)
    evidence: list[Engagement] = field(default_factory=list)
    profile: ProfileRecord = field(default_factory=ProfileRecord)
    explanation: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    placement: Placement | None = None
    draws: Draws | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    error: Problem | None = None
    by_itself: ByItself | None = None
    first_look: float | None = None
    trials: list[Trial] = field(default_factory=list)
    ablation: Ablation | None = None
    search: Search | None = None
    id: str = ""
    compared: list[str] = field(default_factory=list)
    regression: Regression | None = None
    schema: int = SCHEMA

    @property
    def label(self) -> str:
        """The stack as people write it; `baseline` when it is empty."""
        return "+".join(self.strategy) or "baseline"

    @property
    def device_model(self) -> str:
        """The card's or the processor's name, as far as it is known; else the device as torch names it."""
        return str(self.environment.get("gpu") or self.environment.get("cpu") or self.device)

    @property
    def exit_status(self) -> int:
        """The verdict's exit status, or 5 if a regression was found."""
        return REGRESSION_STATUS if self.regression and self.regression.alarm else self.verdict.exit_status

    def __repr__(self) -> str:
        return f"<{self.workload} · {self.label}: {self.headline}>"

    def _repr_html_(self) -> str:
        """The report, for a notebook."""
        from optexp.reporting.report import fragment

        return fragment(self)

    def withhold(self) -> None:
        """Remove every figure that a ratio of times follows from, for a verdict that shows no speedup."""
        watchdogs = self.measurement.watchdogs if self.measurement else []
        self.objections = [watch for watch in watchdogs if watch.shown_alone]
        self.speedup, self.explanation, self.measurement, self.regression = None, [], None, None
        self.baseline, self.candidate = self.baseline.untimed(), self.candidate.untimed()
        self.profile = self.profile.untimed()

    def write(self, path: Path) -> None:
        """Write `result.json`, with a digest of all other keys. Infinities become null, as JSON has none.

        Raises:
            OSError: the disk refuses it; what stood there before still does.
        """
        record = json.loads(json.dumps(finite(asdict(self)), default=str, allow_nan=False))
        draft = path.with_name(f".{path.name}")
        try:
            draft.write_text(json.dumps({**record, "digest": digest(record)}, indent=2) + "\n")
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    @classmethod
    def read(cls, path: Path) -> Result:
        """The record in a file.

        Raises:
            OSError: the file cannot be read.
            ValueError, KeyError, TypeError: it holds no record.
        """
        return cls.of(json.loads(path.read_text()))

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Result:
        """The record that `write` wrote, also of schema 1.

        Raises:
            ValueError, KeyError, TypeError: a key is missing, or has another type.
        """
        data = {key: value for key, value in record.items() if key != "digest"}
        if data.get("schema", 1) < SCHEMA:
            data = _from_schema_1(data)
        data["verdict"] = Verdict(data["verdict"])
        if speedup := data["speedup"]:  # an interval without an end was written as null
            data["speedup"] = Speedup(**speedup | {"high": inf if speedup["high"] is None else speedup["high"]})
        data["equivalence"] = Verification.of(data["equivalence"]) if data.get("equivalence") else None
        data["measurement"] = Measurement.of(data["measurement"]) if data.get("measurement") else None
        data["profile"] = ProfileRecord.of(data.get("profile") or {})
        types = get_type_hints(cls)
        for name in (
            "baseline",
            "candidate",
            "objections",
            "series",
            "evidence",
            "placement",
            "draws",
            "error",
            "by_itself",
            "trials",
            "ablation",
            "search",
            "regression",
        ):
            if name in data:
                data[name] = msgspec.convert(data[name], types[name])
        return cls(**data)


def _from_schema_1(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of schema 1, whose `measurement` held notes and conditions, too."""
    data, old = dict(record), dict(record.get("measurement") or {})
    for name in ("notes", "draws", "seconds", "series"):
        if (value := old.pop(name, None)) is not None:
            data[name] = value
    placed = old.pop("placement", None)
    if placed:
        data["placement"], old["unbound"] = {"cpus": placed["cpus"], "text": placed["text"]}, placed.get("unbound", "")
    watchdogs = [watch(row) for row in old.get("watchdogs") or ()]
    shown = bool(record.get("speedup")) or "textbook" in old
    data["objections"] = [] if shown else [row for row in watchdogs if not row["ok"] or row.get("about") == "machine"]
    data["measurement"] = old if shown else None
    data["by_itself"] = record.get("by_itself") or None
    data["equivalence"], data["error"] = record.get("equivalence") or None, record.get("error") or None
    return data


def against_itself(config: Mapping[str, Any]) -> bool:
    """Whether both stacks are the same, with the same options: then a difference in time is noise.

    Args:
        config: Flat, as in a record.
    """
    options = {"strategy": dict[str, Any](), "baseline": dict[str, Any]()}
    for key, value in config.items():
        stack, _, option = key.partition(".")
        if stack in options:
            options[stack][option] = value
    return options["strategy"] == options["baseline"] != {}


def digest(record: Mapping[str, Any]) -> str:
    """SHA-256 of a record's JSON without its own digest, as hexadecimal digits."""
    rest = {key: value for key, value in record.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def finite(value: Any) -> Any:
    """The same value with null for infinities and NaN, which JSON cannot hold."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
