"""The patch of a user's file, and the verdicts that let it be written."""

from __future__ import annotations

from dataclasses import dataclass

from optexp.records.verdict import Verdict


@dataclass(frozen=True)
class Patch:
    """A patch, or the reason why there is none.

    path: of the file that it changes, relative to where it is applied
    diff: unified, in the file's encoding; empty where there is a reason
    """

    path: str
    diff: bytes = b""
    reason: str = ""


def allowed(verdict: Verdict, asked: str) -> bool:
    """Whether a verdict lets a patch be written.

    Args:
        asked: The setting `patch`: "faster", or "verified" for any verified stack.
    """
    verified = verdict.measured or verdict is Verdict.VERIFIED
    return verdict is Verdict.FASTER or (verified and asked == "verified")
