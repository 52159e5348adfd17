"""From a composed configuration to checked, typed objects; a mistake ends in one sentence that says what is allowed.

A node's `_target_` names a dataclass, and that dataclass is the schema: there is no second list of names or types.
"""

from __future__ import annotations

import difflib
import importlib
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from optexp.strategy import Composed, Strategy, label, named

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from optexp.measurement.protocol import Protocol
    from optexp.workload import Workload

T = TypeVar("T")
LISTED = 40  # names in a message: more of them would bury it


class ConfigError(Exception):
    """The user asked for something that does not exist; the message names the key, the value and what is allowed."""


def one_of(default: Any, *others: Any) -> Any:
    """A dataclass field that takes one of these values; the first is the default."""
    return field(default=default, metadata={"choices": (default, *others)})


@dataclass
class Tracking:
    """Where runs are recorded."""

    enabled: bool = True
    uri: str | None = None
    experiment: str = "optexp"


@dataclass
class Environment:
    """What is accepted of the machine.

    allow_foreign:  other programs may use the GPU meanwhile; the result says so
    """

    allow_foreign: bool = False


@dataclass
class Settings:
    """The top-level keys that are neither a workload, a stack nor a measurement."""

    mode: str = one_of("compare", "profile")
    device: str = one_of("auto", "cuda", "cpu")
    dtype: str = one_of("float32", "float64", "bfloat16", "float16")
    seed: int = 0
    replay: str | None = None
    isolation: str = one_of("process", "none")
    verify: str = one_of("first", "only")
    horizon_steps: int | None = None
    timeout_s: float = 600.0
    environment: Environment = field(default_factory=Environment)
    tracking: Tracking = field(default_factory=Tracking)


@dataclass(kw_only=True)
class Experiment(Settings):
    """Everything that one job needs, built and checked.

    notes:     what was ignored, in words for the user
    resolved:  the same, flat and plain, for the record (`workload.dim`, `strategy.amp.dtype`, ...)
    """

    workload: Workload
    strategies: list[Strategy]
    baseline: list[Strategy]
    measurement: Protocol
    notes: list[str]
    resolved: dict[str, Any]


def resolve(config: DictConfig, workload: Workload | None = None) -> Experiment:
    """The experiment that a composed configuration describes; `ConfigError` where it describes none.

    workload:  an object instead of the configuration's
    """
    values = plain(config)
    values.pop("study", None)  # is about the sweep that this job is one of
    groups = {group: values.pop(group) for group in ("workload", "measurement", "strategy", "baseline")}
    checked = typed(Settings, values)
    measurement = build(groups["measurement"], "measurement")
    chosen, notes = _stack(groups["strategy"])
    strategies = _build_all(chosen, "strategy")
    baseline = _build_all(_baseline(groups["baseline"]), "baseline")
    from optexp.workload import Workload  # which imports this

    workload = workload or build(groups["workload"], "workload")
    if not isinstance(workload, Workload):
        kind = f"{type(workload).__module__}.{type(workload).__qualname__}"
        raise ConfigError(f"workload: {kind} is no workload: derive it from optexp.workload.Workload")

    resolved = {
        "workload": workload.name,
        **_flat("workload", workload),
        "strategy": label(strategies),
        **{key: value for s in strategies for key, value in _flat(f"strategy.{s.name}", s).items()},
        "baseline": label(baseline),
        **{key: value for s in baseline for key, value in _flat(f"baseline.{s.name}", s).items()},
        "measurement": measurement.preset,
        **_flat("measurement", measurement),
        # Where a run is recorded does not change what was measured, and an address may hold a password.
        **{f.name: getattr(checked, f.name) for f in fields(checked) if f.name not in ("tracking", "environment")},
        **_flat("environment", checked.environment),
    }
    return Experiment(
        **{f.name: getattr(checked, f.name) for f in fields(checked)},
        workload=workload,
        strategies=strategies,
        baseline=baseline,
        measurement=measurement,
        notes=notes,
        resolved=resolved,
    )


# --- stacks ----------------------------------------------------------------------------------------------------


