"""Where a step's time goes, as shares that add up to one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from optexp.profiling.categories import category
from optexp.profiling.intervals import Union
from optexp.profiling.roofline import CLASSES, kernel_classes, matrix_flop
from optexp.records.profile import Calibration
from optexp.trace import GRAPH_LAUNCH, LAUNCH, Copy, Kernel, Trace

HOST_LATE = ("data_loading", "synchronisation", "allocation", "dispatch")  # gaps in which the GPU waits for the host
GAPS = (*HOST_LATE, "launch_gap", "other")
OUTSIDE = "outside_ops"

SLOWED = 1.2  # profiled step over timed step, above which tracing counts as having slowed the host
NOT_LATE = 0.05  # share of the step in host-late gaps, below which the host counts as never late
CLOCKS = 0.05  # most by which the card's clock, or what its caches hold, changes a step's kernels from run to run
PIPELINE_US = 10.0  # longest gap in which the GPU starts a queued kernel

SYNCHRONISE = re.compile(r"cu(da)?(\w*Synchronize|Memcpy)$")
ALLOCATE = re.compile(r"cu(da)?(Malloc|Free|Host(Alloc|Register)|Mem(Create|Release|Map|Unmap|SetAccess|Alloc|Free))")


@dataclass(frozen=True)
class Breakdown:
    """One step's time by terms: fractions that add up to 1. Counts are per step.

    On a GPU the terms are kernel classes, exposed copies and gaps. Without GPU work they are the operators' own time by
    category and the time outside all operators, and every field about the GPU is None.
    """

    steps: int
    wall_us: float
    terms: Mapping[str, float]
    ops: float
    matrix_flop: float = 0.0
    stretched: float | None = None  # profiled step over timed step; host terms are scaled back above 1.2
    clock: float = 1.0  # time of the kernels of the timed step over that of the traced ones
    busy: float | None = None
    kernels: float | None = None
    launches: float | None = None
    graph_launches: float | None = None
    graph_kernels: float | None = None
    median_kernel_us: float | None = None
    enqueue: float | None = None  # share of the profiled step in which the host did not wait for the device
    synchronisations: float | None = None  # calls in which the host waited for the device
    pageable: float | None = None  # share of the step spent in copies from or to pageable memory

    @property
    def host_late(self) -> float:
        return sum(self.terms.get(name, 0.0) for name in HOST_LATE)

    @property
    def gaps(self) -> float:
        return sum(self.terms.get(name, 0.0) for name in GAPS)

    @property
    def kernel_share(self) -> float:
        return sum(self.terms.get(name, 0.0) for name in CLASSES)

    def us(self, term: str) -> float:
        """µs of a step in this term."""
        return self.terms.get(term, 0.0) * self.wall_us

    def metrics(self) -> dict[str, float]:
        """Flat numbers for the tracker, without those that do not apply."""
        summary = {
            "gpu_busy": self.busy,
            "kernels": self.kernels,
            "launches": self.launches,
            "graph_launches": self.graph_launches,
            "median_kernel_us": self.median_kernel_us,
            "enqueue": self.enqueue,
            "synchronisations": self.synchronisations,
            "memcpy_pageable": self.pageable,
        }
        if self.busy is not None:
            summary |= {"host_wait": self.host_late, "gaps": self.gaps, "memcpy": self.terms["exposed_copies"]}
        summary |= {"step_us": self.wall_us, "ops": self.ops, "stretched": self.stretched}
        summary |= {"matrix_flop": self.matrix_flop or None}
        return {key: value for key, value in summary.items() if value is not None} | {
            f"share_{name}": share for name, share in self.terms.items()
        }


def breakdown(trace: Trace, calibration: Calibration | None = None, beside: Trace | None = None) -> Breakdown:
    """Split the trace's steps into terms.

    calibration: measured ceilings of the device, which class its kernels; None: kernels are classed by their launches
    beside:      a trace of the same work without a graph: it classes the kernels that a graph launches
    """
    split = _gpu(trace, calibration, beside) if trace.has_gpu else _cpu(trace)
    return replace(split, matrix_flop=matrix_flop(trace))


def _gpu(trace: Trace, calibration: Calibration | None, beside: Trace | None) -> Breakdown:
    steps, (start, end) = len(trace.steps), trace.window
    kernels = Union(k.interval for k in trace.kernels)
    copies = Union(c.interval for c in trace.copies)
    busy = kernels | copies
    us: dict[str, float] = _kernel_terms(kernel_classes(trace, calibration, beside), kernels.total)
    us["exposed_copies"] = busy.total - kernels.total
    us |= _gap_terms(trace, busy)
    profiled = end - start
    stretched = profiled / steps / trace.timed_us if trace.timed_us else None
    if stretched is not None and stretched > SLOWED and trace.timed_us:
        _scale_host(us, trace.timed_us * steps)
    whole = sum(us.values())
    waits = Union(call.interval for call in trace.api if SYNCHRONISE.match(call.name))
    on_host = Union(step.interval for step in trace.steps)
    waiting = sum(waits.within(*step) for step in on_host)
    in_graph = sum(kernel.in_graph for kernel in trace.kernels)
    return Breakdown(
        steps=steps,
        wall_us=whole / steps,
        terms={name: value / whole for name, value in us.items()},
        ops=len(trace.ops) / steps,
        stretched=stretched,
        busy=busy.total / whole,
        kernels=len(trace.kernels) / steps,
        launches=sum(LAUNCH.match(call.name) is not None for call in trace.api) / steps,
        graph_launches=sum(GRAPH_LAUNCH.match(call.name) is not None for call in trace.api) / steps,
        graph_kernels=in_graph / steps,
        median_kernel_us=median(k.duration for k in trace.kernels) if trace.kernels else None,
        enqueue=(on_host.total - waiting) / profiled,
        synchronisations=sum(SYNCHRONISE.match(call.name) is not None for call in trace.api) / steps,
        pageable=Union(c.interval for c in trace.copies if c.pageable).total / whole,
    )


def fitted(split: Breakdown, step_us: float) -> Breakdown:
    """Scale the breakdown of a traced step to the timed step.

    Tracing slows the host most, starts of kernels a little, and kernels not at all. If the timed step is shorter,
    host-late gaps shrink first, then the other gaps. If it is longer, its host was slower: only host-late gaps grow.
    Where no gap accounts for the rest, the card computed it at another clock: copies and kernels are scaled, by at most
    `CLOCKS`. On a CPU tracing slows everything, so all terms keep their shares.
    """
    if split.busy is None:
        return replace(split, wall_us=step_us)
    us = {name: split.us(name) for name in split.terms}
    excess = split.wall_us - step_us
    for names in (HOST_LATE, GAPS) if excess > 0 else (HOST_LATE,):
        gaps = sum(us.get(name, 0.0) for name in names)
        if gaps < (NOT_LATE * split.wall_us if excess < 0 else 1e-9):
            continue
        change = min(excess, gaps)
        us |= {name: us[name] * (1 - change / gaps) for name in names if name in us}
        excess -= change
    clock = _clock(us, excess)
    us |= {name: us[name] * clock for name in us.keys() - set(GAPS)}
    whole = sum(us.values())
    longer = clock * split.wall_us / whole
    terms = {name: value / whole for name, value in us.items()}
    busy, pageable = split.busy * longer, (split.pageable or 0.0) * longer
    return replace(split, wall_us=whole, terms=terms, clock=split.clock * clock, busy=busy, pageable=pageable)


def _clock(us: Mapping[str, float], excess: float) -> float:
    """Factor of kernels and copies, without which a traced step takes `excess` µs more than the timed one."""
    work = sum(value for name, value in us.items() if name not in GAPS)
    return 1 - excess / work if 0 < abs(excess) <= CLOCKS * work else 1.0


def _kernel_terms(classes: Mapping[str, float], on_gpu: float) -> dict[str, float]:
    """Divide the time with a kernel running among the classes, in proportion to their kernels' own time."""
    together = sum(classes.values())
    return {name: on_gpu * value / together if together else 0.0 for name, value in classes.items()}


