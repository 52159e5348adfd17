"""How far a comparison came."""

from optexp.result import Result, Verdict, against_itself


def measured(result: Result) -> bool:
    """Whether it was measured: a program against itself may find that the machine disturbs, and shows nothing then."""
    disturbed = against_itself(result.config) and "differs from itself by" in result.headline
    return result.verdict.measured or (result.verdict is Verdict.INVALID and disturbed)
