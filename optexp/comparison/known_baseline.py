"""The facts that a comparison needs of its baseline. A search has them of a stack that an earlier trial verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from optexp.records.profile import Bottleneck

if TYPE_CHECKING:
    from optexp.comparison.evaluation import Evaluation
    from optexp.comparison.profiles import Profile


@dataclass(frozen=True)
class KnownBaseline:
    """setup_s: seconds to the first result"""

    profile: Profile
    setup_s: float
    bottlenecks: Sequence[Bottleneck]

    @classmethod
    def of(cls, candidate: Evaluation, baseline: Evaluation | None) -> KnownBaseline:
        """Of a baseline that is a stack itself, or of the plain program, beside which the candidate was examined."""
        if baseline is not None:
            return cls(baseline.stacked, baseline.setups["stacked"], baseline.bottlenecks)
        return cls(candidate.bare, candidate.setups["bare"], candidate.bare_bottlenecks)

    def elsewhere(self) -> KnownBaseline:
        """For a record in another folder, which has none of this one's files."""
        ranges = replace(self.profile.ranges, files=[])
        return replace(self, profile=replace(self.profile, ranges=ranges, compiler=None))