def _gap_terms(trace: Trace, busy: Union) -> dict[str, float]:
    """µs of the gaps by cause: host work that delayed the next launch, or the GPU's own start of a queued kernel."""
    gpu_work: list[Kernel | Copy] = [*trace.kernels, *trace.copies]
    next_work = {work.start: work for work in gpu_work}
    loading = loader_spans(trace)
    loading_or_allocating = loading | Union(c.interval for c in trace.api if ALLOCATE.match(c.name))
    waiting = Union(c.interval for c in trace.api if SYNCHRONISE.match(c.name))
    any_delay = loading_or_allocating | waiting
    us = dict.fromkeys(GAPS, 0.0)
    for start, end in busy.gaps(*trace.window):
        gap_us = end - start
        work = next_work.get(end)
        if work is not None and (work.launch is None or work.launch.start <= start):  # queued before the gap
            us["launch_gap" if gap_us <= PIPELINE_US else "other"] += gap_us
            continue
        # A moment with several causes counts once, for the first of loading, allocation and synchronisation.
        loading_us = loading.within(start, end)
        loading_or_allocating_us = loading_or_allocating.within(start, end)
        # Where the host was waiting as the GPU ran out of work, the wait caused the whole gap.
        delay_us = gap_us if waiting.holds(start) else any_delay.within(start, end)
        us["data_loading"] += loading_us
        us["allocation"] += loading_or_allocating_us - loading_us
        us["synchronisation"] += delay_us - loading_or_allocating_us
        us["dispatch"] += gap_us - delay_us
    if us["synchronisation"]:
        _divide_waits(us, _behind(trace, busy, waiting))
    return us


