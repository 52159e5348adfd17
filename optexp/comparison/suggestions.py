"""What to try next: of all that goes against a bottleneck, what this very program takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle
import yaml

from optexp.config import search_path
from optexp.errors import Unsupported
from optexp.profiling.breakdown import Breakdown
from optexp.profiling.diagnosis import diagnose, narrowed, parse
from optexp.records.profile import Bottleneck, Calibration
from optexp.schema import build, plain
from optexp.strategy import Strategy, compose
from optexp.trace import Trace
from optexp.workers.arm import Arm
from optexp.workers.client import Client


def advise(
    arm: Client[Arm],
    trace: Trace,
    breakdown: Breakdown,
    stack: Sequence[Strategy],
    calibration: Calibration | None = None,
) -> list[Bottleneck]:
    """What holds the profiled arm back, largest share first, and against it only what its stack and its program take.

    The arm asks strategies that it does not run, which may import what they need: nothing is timed in it afterwards.
    """
    bottlenecks = diagnose(trace, breakdown, calibration)
    named = built(text for bottleneck in bottlenecks for text in bottleneck.try_)
    fitting = {text: strategy for text, strategy in named.items() if goes_with(strategy, stack)}
    taken = arm.call(Arm.takes, packed=cloudpickle.dumps([*fitting.values()])) if fitting else []
    return narrowed(bottlenecks, {text for text, takes in zip(fitting, taken, strict=True) if takes})


def built(texts: Iterable[str]) -> Mapping[str, Strategy]:
    """The strategies that pieces of advice name, where they are installed, with the options that are typed there."""
    known = search_path.options("strategy")
    named = {text: (name, options) for text in texts for name, options in [parse(text)] if name in known}
    if not named:
        return {}
    names = dict.fromkeys(name for name, _ in named.values())
    nodes = plain(search_path.compose([f"strategy=[{','.join(names)}]"]).strategy)
    plainly = {name: build(nodes[name], f"strategy.{name}") for name in names}
    return {text: replace(plainly[name], **dict(map(setting, options))) for text, (name, options) in named.items()}


def setting(option: str) -> tuple[str, Any]:
    """`strategy.streams.mode=chunks` → mode, chunks; values are YAML, as on the command line."""
    key, _, value = option.partition("=")
    return key.rpartition(".")[2], yaml.safe_load(value)


def goes_with(strategy: Strategy, stack: Sequence[Strategy]) -> bool:
    try:
        compose([*stack, strategy])
    except Unsupported:
        return False
    return True
