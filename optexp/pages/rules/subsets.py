"""The search of mode=auto beside all 16 subsets of four strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optexp.reporting import markdown
from optexp.result import Verdict

KINDS = SUBSET, AUTO, DIRECT = "subset", "auto", "direct"
SUBSETS = 16  # of four strategies, with the empty one
HEADS = ("program", "best subset", "speedup", "auto's winner", "speedup", "auto/best", "auto's trials",
         "seconds: subsets", "auto", "subsets tried", "device")  # fmt: skip
NARROW = 0.9  # of the largest low end of an interval, which an estimate that counts has at least
SAID = 120  # characters of a headline


@dataclass(frozen=True)
class Job:
    """One finished comparison or search.

    stack:   label of the candidate; of a search, what it was restricted to
    against: label of the baseline; empty: the plain program
    winner:    of a search; empty where nothing was kept
    speedup:   None where none was measured
    trials:    comparisons of a search
    predicted: the largest speedup that the stack's bound allows; None where it has no bound
    """

    subject: str
    kind: str
    stack: str
    against: str
    verdict: str
    speedup: float | None
    low: float | None
    high: float | None
    seconds: float
    headline: str
    device: str
    winner: str = ""
    trials: int = 0
    predicted: float | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.subject, self.kind, self.stack, self.against


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row for each program. rows: fields of `Job`"""
    jobs = [Job(**row) for row in rows]
    names = dict.fromkeys(job.subject for job in jobs)
    return markdown.table(HEADS, [cells([job for job in jobs if job.subject == name]) for name in names])


def best(jobs: Sequence[Job]) -> str:
    """The FASTER subset with the largest estimate; the empty one where none is FASTER. An estimate counts whose low end
    is among the highest: others are too wide to say so much."""
    faster = [job for job in jobs if job.kind == SUBSET and job.verdict == Verdict.FASTER]
    certain = NARROW * max((job.low or 0.0 for job in faster), default=0.0)
    estimates = {job.stack: job.speedup or 0.0 for job in faster if (job.low or 0.0) >= certain}
    return max(estimates, key=lambda stack: estimates[stack], default="")


def same(one: str, other: str) -> bool:
    """Whether two labels name one stack."""
    return sorted(one.split("+")) == sorted(other.split("+"))


def cells(jobs: Sequence[Job]) -> list[str]:
    """Of one program."""
    strongest, subsets = best(jobs), [job for job in jobs if job.kind == SUBSET]
    auto = next((job for job in jobs if job.kind == AUTO), None)
    of_best = next((job.speedup for job in subsets if job.stack == strongest), 1.0)
    first = [jobs[0].subject, f"`{strongest or 'none'}`", f"{of_best:.3g}×"]
    last = [f"{len(subsets) + 1} of {SUBSETS}", ", ".join(sorted({job.device for job in jobs}))]
    spent = f"{sum(job.seconds for job in subsets):.0f}"
    if auto is None:
        return [*first, "–", "–", "–", "–", spent, "–", *last]
    gained = f"{auto.speedup:.3g}× ({auto.verdict})" if auto.speedup else auto.verdict
    compared = "–" if auto.verdict == Verdict.ERROR else ratio(jobs, auto, strongest)
    count = f"{auto.trials} of {SUBSETS}"
    return [*first, f"`{auto.winner or 'none'}`", gained, compared, count, spent, f"{auto.seconds:.0f}", *last]


def ratio(jobs: Sequence[Job], auto: Job, strongest: str) -> str:
    """How fast auto's winner is beside the best subset, with its interval where both were compared directly."""
    subsets = [job for job in jobs if job.kind == SUBSET]
    if len(subsets) < SUBSETS - 1 or not any(job.speedup for job in subsets):
        return "–"
    if same(auto.winner, strongest):
        return "1 (the same stack)"
    direct = next((job for job in jobs if (job.kind, job.stack, job.against) == (DIRECT, auto.winner, strongest)), None)
    if direct is None:
        return "–"
    if direct.speedup is None or direct.low is None or direct.high is None:
        return f"{direct.verdict}: {direct.headline.partition(': ')[2][:SAID]}"
    return f"{direct.speedup:.3f} ({direct.low:.3f} to {direct.high:.3f})"
