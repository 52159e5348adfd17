"""The spread between processes: read for a comparison of one process, learnt from comparisons of several."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from statistics import median

from optexp.comparison.session import Session
from optexp.measurement import process_spread, statistics
from optexp.measurement.process_spread import StepKind
from optexp.measurement.samples import SAME, Sample
from optexp.records.measurement import ProcessSpread
from optexp.result import ArmSummary, Result

HOST_BOUND = 0.9  # busy share of a step, below which the GPU waits for the host


def busy_shares(result: Result, samples: Sequence[Sample]) -> Mapping[str, float]:
    """The share of a timed step in which the GPU works, by arm.

    Its busy time is traced and the step's time is not, as tracing lengthens steps. Arms without a profile, and steps
    with an emptied cache, are left out.
    """
    found = {}
    for name in ("baseline", "candidate"):
        summary: ArmSummary = getattr(result, name)
        timings = [getattr(pair, name) for sample in samples for pair in sample.kept]
        if summary.busy_us and timings and not timings[0].cold:
            found[name] = min(1.0, summary.busy_us / 1e6 / median(timing.wall_s for timing in timings))
    return found


def expected(session: Session, samples: Sequence[Sample]) -> ProcessSpread | None:
    """The spread to expect between processes, for a comparison of one; None for several."""
    if len(samples) != 1 or not samples[0].kept:
        return None
    known = process_spread.remembered(process_spread.file_of(_device(session)))
    return process_spread.expected(known, _kind(session, samples), _step_us(samples))


def pairs_suffice(session: Session, found: Sample) -> bool:
    """Whether a comparison of one process has enough pairs: more would hardly narrow its interval.

    False where controls run, as these need pairs of their own.
    """
    if session.settings.processes_max > 1 or found.of(SAME):
        return False
    spread, ratios = expected(session, [found]), [pair.log_ratio for pair in found.kept]
    return spread is not None and statistics.blocks_suffice(ratios, session.settings.confidence, spread)


def learn(session: Session, samples: Sequence[Sample]) -> None:
    """Remember the spread of this comparison's processes, unless a watchdog found it disturbed."""
    measurement = session.result.measurement
    if measurement is None or any(watch.refuses or watch.undecides for watch in measurement.watchdogs):
        return
    ratios = [sample.log_ratio for sample in samples if sample.kept]
    if session.isolated and (found := process_spread.seen(_kind(session, samples), _step_us(samples), ratios)):
        process_spread.remember(process_spread.file_of(_device(session)), found)


def _kind(session: Session, samples: Sequence[Sample]) -> StepKind:
    if not session.machine.on_gpu:
        return StepKind.CPU
    shares = busy_shares(session.result, samples)
    device_bound = len(shares) == 2 and min(shares.values()) >= HOST_BOUND
    return StepKind.DEVICE_BOUND if device_bound else StepKind.HOST_BOUND


def _step_us(samples: Sequence[Sample]) -> float:
    """The baseline's median step, in µs."""
    return 1e6 * median(pair.baseline.wall_s for sample in samples for pair in sample.kept)


def _device(session: Session) -> str:
    environment = session.result.environment
    if session.machine.on_gpu:
        return str(environment.get("gpu_uuid") or environment.get("gpu") or "cuda")
    facts = f"{environment.get('cpu')} {session.machine.cores}"
    return hashlib.sha256(facts.encode()).hexdigest()[:16]
