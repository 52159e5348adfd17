"""A measurement as data, as a record holds it. Needs no torch to be read.

Everything that a ratio of the arms' times follows from is a field of `Measurement`. A verdict that shows no speedup has
none, so that no figure can leave with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

Never = str  # "never": a gain that does not pay for its set-up


class Severity(StrEnum):
    """Consequence of a watchdog that saw something."""

    REMARK = "remark"  # the verdict stands, with a remark
    UNDECIDES = "undecides"  # INCONCLUSIVE
    REFUSES = "refuses"  # INVALID


class About(StrEnum):
    """Subject of a watchdog. One about the machine holds nothing that a ratio follows from."""

    ARMS = "arms"
    MACHINE = "machine"


@dataclass(frozen=True)
class Watch:
    """The finding of a watchdog; `ok` if there is none.

    looked: it had something to look at
    """

    name: str
    ok: bool
    text: str
    severity: Severity = Severity.REMARK
    about: About = About.ARMS
    looked: bool = True

    @property
    def refuses(self) -> bool:
        return not self.ok and self.severity is Severity.REFUSES

    @property
    def undecides(self) -> bool:
        return not self.ok and self.severity is Severity.UNDECIDES

    @property
    def shown_alone(self) -> bool:
        """Whether it may be shown without a measurement."""
        return self.refuses or self.about is About.MACHINE


@dataclass(frozen=True)
class Control:
    """One control as ratios of times: the baseline beside itself, or beside itself with a known delay.

    ok:     its interval does not exclude the known truth
    found:  the known difference was seen; of equal arms: the interval is narrow enough to have seen it
    since:  the day of its measurement, where that is remembered
    """

    kind: str
    ok: bool
    found: bool
    text: str
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    since: str | None = None


@dataclass(frozen=True)
class Ratio:
    """A ratio with its interval; `text` says the same."""

    estimate: float
    low: float
    high: float | None
    text: str


@dataclass(frozen=True)
class Cache:
    """State of the GPU's L2 cache in the headline's steps ("warm" or "cold"); the ratio with emptied caches."""

    headline: str = "warm"
    cold: Ratio | None = None


@dataclass(frozen=True)
class ProcessRatio:
    """Median log-ratio of one process, over so many pairs."""

    log_ratio: float
    pairs: int


@dataclass(frozen=True)
class ProcessSpread:
    """Standard deviation of the log-ratio between processes, where only one was measured.

    freedom: degrees of freedom that it is known with
    source:  the comparisons that it was seen in, in words
    """

    deviation: float
    freedom: int
    source: str = ""


@dataclass(frozen=True)
class Cost:
    """Set-up time and the steps after which a gain has paid for it.

    setup_s, baseline_setup_s: medians over the measured processes, with warm compile caches
    first_setup_s: of the first process of each arm;  cold_setup_s: of the candidate's, where caches were empty then
    paid_back:     "cold" or "warm": the set-up that has to be paid back
    break_even_steps, .._at_low: by the estimate, by the interval's lower end; "never" where there is no gain
    horizon_steps, hours_saved, .._at_low: over so many steps
    """

    setup_s: float | None = None
    baseline_setup_s: float | None = None
    paid_back: str = "warm"
    break_even_steps: int | Never | None = None
    break_even_steps_at_low: int | Never | None = None
    cold_setup_s: float | None = None
    horizon_steps: int | None = None
    hours_saved: float | None = None
    hours_saved_at_low: float | None = None
    first_setup_s: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Textbook:
    """The usual way to measure: its ratios, its ratios of equal arms, and how many of those it calls different."""

    ratios: list[float]
    equal_arms: list[float]
    wrong: int
    text: str = ""


@dataclass
class Measurement:
    """Timed blocks and all that was computed from them.

    min_effect:  δ, the smallest relative difference that counts
    p_value:     of a difference beyond δ;  p_holm: corrected for a sweep's comparisons
    comparisons: number of those; None without a correction, and in records before this field
    pairs:       by process, µs a step of both arms;  dropped: the same of pairs that do not count
    spread:      expected between processes, where there is one; None in records before this field
    setups_s:    by arm, seconds of set-up of each process
    differences: settings that differ between the arms, by name
    unbound:     the ratio on all cores, in words, where the host limits it
    """

    preset: str = ""
    min_effect: float = 0.0
    watchdogs: list[Watch] = field(default_factory=list)
    controls: dict[str, Control] = field(default_factory=dict)
    p_value: float | None = None
    p_holm: float | None = None
    comparisons: int | None = None
    l2: Cache = field(default_factory=Cache)
    processes: list[ProcessRatio] = field(default_factory=list)
    pairs: list[list[tuple[float, float]]] = field(default_factory=list)
    dropped: list[list[tuple[float, float]]] = field(default_factory=list)
    spread: ProcessSpread | None = None
    cost: Cost = field(default_factory=Cost)
    setups_s: dict[str, list[float]] = field(default_factory=dict)
    differences: dict[str, str] = field(default_factory=dict)
    unbound: str = ""
    textbook: Textbook | None = None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Measurement:
        """From a record, also from one of schema 1."""
        known = {**record, "watchdogs": [watch(row) for row in record.get("watchdogs") or ()]}
        known = {name: value for name, value in known.items() if value is not None}
        return msgspec.convert(known, cls)


def watch(row: Mapping[str, Any]) -> dict[str, Any]:
    """A watchdog's record; in schema 1 it had two flags for its severity, and no subject."""
    if "severity" in row:
        return dict(row)
    severity = "refuses" if row.get("fatal") else "undecides" if row.get("undecides") else "remark"
    machine = row["name"] in ("throttling", "power cap", "foreign processes", "cores", "slow start", "waiting arm")
    return {"name": row["name"], "ok": row["ok"], "text": row["text"], "severity": severity} | (
        {"about": "machine"} if machine else {}
    )
