"""From samples to the verdict, the figures people read, and what the gain costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from optexp.comparison.session import Session, Stop
from optexp.equivalence.finding import Verification
from optexp.measurement import statistics
from optexp.measurement.protocol import Protocol
from optexp.measurement.samples import COLD, MAIN, Sample
from optexp.measurement.watchdogs import FOREIGN, WATCHDOGS
from optexp.reporting.wording import headline, percent, ratio
from optexp.result import ArmSummary, Result, Speedup, Verdict, against_itself
from optexp.strategy import label


def conclude(session: Session, samples: Sequence[Sample], verification: Verification) -> None:
    """The interval, the verdict it gives, and what it costs to get there."""
    result, protocol = session.result, session.protocol
    ratios = [[p.log_ratio for p in s.kept] for s in samples]
    result.verdict, interval = statistics.verdict(ratios, protocol.confidence, protocol.min_effect)
    result.speedup = Speedup(*interval.ratios(), confidence=protocol.confidence, processes=len(samples))
    first = {}
    for name in ("baseline", "candidate"):
        summary: ArmSummary = getattr(result, name)
        summarize(summary, name, samples, session.samples)
        first[name], summary.setup_s = summary.setup_s, median(result.measurement["setups_s"][name])
    watches = [watchdog(samples) for watchdog in WATCHDOGS]
    if any(watch.undecides and not watch.ok for watch in watches):
        result.verdict = Verdict.INCONCLUSIVE
    if session.experiment.environment.allow_foreign:
        watches = [replace(w, fatal=w.fatal and w.name != FOREIGN) for w in watches]
    result.measurement |= {
        "preset": protocol.preset,
        "min_effect": protocol.min_effect,
        "watchdogs": [asdict(watch) for watch in watches],
        "p_value": statistics.p_value(ratios, protocol.min_effect),
        "l2": l2(samples, protocol),
        "processes": [{"log_ratio": s.log_ratio, "pairs": len(s.kept)} for s in samples],
        "pairs": [[[p.baseline.step_s * 1e6, p.candidate.step_s * 1e6] for p in s.kept] for s in samples],
        "dropped": [[[p.baseline.step_s * 1e6, p.candidate.step_s * 1e6] for p in s.dropped] for s in samples],
        "series": series(samples),
        "cost": cost(session, result, first) | {"first_setup_s": first},
    }
    result.headline = headline(result, session.precision, label(session.baseline), verification.weakness)
    result.explanation = agreeing(result.verdict, result.explanation)
    wrong = [watch.text for watch in watches if watch.fatal and not watch.ok]
    wrong += [f"{name}: {c['text']}" for name, c in result.measurement["controls"].items() if not c["ok"]]
    if against_itself(result.config) and result.verdict in (Verdict.FASTER, Verdict.SLOWER):
        wrong.append(f"the same program differs from itself by {abs(interval.estimate):.1%}: the machine disturbs")
    if wrong:
        raise Stop(Verdict.INVALID, "; ".join(wrong))


def series(samples: Sequence[Sample]) -> list[dict[str, list[float | None]]]:
    """By process: when each pair began, what the card said after it, and whether it counts (1) where some do not."""
    begin = min(pair.start_s for s in samples for pair in s.kept)
    found = []
    for sample in samples:
        pairs = sample.of(MAIN)
        columns: dict[str, list[float | None]] = {"at_s": [round(p.start_s - begin, 3) for p in pairs]}
        if sample.dropped:
            columns["kept"] = [int(p.counts) for p in pairs]
        for name in ("sm_mhz", "power_w", "temperature_c"):
            columns[name] = [getattr(p.readings[-1], name) if p.readings else None for p in pairs]
        found.append({name: values for name, values in columns.items() if any(v is not None for v in values)})
    return found


def l2(samples: Sequence[Sample], protocol: Protocol) -> dict[str, Any]:
    """What steps of the headline found in the GPU's cache, and the ratio with emptied caches if measured."""
    facts: dict[str, Any] = {"headline": "cold" if protocol.l2 == COLD else "warm"}
    if cold := [ratios for s in samples if (ratios := [p.log_ratio for p in s.of(COLD) if p.counts])]:
        estimate, low, high = statistics.interval(cold, protocol.confidence).ratios()
        text = f"device time {ratio(estimate)}, {percent(protocol.confidence)} interval {low:.3g} to {high:.3g}"
        facts["cold"] = {"estimate": estimate, "low": low, "high": high, "text": text}
    return facts


