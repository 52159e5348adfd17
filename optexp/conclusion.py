"""From samples to the verdict, the figures people read, and what the gain costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median, quantiles
from typing import Any

from optexp.equivalence.protocol import Verification
from optexp.measurement import statistics
from optexp.measurement.clock import Timing
from optexp.measurement.sampling import Sample
from optexp.measurement.watchdogs import WATCHDOGS
from optexp.result import ArmSummary, Result, Speedup, Verdict
from optexp.session import Session, Stop
from optexp.strategy import label
from optexp.wording import headline


def conclude(session: Session, samples: Sequence[Sample], verification: Verification) -> None:
    """The interval, the verdict it gives, and what it costs to get there."""
    result, protocol = session.result, session.protocol
    if len(samples) > 1:
        interval = statistics.over_processes([s.log_ratio for s in samples], protocol.confidence)
    else:
        interval = statistics.over_blocks([p.log_ratio for p in samples[0].pairs], protocol.confidence)
    result.speedup = Speedup(*interval.ratios(), confidence=protocol.confidence, processes=len(samples))
    result.verdict = statistics.decide(interval, protocol.min_effect)
    if len(samples) == 1 and statistics.too_noisy(interval):
        result.verdict = Verdict.INCONCLUSIVE
    first = {}
    for name in ("baseline", "candidate"):
        summary: ArmSummary = getattr(result, name)
        summarize(summary, [[getattr(pair, name) for pair in s.pairs] for s in samples], session.samples)
        first[name], summary.setup_s = summary.setup_s, median(result.measurement["setups_s"][name])
    watches = [watchdog(samples) for watchdog in WATCHDOGS]
    result.measurement |= {
        "preset": protocol.preset,
        "min_effect": protocol.min_effect,
        "controls": {},
        "watchdogs": [asdict(watch) for watch in watches],
        "processes": [{"log_ratio": s.log_ratio, "pairs": len(s.pairs)} for s in samples],
        "pairs": [[[p.baseline.wall_s * 1e6, p.candidate.wall_s * 1e6] for p in s.pairs] for s in samples],
        "cost": cost(session, result) | {"first_setup_s": first},
    }
    result.headline = headline(result, session.contract, label(session.baseline), verification.weakness)
    result.explanation = agreeing(result.verdict, result.explanation)
    for watch in watches:
        if watch.fatal and not watch.ok:
            raise Stop(Verdict.INVALID, watch.text)


def summarize(summary: ArmSummary, processes: Sequence[Sequence[Timing]], samples_per_step: int) -> None:
    """Median over processes of each process's median block; p95 over all blocks."""
    walls = [median(t.wall_s for t in blocks) for blocks in processes]
    every = [t.wall_s * 1e6 for blocks in processes for t in blocks]
    device = [median(t.device_s or 0.0 for t in blocks) for blocks in processes if blocks[0].device_s is not None]
    summary.step_us = median(walls) * 1e6
    summary.p95_us = quantiles(every, n=20)[-1]
    summary.device_us = median(device) * 1e6 if device else None
    summary.throughput = samples_per_step / median(walls)


def agreeing(verdict: Verdict, explanation: list[str]) -> list[str]:
    """The explanation without what the measurement did not confirm: a profile is a few steps of one process."""
    step, *changes = explanation
    if (verdict is Verdict.FASTER and "got slower" in step) or (verdict is Verdict.SLOWER and "got faster" in step):
        return ["The traced steps do not show this difference; what else they show:", *changes]
    return explanation if verdict in (Verdict.FASTER, Verdict.SLOWER) else changes


def cost(session: Session, result: Result) -> dict[str, Any]:
    """What set-up costs and after how many steps it has paid for itself.

    Set-up is the median over the processes that measured, so with warm compile caches; `first_setup_s` is the very
    first's, which had to share the machine with the other arms' set-up.
    """
    assert result.speedup is not None
    assert result.baseline.step_us is not None
    extra = (result.candidate.setup_s or 0.0) - (result.baseline.setup_s or 0.0)
    step_s = result.baseline.step_us / 1e6

    def break_even(speedup: float) -> int | str:
        steps = statistics.break_even(extra, step_s, speedup) if gains else None
        return "never" if steps is None else steps

    gains = result.speedup.low > 1
    facts: dict[str, Any] = {
        "setup_s": result.candidate.setup_s,
        "baseline_setup_s": result.baseline.setup_s,
        "break_even_steps": break_even(result.speedup.estimate),
        "break_even_steps_at_low": break_even(result.speedup.low),
    }
    if horizon := session.experiment.horizon_steps:
        facts |= {
            "horizon_steps": horizon,
            "hours_saved": statistics.hours_saved(horizon, extra, step_s, result.speedup.estimate),
            "hours_saved_at_low": statistics.hours_saved(horizon, extra, step_s, max(result.speedup.low, 1e-9)),
        }
    return facts
