"""Remedies against the bottlenecks of a profile: of all strategies that declare one, those that this program takes."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import cloudpickle

from optexp.config import search_path
from optexp.config.auto_settings import AutoSettings
from optexp.errors import ConfigError, Unsupported
from optexp.profiling.diagnosis import diagnose
from optexp.profiling.view import View
from optexp.records.profile import Bottleneck, Calibration
from optexp.schema import build, plain, suggest
from optexp.strategy import Remedy, Strategy, compose, named
from optexp.trace import Trace
from optexp.workers.arm import Arm
from optexp.workers.client import Client

_STRATEGY = "strategy="


def advise(
    arm: Client[Arm], view: View, stack: Sequence[Strategy], calibration: Calibration | None = None
) -> list[Bottleneck]:
    """The profiled arm's bottlenecks, with remedies that its stack and its program take.

    The arm asks strategies that it does not run, which may import modules: nothing is timed in it afterwards.
    """
    bottlenecks = diagnose(view)
    if not bottlenecks:
        return []
    bottlenecks, proposed = answered(bottlenecks, installed(), view.trace, calibration)
    fitting = {text: strategy for text, strategy in proposed.items() if goes_with(strategy, stack)}
    refused = arm.call(Arm.refusals, packed=cloudpickle.dumps([*fitting.values()])) if fitting else []
    return narrowed(bottlenecks, {text for text, reason in zip(fitting, refused, strict=True) if not reason})


def installed() -> Sequence[Strategy]:
    """Every strategy on the search path, with the options of its YAML; composed once, so they must not be changed.

    One that cannot be built is no advice: a user's first draft must not end comparisons of others. Who asks for it is
    told why.
    """
    conf = Path.cwd() / "conf"
    return _built(conf if conf.is_dir() else None, *search_path.options("strategy"))


def require_installed(settings: AutoSettings) -> None:
    """Raises ConfigError where a search names a strategy that does not exist."""
    known = [strategy.name for strategy in installed()]
    for key in ("among", "without"):
        for name in getattr(settings, key) or ():
            if name not in known:
                raise ConfigError(f"auto.{key}: {name} is no strategy{suggest(name, known)}")


@lru_cache(maxsize=1)
def _built(conf: Path | None, *names: str) -> Sequence[Strategy]:
    """conf: the working folder's, where it has one, which is on the search path"""
    names = tuple(name for name in names if _readable(name))
    nodes = plain(search_path.compose([f"strategy=[{','.join(names)}]"]).strategy)
    single = [name for name, node in nodes.items() if "_target_" in (node or {})]
    if len(single) < len(names):  # YAMLs of whole stacks, which set options of their members
        nodes = plain(search_path.compose([f"strategy=[{','.join(single)}]"]).strategy)
    found = []
    for name in single:
        with suppress(Exception):  # of any kind: its module is the user's
            found.append(named(build(nodes[name], f"strategy.{name}"), name))
    return found


def _readable(name: str) -> bool:
    """Whether a strategy's YAML can be read, and its keys stay below its name."""
    try:
        return search_path.has_package(f"strategy/{name}")
    except Exception:  # of the YAML's parser
        return False


def answered(
    bottlenecks: Iterable[Bottleneck],
    strategies: Collection[Strategy],
    trace: Trace,
    calibration: Calibration | None = None,
) -> tuple[list[Bottleneck], Mapping[str, Strategy]]:
    """The bottlenecks with every strategy that answers one of their causes; and these strategies by their text."""
    helping = [strategy for strategy in strategies if strategy.helps(trace, calibration)]
    remedies = [(remedy, strategy) for strategy in helping for remedy in strategy.remedies]
    remedies.sort(key=lambda pair: (pair[0].rank, pair[1].name))
    proposed: dict[str, Strategy] = {}
    found = []
    for bottleneck in bottlenecks:
        texts: dict[str, None] = {}
        for cause in bottleneck.causes:
            for remedy, strategy in remedies:
                if remedy.against == cause:
                    text = typed(strategy, remedy)
                    texts[text] = None
                    proposed[text] = replace(strategy, **remedy.options)
        found.append(replace(bottleneck, try_=(*texts, *bottleneck.try_)))
    return found, proposed


def typed(strategy: Strategy, remedy: Remedy) -> str:
    """The remedy as on the command line: `strategy=streams strategy.streams.mode=chunks`."""
    name = strategy.name
    options = (f"{_STRATEGY[:-1]}.{name}.{key}={value}" for key, value in remedy.options.items())
    return " ".join([f"{_STRATEGY}{name}", *options])


def goes_with(strategy: Strategy, stack: Sequence[Strategy]) -> bool:
    """Whether the stack can hold this strategy too."""
    try:
        compose([*stack, strategy])
    except Unsupported:
        return False
    return True


def narrowed(bottlenecks: Iterable[Bottleneck], possible: Container[str]) -> list[Bottleneck]:
    """The same bottlenecks, with plain words and those strategies that are possible."""
    return [replace(b, try_=tuple(t for t in b.try_ if parse(t)[0] is None or t in possible)) for b in bottlenecks]


def suggestion(
    bottlenecks: Iterable[Bottleneck],
    stack: Sequence[str],
    without: Container[str] = (),
    settings: Mapping[str, str] = MappingProxyType({}),
) -> str | None:
    """The best remedy of the largest bottleneck in one sentence; None when nothing follows.

    A strategy that is not in the stack yet comes first, then a setting of the workload, then plain words. Where the
    largest has no remedy, the sentence says so and goes on with the next one.

    without:  strategies that made things worse
    settings: of the workload, by the cause or the label that they answer (`Workload.remedies`)
    """
    without_answer = ""
    for bottleneck in bottlenecks:
        named = [(text, *parse(text)) for text in bottleneck.try_]
        for _, name, options in named:
            if name is not None and name not in stack and name not in without:
                choice = f"[{','.join((*stack, name))}]" if stack else name
                return without_answer + " ".join([f"{_STRATEGY}{choice}", *options]) + f": {bottleneck.why}"
        own = [settings[cause] for cause in (bottleneck.label, *bottleneck.causes) if cause in settings]
        for text in (*own, *(text for text, name, _ in named if name is None)):
            return f"{without_answer}{text}: {bottleneck.why}"
        without_answer = without_answer or f"nothing here shortens the largest part ({bottleneck.why}); then "
    return None


def parse(text: str) -> tuple[str | None, list[str]]:
    """The strategy that a piece of advice names (None for plain words), and its options as they are typed."""
    if not text.startswith(_STRATEGY):
        return None, []
    name, *options = text.removeprefix(_STRATEGY).split()
    return name, options
