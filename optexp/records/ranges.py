"""Ranges, lines of code and files of an arm's traces as data. Needs no torch to be read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class RangeEntry:
    """A phase of the step, or a region that the user's code marks; calls and µs of a step.

    host_us, device_us:   of the range itself: the host inside it, and kernels and copies that were launched in it
    backward_host_us, backward_device_us: of the backward functions of its operators, where those ran outside it
    host_share:   of the step's host time, both passes;  device_share: of all kernels' and copies' time, both passes
    kernels:      kernels and copies of both passes
    """

    name: str
    calls: float
    host_share: float = 0.0
    device_share: float = 0.0
    kernels: float = 0.0
    host_us: float | None = None
    device_us: float | None = None
    backward_host_us: float | None = None
    backward_device_us: float | None = None

    def untimed(self) -> RangeEntry:
        """The same without times."""
        return replace(self, host_us=None, device_us=None, backward_host_us=None, backward_device_us=None)


@dataclass(frozen=True)
class LineEntry:
    """Calls of one operator from one line of the user's code; calls and µs of a step, backward functions included.

    place: "file.py:12" of the innermost frame outside torch and optexp
    host_share, device_share: of all outermost operators' time, those of no line included
    """

    operator: str
    place: str
    calls: float
    host_share: float = 0.0
    device_share: float = 0.0
    host_us: float | None = None
    device_us: float | None = None

    def untimed(self) -> LineEntry:
        """The same without times."""
        return replace(self, host_us=None, device_us=None)


@dataclass(frozen=True)
class TraceFile:
    """A file that a profile left in the output folder.

    path:    relative to the folder
    content: in words
    trace:   a Chrome trace, which Perfetto opens
    """

    path: str
    content: str
    trace: bool = True


@dataclass(frozen=True)
class Cycle:
    """One of several recordings (`profile.repeat`); the tables are of the one that is shown."""

    path: str
    steps: int
    shown: bool
    step_us: float | None = None


@dataclass(frozen=True)
class Ranges:
    """Further contents of an arm's traces.

    region: that tables and breakdown are limited to; empty where they are of the whole step
    phases:  feed, forward, loss, backward, optimizer, and "rest", which is the step outside all of them
    origins: the line that stands for most of each operator's time, by the operator's name
    """

    region: str = ""
    phases: list[RangeEntry] = field(default_factory=list)
    regions: list[RangeEntry] = field(default_factory=list)
    lines: list[LineEntry] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    cycles: list[Cycle] = field(default_factory=list)
    files: list[TraceFile] = field(default_factory=list)

    def untimed(self) -> Ranges:
        """The same without times."""
        return replace(
            self,
            phases=[entry.untimed() for entry in self.phases],
            regions=[entry.untimed() for entry in self.regions],
            lines=[entry.untimed() for entry in self.lines],
            cycles=[replace(cycle, step_us=None) for cycle in self.cycles],
        )
