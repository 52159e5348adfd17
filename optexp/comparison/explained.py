"""The explanation of a difference, once the steps were timed: traces are a few steps of other processes."""

from __future__ import annotations

from optexp.profiling.explanation import coverage, difference, explain
from optexp.profiling.view import View
from optexp.reporting.wording import agreeing
from optexp.result import Result, Verdict

TWICE = 2.0  # a step of the profiled process that differs by more from the timed one is another step


def explain_the_timed(result: Result, verdict: Verdict, views: tuple[View, View]) -> None:
    """Hold the explanation of the traced steps beside the timed difference: what traces do not show is unexplained.

    Gaps of the traced steps are fitted to the timed ones. Where a traced step is no step that was timed, nothing is
    explained.

    Args:
        result: Has the explanation of the traced steps; its summaries hold the timed steps.
        views: Of the baseline's and the candidate's traced steps.
    """
    before_us, after_us, found = result.baseline.step_us, result.candidate.step_us, result.profile.difference
    if found is None or before_us is None or after_us is None:
        result.explanation = agreeing(verdict, result.explanation, result.profile)
        return
    if text := _another("baseline", views[0], before_us) or _another("candidate", views[1], after_us):
        result.explanation, result.profile.difference = [f"No explanation: {text}"], None
        return
    timed = views[0].timed(before_us), views[1].timed(after_us)
    if (held := difference(*timed)) is not None:
        result.profile.difference = found = held.timed(after_us - before_us)
        result.explanation = explain(*timed, found, step="the step")
    result.explanation = agreeing(verdict, result.explanation, result.profile)
    if verdict in (Verdict.FASTER, Verdict.SLOWER) and (covered := coverage(found)):
        result.explanation.append(covered)


def _another(name: str, view: View, timed_us: float) -> str:
    """Says that the profiled process steps too differently from the timed one; empty where it does not.

    Beside a GPU tracing slows the host alone, whose gaps are fitted: that process's own steps without tracing count.
    """
    on_gpu, untraced_us = view.breakdown.busy is not None, view.trace.timed_us
    profiled_us = untraced_us if on_gpu and untraced_us else view.breakdown.wall_us
    if 1 / TWICE <= profiled_us / timed_us <= TWICE:
        return ""
    times = f"{profiled_us / timed_us:.2g} times"
    return f"a step of the profiled {name} took {times} as long as a timed one; something disturbed one of them"
