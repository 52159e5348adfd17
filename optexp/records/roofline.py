"""The physics of a step as data: its lower bound, operators beside the device's ceilings, start-up, launches ahead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class StepWork:
    """Work of one step that no program can leave out, as far as fake tensors show it.

    input_bytes: of the batch, read
    kept_bytes:  of parameters, optimizer state, outputs and gradients, read or written, each counted once
    flops:       of GEMMs and convolutions by dtype ("tf32" where torch may round float32 so)
    cache_bytes: of the device's last caches, which may hold some of it from one step to the next
    reason:      why there is no number; else empty
    """

    input_bytes: float = 0.0
    kept_bytes: float = 0.0
    flops: Mapping[str, float] = field(default_factory=dict)
    cache_bytes: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class PhysicalBound:
    """A step's time, at least, in µs; None with the reason where no bound is known.

    memory_us:  of the bytes that exceed the cache;  compute_us: of the floating-point operations
    text:       the same as formula and number
    """

    us: float | None = None
    memory_us: float = 0.0
    compute_us: float = 0.0
    text: str = ""
    reason: str = ""


@dataclass(frozen=True)
class RooflinePoint:
    """An operator with its work, all calls of one shape together, and its time in µs of a step.

    share:     of the time of all operators
    ceiling:   flop/s of its dtype;  None where it has no flops
    traffic, arithmetic: formulas with their numbers, of one call
    """

    name: str
    shapes: str
    calls: float
    bytes: float
    flops: float
    traffic: str
    arithmetic: str
    share: float = 0.0
    us: float | None = None
    ceiling: float | None = None

    @property
    def intensity(self) -> float:
        """Floating-point operations per byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def bandwidth(self) -> float | None:
        """Bytes/s reached."""
        return self.bytes / self.us * 1e6 if self.us else None

    @property
    def rate(self) -> float | None:
        """Flop/s reached; None where nothing is computed or no time is shown."""
        return self.flops / self.us * 1e6 if self.us and self.flops else None


@dataclass(frozen=True)
class Ahead:
    """How far the host runs ahead of the device: µs from the call of a launch to the start of its kernel."""

    median_us: float
    most_us: float
    launches: int


@dataclass(frozen=True)
class Phase:
    """A phase of a program's start, in seconds; the steps that follow are phases, too."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Roofline:
    """All of it for one arm; `startup` in order, in mode=profile alone."""

    bound: PhysicalBound | None = None
    points: list[RooflinePoint] = field(default_factory=list)
    ahead: Ahead | None = None
    startup: list[Phase] = field(default_factory=list)

    def untimed(self) -> Roofline:
        """The same without times of the arm; the bound follows from no time of it."""
        return Roofline(self.bound, [replace(point, us=None, share=0.0) for point in self.points])
