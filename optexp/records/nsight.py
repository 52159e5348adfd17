"""Findings of an Nsight tool as data. Needs no torch to be read."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ToolKernel:
    """Launches of one kernel with one configuration, as Nsight Compute measured them; means over the launches.

    us:             duration at the clocks that the tool holds, which are the card's base clocks
    sm_percent:     of the peak throughput of the multiprocessors;  memory_percent: of the memory system's
    occupancy_percent: warps that were resident, of the most possible;  theoretical_occupancy_percent: by its resources
    registers:      of a thread
    grid, block:    of the launch, as text "132×1×1"
    """

    name: str
    launches: int
    grid: str = ""
    block: str = ""
    us: float | None = None
    sm_percent: float | None = None
    memory_percent: float | None = None
    occupancy_percent: float | None = None
    theoretical_occupancy_percent: float | None = None
    registers: int | None = None


@dataclass(frozen=True)
class Advice:
    """A finding of one of the tool's rules about a kernel.

    speedup_percent: by the tool's estimate, at most; None where it gives none
    """

    kernel: str
    rule: str
    text: str
    speedup_percent: float | None = None


@dataclass(frozen=True)
class ToolRow:
    """A line of a summary of Nsight Systems; over all steps."""

    name: str
    calls: int
    share: float
    total_us: float | None = None
    median_us: float | None = None


@dataclass(frozen=True)
class ToolTable:
    """A summary of Nsight Systems."""

    title: str
    rows: list[ToolRow] = field(default_factory=list)


@dataclass(frozen=True)
class ToolRun:
    """A run of a program under an Nsight tool.

    command: that was run, or that a person can run
    reason:  why there is no finding; empty where there is one
    report:  file that the tool wrote, relative to the output folder
    """

    tool: str
    command: str
    reason: str = ""
    report: str = ""
    kernels: list[ToolKernel] = field(default_factory=list)
    advice: list[Advice] = field(default_factory=list)
    tables: list[ToolTable] = field(default_factory=list)
