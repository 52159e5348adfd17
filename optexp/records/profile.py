"""Profiles as data, as a record holds them. Needs no torch to be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

import msgspec

from optexp.records.compiler import CompilerEvidence
from optexp.records.difference import Difference
from optexp.records.memory import MemoryDifference, MemoryProfile
from optexp.records.nsight import ToolRun
from optexp.records.prediction import MeasuredPrediction, Prediction
from optexp.records.ranges import Ranges
from optexp.records.roofline import Roofline

SAME_STEP = 0.03  # traced steps that differ by less take about as long


@dataclass(frozen=True)
class Calibration:
    """Ceilings of a device.

    bandwidth: bytes/s read and written by a copy
    matrix:    flop/s of a GEMM by dtype ("tf32" too)
    launch_us: µs that the host needs for one empty launch; None on a CPU
    pinned, pageable: bytes/s to the device from such memory; None on a CPU
    doubt:     why they are no ceilings, so that no bound follows from them; empty where nothing speaks against them
    """

    device: str
    bandwidth: float
    matrix: Mapping[str, float] = field(default_factory=dict)
    launch_us: float | None = None
    pinned: float | None = None
    pageable: float | None = None
    doubt: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Calibration:
        return cls(**values)


@dataclass(frozen=True)
class TopEntry:
    """A kernel or an operator: calls and µs of a step, share of the whole. Without a measurement µs are not shown."""

    name: str
    calls: float
    share: float
    us: float | None = None


@dataclass(frozen=True)
class OperatorEntry:
    """An operator of one step, or all its calls with the same shapes or in the same module. Times are µs of a step.

    host_us, device_us: with the operators that it called;  host_self_us, device_self_us: without them
    host_share, device_share: of all operators' own time on the host, on the device
    backward_host_us, backward_device_us: of the backward functions of these calls
    kernels: kernels and copies that it, and the operators that it called, launched
    bytes, flops: read and written, and computed; None where its shapes do not tell
    """

    name: str
    category: str
    calls: float
    shapes: str = ""
    module: str = ""
    kernels: float = 0.0
    host_us: float | None = None
    host_self_us: float | None = None
    device_us: float | None = None
    device_self_us: float | None = None
    host_share: float = 0.0
    device_share: float = 0.0
    backward_host_us: float | None = None
    backward_device_us: float | None = None
    bytes: float | None = None
    flops: float | None = None

    def untimed(self) -> OperatorEntry:
        """The same without times."""
        times = dict.fromkeys(name for name in self.__dataclass_fields__ if name.endswith("_us"))
        return replace(self, **times)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ModuleEntry:
    """A module of the model: calls and µs of a step, with the modules inside it.

    name:  path in the model, "" for the model itself;  kind: its class
    host_us, device_us: of its forward calls;  backward_host_us, backward_device_us: of their backward functions
    share: of the model's time in both passes: on the device, or on the host where there is none
    """

    name: str
    kind: str
    calls: float
    share: float
    host_us: float | None = None
    device_us: float | None = None
    backward_host_us: float | None = None
    backward_device_us: float | None = None

    def untimed(self) -> ModuleEntry:
        """The same without times."""
        return replace(self, host_us=None, device_us=None, backward_host_us=None, backward_device_us=None)


@dataclass(frozen=True)
class CallEntry:
    """A line of the tree of calls: an operator by the operators around it, or a kernel that it launched.

    depth: number of operators around it
    """

    name: str
    depth: int
    calls: float
    kernel: bool = False
    host_us: float | None = None
    device_us: float | None = None

    def untimed(self) -> CallEntry:
        """The same without times."""
        return replace(self, host_us=None, device_us=None)


@dataclass(frozen=True)
class Bottleneck:
    """One bottleneck.

    share:  of the step, that it stands for
    try_:   remedies: strategies as they are typed (`strategy=fusion`), or plain words
    causes: names that strategies declare remedies against, the first answered first
    """

    label: str
    share: float
    why: str
    try_: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ApiEntry:
    """A function of the CUDA runtime or driver: calls and µs of a step.

    share: of the host's time in all such calls
    """

    name: str
    calls: float
    share: float
    us: float | None = None


@dataclass(frozen=True)
class CopyEntry:
    """Copies of one kind ("HtoD", "DtoH", "DtoD", "memset", …): count, bytes and µs of a step.

    pageable: bytes from or to pageable memory of the host
    """

    kind: str
    count: float
    bytes: float
    pageable: float
    us: float | None = None


@dataclass(frozen=True)
class LaunchEntry:
    """Launches of one kernel with one configuration.

    grid, block: of the launch, as text "132×1×1"
    waves:       blocks by multiprocessor; below 1 some of them idle. A multiprocessor may hold several blocks at once
    us:          µs of a step that the kernel runs;  launch_us: that the host takes to launch it, None inside a graph
    """

    name: str
    grid: str
    block: str
    calls: float
    in_graph: bool
    waves: float | None = None
    us: float | None = None
    launch_us: float | None = None

    def untimed(self) -> LaunchEntry:
        """The same without times."""
        return replace(self, us=None, launch_us=None)


class CheckStatus(StrEnum):
    """Outcome of one check of a checklist."""

    DONE = "done"
    WORTH_TRYING = "worth trying"
    NOT_INDICATED = "not indicated"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class Check:
    """One line of a checklist.

    level: kernel, system, memory or application
    name:  a strategy, or a property of a well-kept step
    why:   the measurement or the refusal that the status follows from
    """

    level: str
    name: str
    status: CheckStatus
    why: str = ""


@dataclass(frozen=True)
class ArmProfile:
    """A few traced steps of one arm.

    operators: those with most time of their own, of all shapes and modules
    modules:   those with most time, where modules could be marked
    calls:     the tree of calls, without its lightest branches
    api, copies, launches: on a GPU: calls of the CUDA API, copies by kind, kernels by launch configuration
    ranges:    phases, regions, lines of code and files
    compiler:  compiled graphs and resources of kernels, where anything was compiled or launched
    memory:    bytes by category, where they could be recorded
    """

    metrics: dict[str, float] = field(default_factory=dict)
    top_kernels: list[TopEntry] = field(default_factory=list)
    top_ops: list[TopEntry] = field(default_factory=list)
    operators: list[OperatorEntry] = field(default_factory=list)
    modules: list[ModuleEntry] = field(default_factory=list)
    calls: list[CallEntry] = field(default_factory=list)
    api: list[ApiEntry] = field(default_factory=list)
    copies: list[CopyEntry] = field(default_factory=list)
    launches: list[LaunchEntry] = field(default_factory=list)
    ranges: Ranges | None = None
    roofline: Roofline | None = None
    compiler: CompilerEvidence | None = None
    memory: MemoryProfile | None = None

    def untimed(self) -> ArmProfile:
        """The same without times: counts, shares and bytes."""
        kernels, ops = ([replace(entry, us=None) for entry in top] for top in (self.top_kernels, self.top_ops))
        return ArmProfile(
            {n: v for n, v in self.metrics.items() if not n.endswith(("_us", "_s"))},
            kernels,
            ops,
            [entry.untimed() for entry in self.operators],
            [entry.untimed() for entry in self.modules],
            [entry.untimed() for entry in self.calls],
            [replace(entry, us=None) for entry in self.api],
            [replace(entry, us=None) for entry in self.copies],
            [entry.untimed() for entry in self.launches],
            ranges=self.ranges.untimed() if self.ranges else None,
            roofline=self.roofline.untimed() if self.roofline else None,
            compiler=self.compiler,
            memory=self.memory,
        )


@dataclass
class ProfileRecord:
    """Profiles of both arms, the device's ceilings, and of the last arm bottlenecks, advice and a checklist.

    difference: between the steps of both arms
    tool: the baseline's run under an Nsight tool, where one was asked for
    memory: the difference of both arms' peak memory, where there is one
    predictions: the most that each strategy can gain on a program that was profiled alone, most gain first
    prediction: of the candidate's strategies on the baseline, beside what was measured
    """

    baseline: ArmProfile | None = None
    candidate: ArmProfile | None = None
    calibration: Calibration | None = None
    bottlenecks: list[Bottleneck] = field(default_factory=list)
    suggestion: str | None = None
    checklist: list[Check] = field(default_factory=list)
    difference: Difference | None = None
    tool: ToolRun | None = None
    memory: MemoryDifference | None = None
    predictions: list[Prediction] = field(default_factory=list)
    prediction: MeasuredPrediction | None = None

    def arms(self) -> dict[str, ArmProfile]:
        """Those that were profiled, by name."""
        both = {"baseline": self.baseline, "candidate": self.candidate}
        return {name: found for name, found in both.items() if found is not None}

    def untimed(self) -> ProfileRecord:
        """The same without times of the arms, and without what was predicted of them."""
        shown = {name: found.untimed() for name, found in self.arms().items()}
        difference = self.difference.untimed() if self.difference else None
        return replace(self, **shown, difference=difference, predictions=[], prediction=None)  # type: ignore[arg-type]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> ProfileRecord:
        """From a record, also from one of schema 1."""
        record = {name: value for name, value in record.items() if value}  # the rest has its default
        bottlenecks = [
            {"try_" if name == "try" else name: value for name, value in row.items()}
            for row in record.get("bottlenecks") or ()
        ]
        return msgspec.convert({**record, "bottlenecks": bottlenecks}, cls)