def _divide_waits(us: dict[str, float], behind_us: float) -> None:
    """Divide the gaps of synchronisation and dispatch by what would remain of them if the host never waited.

    Then dispatch gaps would last at most `behind_us` (see `_behind`), and at least `behind_us` − other delays.
    """
    both_us = us["synchronisation"] + us["dispatch"]
    least_us = min(behind_us - (us["data_loading"] + us["allocation"]), both_us)
    us["dispatch"] = min(max(us["dispatch"], least_us), behind_us)
    us["synchronisation"] = both_us - us["dispatch"]


def _behind(trace: Trace, busy: Union, waiting: Union) -> float:
    """µs by which the host's own work exceeds the GPU's: gaps that remain if the host never waits.

    After a wait the host has no lead, so that wait causes the gaps between the next launches. The host's work is
    scaled to the timed step, as tracing lengthens both alike.
    """
    steps = Union(step.interval for step in trace.steps)
    own = steps.total - sum(waiting.within(*step) for step in steps)
    traced = trace.window[1] - trace.window[0]
    timed = trace.timed_us * len(trace.steps) if trace.timed_us else traced
    return max(own * min(timed / traced, 1.0) - busy.total, 0.0)


def _scale_host(us: dict[str, float], timed: float) -> None:
    """Shrink the host's terms until the step is as long as the timed one: tracing slows the host, not the GPU."""
    host = sum(us[name] for name in HOST_LATE)
    if host:
        factor = max(timed - (sum(us.values()) - host), 0.0) / host
        for name in HOST_LATE:
            us[name] *= min(factor, 1.0)


def _cpu(trace: Trace) -> Breakdown:
    steps, (start, end) = len(trace.steps), trace.window
    operators = Union(op.interval for op in trace.ops)
    inside = operators.within(start, end)
    waiting = (operators | loader_spans(trace)).within(start, end) - inside
    own: dict[str, float] = defaultdict(float)
    for op in trace.ops:
        own[category(op.name)] += op.self_us
    together = sum(own.values())  # more than `inside` where threads ran operators side by side
    whole = end - start
    terms = {name: inside / whole * value / together for name, value in own.items()} if together else {}
    loading = {"data_loading": waiting / whole} if waiting else {}
    return Breakdown(
        steps=steps,
        wall_us=whole / steps,
        terms=terms | loading | {OUTSIDE: 1 - (inside + waiting) / whole},
        ops=len(trace.ops) / steps,
        stretched=whole / steps / trace.timed_us if trace.timed_us else None,
    )


def loader_spans(trace: Trace) -> Union:
    """When a step waited for a DataLoader's next batch, or made that batch itself."""
    return Union(s.interval for s in trace.annotations if s.name.startswith("enumerate(DataLoader"))
