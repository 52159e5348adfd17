"""The report's checklist: for each known optimization, whether it is done, worth trying, or not applicable, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import cloudpickle

from optexp.comparison.suggestions import installed, parse
from optexp.errors import Unsupported
from optexp.records.profile import Bottleneck, Calibration, Check, CheckStatus
from optexp.strategy import Stage, Strategy, compose
from optexp.trace import Trace
from optexp.workers.arm import Arm
from optexp.workers.client import Client

LEVELS = ("application", "system", "memory", "kernel")
LEVEL_OF_STAGE: Mapping[Stage, str] = {
    Stage.LAYOUT: "kernel",
    Stage.REWRITE: "kernel",
    Stage.PRECISION: "kernel",
    Stage.OPTIMIZER: "kernel",
    Stage.COMPILE: "kernel",
    Stage.FEED: "system",
    Stage.STREAMS: "system",
    Stage.CAPTURE: "system",
    Stage.MEMORY: "memory",
}  # a strategy of another stage, such as another model, is on no checklist
LITTLE = 0.02  # of a step


def checklist(
    arm: Client[Arm],
    trace: Trace,
    calibration: Calibration | None,
    metrics: Mapping[str, float],
    bottlenecks: Sequence[Bottleneck],
    stack: Sequence[Strategy],
) -> list[Check]:
    """Checks of a profiled arm, by level; those worth trying first.

    Args:
        metrics: Of the arm's breakdown, with shares of a step.
        stack: The arm's strategies.
    """
    known = [strategy for strategy in installed() if level(strategy)]
    refused = arm.call(Arm.refusals, packed=cloudpickle.dumps(known))
    found = [*properties(metrics)]
    for strategy, reason in zip(known, refused, strict=True):
        status, why = judged(strategy, reason, trace, calibration, bottlenecks, stack)
        found.append(Check(level(strategy), strategy.name, status, why))
    order = {status: place for place, status in enumerate(CheckStatus)}
    first = CheckStatus.WORTH_TRYING
    return sorted(found, key=lambda c: (LEVELS.index(c.level), c.status is not first, order[c.status], c.name))


def level(strategy: Strategy) -> str:
    """The level that a strategy works on; empty where no checklist has it."""
    return strategy.level or LEVEL_OF_STAGE.get(strategy.stage, "")


def judged(
    strategy: Strategy,
    refusal: str,
    trace: Trace,
    calibration: Calibration | None,
    bottlenecks: Sequence[Bottleneck],
    stack: Sequence[Strategy],
) -> tuple[CheckStatus, str]:
    """The status of one strategy for an arm whose program refuses it for `refusal` (empty: it does not)."""
    if strategy.name in {member.name for member in stack}:
        return CheckStatus.DONE, "in the stack"
    if refusal:
        return CheckStatus.NOT_APPLICABLE, refusal
    try:
        compose([*stack, strategy])
    except Unsupported as conflict:
        return CheckStatus.NOT_APPLICABLE, str(conflict)
    for bottleneck in bottlenecks:
        if any(parse(text)[0] == strategy.name for text in bottleneck.try_):
            return CheckStatus.WORTH_TRYING, bottleneck.why
    if not strategy.helps(trace, calibration):
        return CheckStatus.NOT_INDICATED, "this profile leaves it nothing to gain"
    return CheckStatus.NOT_INDICATED, "no bottleneck of this profile calls for it"


def properties(metrics: Mapping[str, float]) -> Iterator[Check]:
    """Properties of a well-kept step that no strategy brings about, as far as the profile shows them."""

    def kept(where: str, name: str, share: float, good: str, bad: str) -> Check:
        worth = share >= LITTLE
        return Check(where, name, CheckStatus.WORTH_TRYING if worth else CheckStatus.DONE, bad if worth else good)

    loading = metrics.get("share_data_loading")
    if loading is not None:
        bad = f"the step waits {loading:.0%} of its time for the loader: workers, prefetching, less work for each batch"
        yield kept("application", "batches in time", loading, "no step waits for its batch", bad)
    if "gpu_busy" not in metrics:
        return
    waits = metrics.get("share_synchronisation", 0.0)
    bad = f"the GPU is idle {waits:.0%} of the step after the host waited for it (.item(), .cpu(), printing a loss)"
    yield kept("application", "no waiting for the GPU", waits, "the host keeps ahead of the GPU", bad)
    allocating = metrics.get("share_allocation", 0.0)
    bad = f"cudaMalloc and cudaFree take {allocating:.0%} of a steady step: sizes that change, or an empty cache"
    yield kept("memory", "no allocation in steady steps", allocating, "the allocator's cache serves every step", bad)
    copies = metrics.get("share_exposed_copies", 0.0)
    bad = f"copies that no kernel hides take {copies:.0%} of the step"
    yield kept("system", "copies behind kernels", copies, "no copy delays a step", bad)
