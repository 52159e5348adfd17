"""The outcome of a comparison of two programs: one line of text, and a dictionary for a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optexp.result import Result, finite
from optexp.support.units import duration

KEPT = ("verdict", "headline", "speedup", "measurement", "objections", "explanation", "notes", "environment")


@dataclass(frozen=True)
class Outcome:
    """base, head: names of the two
    unit:         of times: "step", or "run" where commands were timed as a whole
    unverified:   why the results were not compared; empty if they were
    """

    base: str
    head: str
    unit: str
    unverified: str
    result: Result

    @property
    def line(self) -> str:
        """The verdict, in one line."""
        verified = f"results not compared ({self.unverified})" if self.unverified else "results compared"
        judged = f"; {verified}" if self.result.verdict.measured else ""
        return f"{self.base} → {self.head}: {self.result.headline}{judged}{self._times()}"

    def _times(self) -> str:
        """The times of both programs, in words; empty without a measurement."""
        before, after = self.result.baseline.step_us, self.result.candidate.step_us
        if not (self.result.verdict.measured and before and after):
            return ""
        return f"; a {self.unit} takes {duration(before / 1e6)} in {self.base}, {duration(after / 1e6)} in {self.head}"

    def to_dict(self) -> dict[str, Any]:
        """Keys of a comparison's record that keep their meaning here, and this outcome's own keys."""
        record = asdict(self.result)
        own = {"base": self.base, "head": self.head, "unit": self.unit, "unverified": self.unverified or None}
        times = {"base_us": self.result.baseline.step_us, "head_us": self.result.candidate.step_us}
        kept = {key: record[key] for key in (*KEPT, "equivalence", "error", "seconds")}
        plain: dict[str, Any] = json.loads(json.dumps(finite(own | times | kept), default=str))
        return plain


def write(path: Path, value: object) -> None:
    """Write a value as JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n")