def summarize(summary: ArmSummary, arm: str, samples: Sequence[Sample], samples_per_step: int) -> None:
    """Figures for people: medians over processes of each process's median block, percentiles of all single steps."""

    def typical(kind: str, figure: str) -> float | None:
        processes = [s.kept if kind == MAIN else [pair for pair in s.of(kind) if pair.counts] for s in samples]
        blocks = [[getattr(getattr(pair, arm), figure) for pair in pairs] for pairs in processes]
        return median(map(median, blocks)) if all(blocks) and None not in blocks[0] else None

    step_s, device_s, cold_s = typical(MAIN, "step_s"), typical(MAIN, "device_s"), typical(COLD, "device_s")
    assert step_s is not None
    summary.step_us, summary.throughput = step_s * 1e6, samples_per_step / step_s
    summary.device_us = None if device_s is None else device_s * 1e6
    summary.cold_us = None if cold_s is None else cold_s * 1e6
    alone = sorted(seconds * 1e6 for s in samples for seconds in s.alone.get(arm, []))
    for name, share in (("p5_us", 0.05), ("alone_us", 0.5), ("p95_us", 0.95), ("p99_us", 0.99)):
        setattr(summary, name, statistics.percentile(alone, share))
    for load in (s.load[arm] for s in samples if arm in s.load):
        summary.load_us, summary.power_w, summary.utilisation = load.step_s * 1e6, load.power_w, load.utilisation
        summary.energy_j = None if load.power_w is None else load.power_w * load.step_s


def agreeing(verdict: Verdict, explanation: list[str]) -> list[str]:
    """The explanation without what the measurement did not confirm: a profile is a few steps of one process."""
    if not explanation:
        return []
    step, *changes = explanation
    if (verdict is Verdict.FASTER and "got slower" in step) or (verdict is Verdict.SLOWER and "got faster" in step):
        return ["The traced steps do not show this difference; what else they show:", *changes]
    return explanation if verdict in (Verdict.FASTER, Verdict.SLOWER) else changes


def cost(session: Session, result: Result, first: Mapping[str, float | None]) -> dict[str, Any]:
    """What set-up costs and after how many steps it has paid for itself.

    Set-up is the median over the processes that measured, so with warm compile caches; `first_setup_s` is the very
    first's, which had to share the machine with the other arms' set-up. Where caches were empty then, it is what has
    to be paid back (`paid_back`: "cold"): compiling once is part of the price.
    """
    assert result.speedup is not None
    assert result.baseline.step_us is not None
    warm = {"baseline": result.baseline.setup_s, "candidate": result.candidate.setup_s}
    paid = first if session.caches else warm
    extra = (paid["candidate"] or 0.0) - (paid["baseline"] or 0.0)
    step_s = result.baseline.step_us / 1e6

    def break_even(speedup: float) -> int | str:
        steps = statistics.break_even(extra, step_s, speedup) if gains else None
        return "never" if steps is None else steps

    low = result.speedup.low
    gains = low > 1
    facts: dict[str, Any] = {
        "setup_s": result.candidate.setup_s,
        "baseline_setup_s": result.baseline.setup_s,
        "paid_back": "cold" if session.caches else "warm",
        "break_even_steps": break_even(result.speedup.estimate),
        "break_even_steps_at_low": break_even(result.speedup.low),
    }
    if session.caches:
        facts["cold_setup_s"] = first["candidate"]
    if horizon := session.experiment.horizon_steps:
        facts |= {
            "horizon_steps": horizon,
            "hours_saved": statistics.hours_saved(horizon, extra, step_s, result.speedup.estimate),
            # An interval without a lower end tells nothing about what may be lost.
            "hours_saved_at_low": statistics.hours_saved(horizon, extra, step_s, low) if low > 0 else None,
        }
    return facts
