"""The rows of a sweep's ranking, from which every table and picture of the sweep is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optexp.reporting import front, summary
from optexp.reporting.titles import titles
from optexp.result import Result, Speedup, Verdict
from optexp.support.units import at_least, low_to_high, mebibytes, microseconds, ratio


@dataclass(frozen=True)
class RankedRow:
    """One job of a sweep. A figure that its verdict does not show is None, and an empty string as text.

    title:    workload with the settings in which the jobs differ
    strategy: the stack
    step_us, peak_mib: of the candidate, or of the program that was profiled alone
    note:     the reason where there is no speedup, else remarks
    link:     to the job's page, relative to the sweep's folder; empty where there is none
    """

    verdict: Verdict
    title: str
    strategy: str
    speedup: Speedup | None
    step_us: float | None
    peak_mib: float | None
    note: str
    link: str = ""

    @classmethod
    def of(cls, result: Result, title: str, link: str = "") -> RankedRow:
        """The row of a result whose title was made beside those of the other jobs."""
        verdict, arm = result.verdict, summary.shown(result)
        timed = verdict.measured or verdict is Verdict.PROFILED
        return cls(
            verdict=verdict,
            title=title,
            strategy=result.label,
            speedup=result.speedup if verdict.measured else None,
            step_us=arm.step_us if timed else None,
            peak_mib=arm.peak_mib,
            note=summary.reason(result),
            link=link,
        )

    @property
    def label(self) -> str:
        """Workload and stack."""
        return f"{self.title} · {self.strategy}"

    @property
    def tone(self) -> str:
        """The colour of the verdict on a page."""
        return front.tone(self.verdict)

    # --- figures as text ---------------------------------------------------------------------------------------

    @property
    def said(self) -> Speedup | None:
        """The speedup as the headline says it: how many times slower, where the stack is."""
        return self.speedup.inverse if self.speedup and self.slower else self.speedup

    @property
    def slower(self) -> str:
        """The word behind a figure of `said`."""
        return " slower" if self.verdict is Verdict.SLOWER else ""

    @property
    def at_least(self) -> str:
        """The lower end; empty where the interval decides nothing."""
        return (
            f"{at_least(self.said.low)}×{self.slower}" if self.said and self.verdict is not Verdict.INCONCLUSIVE else ""
        )

    @property
    def estimate(self) -> str:
        return f"{ratio(self.said.estimate)}{self.slower}" if self.said else ""

    @property
    def interval(self) -> str:
        """The estimate with both ends; the ends alone where they decide nothing."""
        if self.said is None:
            return ""
        ends = low_to_high(self.said.low, self.said.high)
        return f"undecided, {ends}" if self.verdict is Verdict.INCONCLUSIVE else f"{self.estimate} ({ends})"

    @property
    def time(self) -> str:
        return microseconds(self.step_us) if self.step_us else ""

    @property
    def memory(self) -> str:
        return mebibytes(self.peak_mib) if self.peak_mib else ""


def rows(results: Sequence[Result]) -> list[RankedRow]:
    """The rows of all results of a sweep, in the order given."""
    return [RankedRow.of(result, title) for result, title in zip(results, titles(results), strict=True)]