def _stack(nodes: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The nodes of the chosen strategies by name, and notes on options that do not apply.

    The command line may set an option of a strategy that this job does not have: in a sweep over stacks that is
    meant, and noted; in a single run it is a mistake.
    """
    from optexp import discovery

    chosen = {name: node for name, node in nodes.items() if node and "_target_" in node}
    rest = {name: options for name, options in nodes.items() if options and name not in chosen}
    unused = [(name, note) for name, options in rest.items() for note in _unused(name, options)]
    if unused and not discovery.in_sweep():
        name, note = unused[0]
        raise ConfigError(f"{note}: write strategy=[{','.join([*chosen, name])}], or leave the option out")
    return chosen, [f"{note}: ignored" for _, note in unused]


def _unused(name: str, options: dict[str, Any]) -> list[str]:
    """Options of a strategy that is not in the stack: checked all the same, a misspelling is a mistake in any job."""
    node = _strategy_nodes([name], "strategy")[name]
    given = [f"strategy.{name}.{key}={_show(value)}" for key, value in options.items()]
    if not node:
        raise ConfigError(f"{given[0]}: {name} is the empty stack, which has no options")
    build({**node, **options}, f"strategy.{name}")
    return [f"{option} does not apply, because {name} is not in the stack" for option in given]


def _baseline(value: Any) -> dict[str, Any]:
    """`[amp, fusion]`, `[{fusion: {mode: default}}]` or `amp+fusion`: the nodes of the stack compared against."""
    items = value.split("+") if isinstance(value, str) else value or []
    options: dict[str, Any] = {}
    for item in items if isinstance(items, list) else [items]:
        if isinstance(item, str):
            options[item] = {}
        elif isinstance(item, dict) and all(isinstance(value, dict) for value in item.values()):
            options |= item
        else:
            raise ConfigError(
                f"baseline={item!r} is not a stack: write names, [amp,fusion], or [{{amp:{{dtype:...}}}}]"
            )
    nodes = _strategy_nodes(list(options), "baseline")
    return {name: {**node, **options[name]} for name, node in nodes.items() if node}


def _strategy_nodes(names: list[str], key: str) -> dict[str, Any]:
    """conf/strategy/<name>.yaml of each, wherever on the search path it is; the empty stack's is empty."""
    from optexp import discovery

    known = discovery.options("strategy")
    for name in names:
        if name not in known:
            raise ConfigError(f"{key}={name} is not a choice{suggest(name, known)}")
    if not names:
        return {}
    composed = plain(discovery.compose([f"strategy=[{','.join(names)}]"]).strategy)
    return {name: composed.get(name) or {} for name in names}


def _build_all(nodes: Mapping[str, Any], key: str) -> Composed:
    strategies = [_strategy(node, key, name) for name, node in nodes.items()]
    return Composed(sorted(strategies, key=lambda s: (s.stage, s.name)))


def _strategy(node: Any, key: str, name: str) -> Strategy:
    built = build(node, f"{key}.{name}")
    if not isinstance(built, Strategy):
        kind = f"{type(built).__module__}.{type(built).__qualname__}"
        raise ConfigError(f"{key}.{name}: {kind} is no strategy: derive it from optexp.strategy.Strategy")
    return named(built, name)


# --- one node --------------------------------------------------------------------------------------------------


def build(node: Any, key: str) -> Any:
    """The object that a node describes: `_target_` names a dataclass, the other keys are its fields."""
    values = dict(plain(node) if OmegaConf.is_config(node) else node or {})
    target = values.pop("_target_", None)
    if not isinstance(target, str):
        raise ConfigError(
            f"{key} has no _target_: name the dataclass to build, as in _target_: my_package.module.MyClass"
        )
    return typed(_dataclass(target, key), values, key)


def typed(cls: Callable[..., T], values: Mapping[str, Any], key: str = "") -> T:
    """`cls(**values)` with every name, type and choice checked against the dataclass `cls`."""
    schema = OmegaConf.structured(cls)
    known = {f.name: f for f in fields(cls) if f.init}  # type: ignore[arg-type]
    hints = get_type_hints(cls)
    checked: dict[str, Any] = {}
    for name, value in values.items():
        full = f"{key}.{name}" if key else name
        if name not in known:
            raise ConfigError(f"{full}={_show(value)}: there is no such key{suggest(name, known)}")
        if is_dataclass(hints[name]) and isinstance(value, Mapping):
            checked[name] = typed(hints[name], value, full)  # type: ignore[arg-type]
            continue
        choices = known[name].metadata.get("choices")
        try:
            schema[name] = value
        except OmegaConfBaseException:
            expected = f"one of {_join(choices)}" if choices else _words(hints[name])
            raise ConfigError(f"{full}={_show(value)} is not allowed: it must be {expected}") from None
        if choices and schema[name] not in choices:
            raise ConfigError(f"{full}={_show(value)} is not allowed{suggest(value, choices)}")
    for name in known.keys() - checked.keys():
        try:
            checked[name] = OmegaConf.to_object(schema[name]) if OmegaConf.is_config(schema[name]) else schema[name]
        except MissingMandatoryValue:
            raise ConfigError(f"{key}.{name} has no value: it must be {_words(hints[name])}") from None
    try:
        return cls(**checked)
    except ValueError as error:  # a dataclass may check more, in __post_init__
        raise ConfigError(f"{key}: {error}") from error


def plain(node: Any) -> Any:
    """A configuration as plain Python values, interpolations resolved."""
    try:
        return OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None


def _dataclass(target: str, key: str) -> Any:
    module, _, name = target.rpartition(".")
    if not module:
        raise ConfigError(f"{key}: _target_={target} names no module: write my_package.module.{target}")
    try:
        cls = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the user's module exists, something that it imports does not: their traceback says more
        raise ConfigError(f"{key}: _target_={target} was not found: there is no module {error.name!r}") from None
    if cls is None:
        raise ConfigError(f"{key}: _target_={target} was not found: module {module!r} has no {name!r}")
    if not (isinstance(cls, type) and is_dataclass(cls)):
        raise ConfigError(f"{key}: _target_={target} is not a dataclass: decorate the class with @dataclass")
    return cls


# --- words -----------------------------------------------------------------------------------------------------


def suggest(given: Any, allowed: Iterable[Any]) -> str:
    """The end of a sentence about a name that does not exist: the nearest one that does, and all of them if few."""
    names = [_show(name) for name in allowed]
    near = difflib.get_close_matches(str(given), names, n=1)
    question = [f"did you mean {near[0]}?"] if near else []
    choices = f"allowed: {', '.join(names)}" if len(names) <= LISTED else f"there are {len(names)}"
    return f" ({' '.join([*question, choices])})"


def _join(values: Iterable[Any]) -> str:
    return ", ".join(_show(value) for value in values)


def _show(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return str(value)


WORDS = {str: "text", int: "an integer", float: "a number", bool: "true or false", type(None): "null"}


def _words(hint: Any) -> str:
    """A type as people say it."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_words(member) for member in get_args(hint))
    if get_origin(hint) in (list, tuple):
        return f"a list of {_words(get_args(hint)[0])}"
    return WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def _flat(prefix: str, instance: Any) -> dict[str, Any]:
    return {f"{prefix}.{f.name}": getattr(instance, f.name) for f in fields(instance)}
