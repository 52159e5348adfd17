"""Arms that say how long their steps take, and samples of them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from optexp.comparison.sampling import sample
from optexp.measurement.clock import Timing
from optexp.measurement.samples import Sample
from optexp.measurement.settings import MeasurementSettings
from optexp.workers.arm import Arm
from optexp.workers.client import Client, Pending
from optexp.workers.messages import WarmUp


class Scripted(Client[Arm]):
    """An arm that says how long its steps take."""

    name = "scripted"

    def __init__(self, step_s: float, compiles_after: int | None = None) -> None:
        self.step_s, self.compiles_after = step_s, compiles_after
        self.calls: list[dict[str, Any]] = []
        self.busy = False

    def start(self, method: Callable[..., Any], *args: Any, **arguments: Any) -> Pending[Any]:
        answer = self.answer(method.__name__, **arguments)
        return Pending(lambda: answer)

    def close(self) -> None: ...

    def answer(self, method: str, **arguments: Any) -> Any:
        if method == "warm_up":
            return WarmUp([self.step_s] * 20, 1e-6, 0, ["0"])
        if method == "period":
            return 4
        if method == "dismiss":
            return None
        if method == "relocate":
            return False
        if method == "counters":
            late = self.compiles_after is not None and len(self.calls) > self.compiles_after
            return {"stats/unique_graphs": 3.0 if late else 2.0}
        self.busy = True
        self.calls.append(arguments)
        timing = Timing(arguments["steps"], self.step_s, self.step_s / 2, cold=arguments["cold"])
        self.busy = False
        return timing


def measured(settings: MeasurementSettings | None = None, pairs: int = 30, **arms: Scripted) -> Sample:
    return taken(arms, settings or MeasurementSettings(), Random(0), pairs)


def taken(*arguments: Any, into: Sample | None = None, **options: Any) -> Sample:
    """What `sample` fills."""
    found = Sample() if into is None else into
    sample(*arguments, into=found, **options)
    return found
