"""Both rates, at the end of the run: cheats that were caught, and alarms on honest controls."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import optexp.workers.arm_timing
from optexp.measurement import clock
from optexp.profiling.calibration import calibrate
from optexp.result import Result, Verdict
from tests.reached import measured

CAUGHT = {Verdict.NOT_EQUIVALENT, Verdict.INVALID, Verdict.NOT_ENGAGED}
RATES = pytest.StashKey[dict[str, list[bool]]]()


once = cache(calibrate)


@pytest.fixture(autouse=True)
def _ceilings_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's are not kept, and no cheat depends on them."""
    monkeypatch.setattr("optexp.workers.peer.calibrate", once)


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Iterator[list[tuple[str, Result]]]:
    """What a test found, as ("cheat" or "honest", result)."""
    found: list[tuple[str, Result]] = []
    yield found
    rates = request.config.stash.setdefault(RATES, {"cheat": [], "honest": []})
    for kind, result in found:
        rates[kind].append(result.verdict in CAUGHT if kind == "cheat" else not measured(result))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rates = terminalreporter.config.stash.get(RATES, None)
    if rates:
        cheats, honest = rates["cheat"], rates["honest"]
        terminalreporter.write_line(
            f"cheats caught: {sum(cheats)} of {len(cheats)}; alarms on honest controls: {sum(honest)} of {len(honest)}"
        )


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Cheats that patch what this process shares are undone."""
    places: list[tuple[Any, str]] = [
        (time, "perf_counter"),
        (torch.cuda, "synchronize"),
        (torch.cuda.Event, "elapsed_time"),
        (torch.Tensor, "detach"),
        (clock, "now"),
        (optexp.workers.arm_timing, "replace"),
    ]
    kept = [getattr(owner, name) for owner, name in places]
    yield
    for (owner, name), value in zip(places, kept, strict=True):
        setattr(owner, name, value)
    torch.use_deterministic_algorithms(False)
    gc.enable()
    torch.nn.modules.module._global_forward_pre_hooks.clear()
    for mode in reversed(_get_current_dispatch_mode_stack()):
        mode.__exit__(None, None, None)
