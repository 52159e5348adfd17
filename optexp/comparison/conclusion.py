"""From timed blocks to a measurement: the interval, figures that people read, and the cost of the gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from statistics import median

from optexp.comparison.adjudicate import Facts
from optexp.comparison.measure import Timed
from optexp.comparison.session import Session
from optexp.comparison.spread_of_processes import expected, learn
from optexp.measurement import statistics
from optexp.measurement.samples import COLD, MAIN, Sample
from optexp.measurement.settings import MeasurementSettings
from optexp.measurement.watchdogs import FOREIGN, WATCHDOGS
from optexp.records.measurement import Cache, Cost, Measurement, ProcessRatio, ProcessSpread, Ratio, Severity, Watch
from optexp.result import ArmSummary, Result, Speedup
from optexp.support.units import percent, ratio


def conclude(session: Session, facts: Facts, timed: Timed) -> None:
    """Compute everything that follows from timed blocks: the measurement, both arms' figures, and the speedup."""
    result, settings, samples = session.result, session.settings, timed.samples
    setup_s = {name: median(seconds) for name, seconds in timed.setups_s.items()}
    first = {"baseline": result.baseline.setup_s, "candidate": result.candidate.setup_s}
    for name in first:
        summary: ArmSummary = getattr(result, name)
        summarize(summary, name, samples, session.samples)
        summary.setup_s = setup_s[name]
    facts.confidence, spread = settings.confidence, expected(session, samples)
    ratios = [[pair.log_ratio for pair in sample.kept] for sample in samples]
    facts.measurement = replace(
        measurement_of(samples, settings, session.experiment.environment.allow_foreign),
        controls=dict(timed.controls),
        p_value=statistics.p_value(ratios, settings.min_effect, settings.confidence, spread),
        l2=l2(samples, settings, spread),
        dropped=[[(p.baseline.step_s * 1e6, p.candidate.step_s * 1e6) for p in s.dropped] for s in samples],
        spread=spread,
        setups_s=timed.setups_s,
        differences=timed.differences,
        unbound=timed.unbound,
    )
    interval = facts.interval
    assert interval is not None
    result.series, result.measurement = series(samples), facts.measurement
    result.speedup = Speedup(*interval.ratios(), confidence=settings.confidence, processes=len(samples))
    facts.measurement.cost = cost(session, result, first)
    learn(session, samples)


def measurement_of(samples: Sequence[Sample], settings: MeasurementSettings, allow_foreign: bool) -> Measurement:
    """Blocks that count, and watchdogs over all blocks.

    Args:
        allow_foreign: Another program on the GPU is a remark.
    """
    return Measurement(
        preset=settings.preset,
        min_effect=settings.min_effect,
        watchdogs=[_accepted(watchdog(samples), allow_foreign) for watchdog in WATCHDOGS],
        processes=[ProcessRatio(s.log_ratio, len(s.kept)) for s in samples],
        pairs=[[(p.baseline.step_s * 1e6, p.candidate.step_s * 1e6) for p in s.kept] for s in samples],
    )


def _accepted(watch: Watch, allow_foreign: bool) -> Watch:
    return replace(watch, severity=Severity.REMARK) if allow_foreign and watch.name == FOREIGN else watch


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


def l2(samples: Sequence[Sample], settings: MeasurementSettings, spread: ProcessSpread | None) -> Cache:
    """State of the GPU's cache in steps of the headline, and the ratio with emptied caches if measured."""
    headline, found = "cold" if settings.l2 == COLD else "warm", None
    if cold := [ratios for s in samples if (ratios := [p.log_ratio for p in s.of(COLD) if p.counts])]:
        estimate, low, high = statistics.interval(cold, settings.confidence, spread).ratios()
        text = f"device time {ratio(estimate)}, {percent(settings.confidence)} interval {low:.3g} to {high:.3g}"
        found = Ratio(estimate, low, high if isfinite(high) else None, text)
    return Cache(headline, found)


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


def cost(session: Session, result: Result, first: Mapping[str, float | None]) -> Cost:
    """Set-up time and the steps after which it has paid for itself.

    Set-up is the median over the processes that measured, so with warm compile caches; `first` is the very first's,
    which had to share the machine with the other arms' set-up. Where caches were empty then, it is the one that has to
    be paid back ("cold"): compiling once is part of the price.
    """
    assert result.speedup is not None
    assert result.baseline.step_us is not None
    cold = session.cold_caches
    warm = {"baseline": result.baseline.setup_s, "candidate": result.candidate.setup_s}
    paid = first if cold else warm
    extra, step_s = (paid["candidate"] or 0.0) - (paid["baseline"] or 0.0), result.baseline.step_us / 1e6
    estimate, low, horizon = result.speedup.estimate, result.speedup.low, session.experiment.horizon_steps

    def break_even(speedup: float) -> int | str:
        steps = statistics.break_even(extra, step_s, speedup) if low > 1 else None
        return "never" if steps is None else steps

    def saved(speedup: float) -> float | None:
        """An interval without a lower end says nothing about possible losses."""
        return statistics.hours_saved(horizon, extra, step_s, speedup) if horizon and speedup > 0 else None

    return Cost(
        setup_s=result.candidate.setup_s,
        baseline_setup_s=result.baseline.setup_s,
        paid_back="cold" if cold else "warm",
        break_even_steps=break_even(estimate),
        break_even_steps_at_low=break_even(low),
        cold_setup_s=first["candidate"] if cold else None,
        horizon_steps=horizon or None,
        hours_saved=saved(estimate),
        hours_saved_at_low=saved(low),
        first_setup_s=dict(first),
    )
