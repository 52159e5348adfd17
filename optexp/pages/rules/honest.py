"""Verdicts about honest programs: rates by half and device and by strategy, each alarm, and one pair on many seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from optexp.reporting import markdown

ALARMS = ("NOT_EQUIVALENT", "INVALID", "ERROR")
APART = ("UNSUPPORTED", "NOT_ENGAGED")
CUT, SKIPPED = "CUT", "SKIPPED"  # ended at the limit; a problem that does not run at all at this size
SEEDS = "seeds"  # in place of the half of a pair that was verified on many seeds
HEADS = ("decided", "false alarms", "UNVERIFIED", "NOT_ENGAGED", "UNSUPPORTED", "not run", "median s")


@dataclass(frozen=True)
class Found:
    """The outcome of one pair.

    ok:      the verification passed, also where the verdict is about something else; None where there was none
    used:    share of the tightest limit that was used
    seconds: of the whole comparison, with compilation
    seeds, alarms:  of a pair that was verified on many seeds: how many, and how many of them were refused
    """

    id: str
    half: str
    device: str
    verdict: str
    headline: str
    ok: bool | None = None
    used: float | None = None
    worst: str = ""
    seconds: float = 0.0
    seed: int = 0
    torch: str = ""
    commit: str = ""
    seeds: int = 0
    alarms: int = 0

    @property
    def alarm(self) -> bool:
        return self.verdict in ALARMS or (self.verdict in APART and self.ok is False)

    @property
    def decided(self) -> bool:
        """Whether the verdict is about results."""
        return self.alarm or self.verdict in ("VERIFIED", "UNVERIFIED")

    def brief(self) -> Found:
        """The same as a record holds it: headline and worst tensor where a table shows them, whole seconds from ten on,
        and no version of torch, which the page tells."""
        told = self.alarm or self.verdict in ("UNVERIFIED", CUT) or self.half == SEEDS
        used = round(self.used, 2) if self.used is not None else None
        seconds = self.seconds if self.seconds < 10 else round(self.seconds)
        brief = replace(self, used=used, seconds=seconds, torch="", commit=self.commit[:7])
        return brief if told else replace(brief, headline="", worst="")


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """rows: fields of `Found`"""
    return "\n\n".join(parts([Found(**row) for row in rows]))


def parts(found: Sequence[Found]) -> Iterator[str]:
    """Rates, then every alarm and what was not decided, each with its headline."""
    if ran := [one for one in found if one.half != SEEDS]:
        yield rates("half, device", ran, lambda one: f"{one.half}, {one.device}")
        yield rates("strategy", ran, lambda one: one.id.rpartition(" × ")[2])
        yield rates("programs", ran, source)
    for title, of in (
        ("False alarms:", [one for one in ran if one.alarm]),
        ("Not verified:", [one for one in ran if one.verdict == "UNVERIFIED"]),
        ("No verdict within the limit:", [one for one in ran if one.verdict == CUT]),
    ):
        if of:
            rows = [[one.id, one.half, one.device, one.headline] for one in sorted(of, key=str)]
            yield f"{title}\n\n{markdown.table(['pair', 'half', 'device', 'what it says'], rows)}"
    if many := [one for one in found if one.half == SEEDS]:
        rows = [[one.id, one.device, str(one.seeds), str(one.alarms), share(one)] for one in many]
        yield markdown.table(["one pair on many seeds", "device", "seeds", "refused", "most of a limit"], rows)


def rates(title: str, found: Sequence[Found], group: Callable[[Found], str]) -> str:
    """A row for each group, and for all."""
    names = [*sorted({group(one) for one in found}), "all"]
    return markdown.table([title, *HEADS], [row(n, [one for one in found if n in ("all", group(one))]) for n in names])


def row(name: str, of: Sequence[Found]) -> list[str]:
    decided = sum(one.decided for one in of)
    verdicts = Counter(one.verdict for one in of if not one.alarm)
    times = sorted(one.seconds for one in of if one.verdict != SKIPPED)
    shown = [rate(sum(one.alarm for one in of), decided), rate(verdicts["UNVERIFIED"], decided)]
    counts = [verdicts["NOT_ENGAGED"], verdicts["UNSUPPORTED"], verdicts[CUT] + verdicts[SKIPPED]]
    return [name, str(decided), *shown, *map(str, counts), f"{times[len(times) // 2]:.0f}" if times else "–"]


def source(one: Found) -> str:
    """The collection that a pair's program is from."""
    return "KernelBench" if one.id.startswith("KernelBench") else "zoo" if "." in one.id.split()[0] else "workloads"


def rate(count: int, total: int) -> str:
    return f"{count} ({count / total:.1%})" if total else "–"


def share(one: Found) -> str:
    return "–" if one.used is None else f"{one.used:.0%} ({one.worst})"
