"""From a composed configuration to a checked, typed experiment; a mistake ends in one sentence with the choices."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optexp.config.auto_settings import AutoSettings
from optexp.config.regression_settings import RegressionSettings
from optexp.config.sweep_settings import SweepSettings
from optexp.errors import ConfigError
from optexp.profiling.settings import ProfileSettings
from optexp.schema import build, choice, plain, shown, suggest, typed
from optexp.strategy import Composed, Stage, Strategy, label, named

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from optexp.measurement.settings import MeasurementSettings
    from optexp.workload import Workload


@dataclass
class Tracking:
    """Where runs are recorded."""

    enabled: bool = True
    uri: str | None = None
    experiment: str = "optexp"


FOLDER = Path(__file__).parents[1] / "comparison" / "modes"  # a mode is a file there
MODES = sorted((file.stem for file in FOLDER.glob("[!_]*.py")), key=lambda name: (name != "compare", name))


@dataclass
class Environment:
    """Conditions of the machine that are accepted.

    allow_foreign:  other programs may use the GPU meanwhile; the result says so
    """

    allow_foreign: bool = False


@dataclass
class Settings:
    """The top-level keys that are neither a workload, a stack nor a measurement."""

    mode: str = choice(*MODES)
    device: str = choice("auto", "cuda", "cpu")
    dtype: str = choice("float32", "float64", "bfloat16", "float16")
    seed: int = 0
    replay: str | None = None
    isolation: str = choice("process", "none")
    verify: str = choice("first", "only")
    patch: str = choice("faster", "verified")
    horizon_steps: int | None = None
    timeout_s: float = 600.0
    environment: Environment = field(default_factory=Environment)
    profile: ProfileSettings = field(default_factory=ProfileSettings)
    auto: AutoSettings = field(default_factory=AutoSettings)
    tracking: Tracking = field(default_factory=Tracking)
    regression: RegressionSettings = field(default_factory=RegressionSettings)


STEP_MODES = ("forward", "forward_backward", "train")  # `Workload.mode`
MEASURING = ("ablate", "auto")  # modes whose every comparison is timed
NODES = ("tracking", "environment", "profile", "auto", "regression")  # keys of `Settings` that have keys of their own


@dataclass(kw_only=True)
class Experiment(Settings):
    """Everything that one job needs, built and checked.

    notes:     what was ignored, in words for the user
    resolved:  the same, flat and plain, for the record (`workload.dim`, `strategy.amp.dtype`, ...)
    compared:  keys of the workload that were typed, or differ from the class's default
    """

    workload: Workload
    strategies: list[Strategy]
    baseline: list[Strategy]
    measurement: MeasurementSettings
    notes: list[str]
    resolved: dict[str, Any]
    compared: list[str] = field(default_factory=list)


def resolve(config: DictConfig, workload: Workload | None = None) -> Experiment:
    """The experiment that a composed configuration describes.

    Args:
        config: As Hydra composes it.
        workload: An object instead of the configuration's.

    Raises:
        ConfigError: a key, type or choice is not allowed, or an object is no workload or strategy.
    """
    checked, groups, left_out = read_settings(config)
    measurement = build(groups["measurement"], "measurement")
    _refuse_without_a_time(checked, measurement.trials > 0)
    chosen, notes = _stack(groups["strategy"])
    notes = [*left_out, *notes]
    strategies = _build_all(chosen, "strategy")
    baseline = _build_all(_baseline(groups["baseline"]), "baseline")
    from optexp.workload import Workload  # which imports this

    workload = workload or build(groups["workload"], "workload")
    if not isinstance(workload, Workload):
        kind = f"{type(workload).__module__}.{type(workload).__qualname__}"
        raise ConfigError(f"workload: {kind} is no workload: derive it from optexp.workload.Workload")

    experiment = Experiment(
        **{f.name: getattr(checked, f.name) for f in fields(checked)},
        workload=workload,
        strategies=strategies,
        baseline=baseline,
        measurement=measurement,
        notes=notes,
        resolved={},
        compared=compared(workload),
    )
    return replace(experiment, resolved=_resolved(experiment))


def read_settings(config: DictConfig) -> tuple[Settings, dict[str, Any], list[str]]:
    """Check all keys that need no import of torch.

    Returns:
        The top-level keys, the nodes of the groups by name, and notes of the sweep on keys that it left out.

    Raises:
        ConfigError: a key, type or choice is not allowed.
    """
    values = plain(config)
    values.pop("study", None)  # is about the sweep that this job is one of
    sweep = typed(SweepSettings, values.pop("sweep", None) or {}, "sweep")
    _refuse_in_single_runs(sweep)
    groups = {group: values.pop(group) for group in ("workload", "measurement", "strategy", "baseline")}
    _require_first_line(groups["strategy"] or {})
    if values.get("mode") not in MODES:
        values["mode"] = _mode(values.get("mode"))
    checked = typed(Settings, values)
    _refuse_in_comparisons(checked)
    if checked.profile.details is None:
        checked.profile.details = checked.verify != "only"
    return checked, groups, sweep.left_out


def _mode(given: Any) -> Any:
    """Raises ConfigError where a mode of the workload was meant."""
    if near := difflib.get_close_matches(str(given), STEP_MODES, n=1):
        raise ConfigError(
            f"mode={given} is not allowed: a step's mode is workload.mode={near[0]}{suggest(given, MODES)}"
        )
    return given


def comparing(
    experiment: Experiment,
    strategies: Sequence[Strategy],
    baseline: Sequence[Strategy],
    measurement: MeasurementSettings | None = None,
    mode: str = "compare",
) -> Experiment:
    """The same experiment with other stacks.

    Args:
        strategies: The candidate's.
        measurement: Instead of the experiment's own.
        mode: Of the new one.
    """
    changed = replace(
        experiment,
        mode=mode,
        strategies=Composed(strategies),
        baseline=Composed(baseline),
        measurement=measurement or experiment.measurement,
        notes=[],
    )
    return replace(changed, resolved=_resolved(changed))


def _resolved(e: Experiment) -> dict[str, Any]:
    """Everything that was decided, flat, for the record."""
    keys = [f.name for f in fields(Settings) if f.name not in NODES]
    return {
        "workload": e.workload.name,
        **_flat("workload", e.workload),
        "strategy": label(e.strategies),
        **{key: value for s in e.strategies for key, value in _flat(f"strategy.{s.name}", s).items()},
        "baseline": label(e.baseline),
        **{key: value for s in e.baseline for key, value in _flat(f"baseline.{s.name}", s).items()},
        "measurement": e.measurement.preset,
        **_flat("measurement", e.measurement),
        # Where a run is recorded does not change what was measured, and an address may hold a password.
        **{key: getattr(e, key) for key in keys},
        **_flat("environment", e.environment),
        **_flat("profile", e.profile),
        **(_flat("auto", e.auto) if e.mode == "auto" else {}),
    }


def compared(workload: Workload) -> list[str]:
    """Keys of a workload that tell it from others: typed, or other than the class's default."""
    from optexp.config import search_path

    typed = search_path.typed()
    keys = {f"workload.{f.name}": f for f in fields(workload)}
    return [key for key, f in keys.items() if key in typed or getattr(workload, f.name) != _default(f)]


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _refuse_in_comparisons(settings: Settings) -> None:
    """Raises ConfigError for keys that are about another mode."""
    for key in () if settings.mode == "profile" else ("region", "tool"):
        if (value := getattr(settings.profile, key)) is not None:
            raise ConfigError(f"profile.{key}={value} is for one program: add mode=profile")
    from optexp.config import search_path

    ignored = settings.mode == "auto" or search_path.in_sweep()  # other jobs of a sweep may search
    for key, default in () if ignored else _flat("auto", AutoSettings()).items():
        if (value := getattr(settings.auto, key.partition(".")[2])) != default:
            raise ConfigError(f"{key}={shown(value)} is for a search: add mode=auto")
    if settings.mode in MEASURING and settings.verify == "only":
        raise ConfigError(f"mode={settings.mode} compares times: leave verify=only out")


def _refuse_without_a_time(settings: Settings, textbook: bool) -> None:
    """Raises ConfigError where a record is to be compared with, and nothing is that could be compared."""
    against = settings.regression.against
    if against and (settings.mode != "compare" or settings.verify == "only" or textbook):
        raise ConfigError(f"regression.against={against} is for a comparison that is timed: mode=compare, verify=first")


def _refuse_in_single_runs(settings: SweepSettings) -> None:
    """Raises ConfigError for keys that are about a sweep."""
    from optexp.config import search_path

    for key in ("plan", "resume"):
        if getattr(settings, key) and not search_path.in_sweep():
            raise ConfigError(f"sweep.{key}=true is for a sweep: add -m")


# --- stacks ----------------------------------------------------------------------------------------------------


def _stack(nodes: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The nodes of the chosen strategies by name, and notes on options that do not apply.

    The command line may set an option of a strategy that this job does not have: in a sweep over stacks that is
    meant, and noted; in a single run it is a mistake.
    """
    from optexp.config import search_path

    chosen = {name: node for name, node in nodes.items() if node and "_target_" in node}
    rest = {name: options for name, options in nodes.items() if options and name not in chosen}
    unused = [(name, note) for name, options in rest.items() for note in _unused(name, options)]
    if unused and not search_path.in_sweep():
        name, note = unused[0]
        raise ConfigError(f"{note}: write strategy=[{','.join([*chosen, name])}], or leave the option out")
    return chosen, [f"{note}: ignored" for _, note in unused]


def _require_first_line(nodes: Mapping[str, Any]) -> None:
    """Raises ConfigError where a strategy's keys are not below its name, for want of its YAML's first line."""
    from optexp.config import search_path

    if "_target_" not in nodes:
        return
    for name in search_path.options("strategy"):
        if not search_path.has_package(f"strategy/{name}"):
            raise ConfigError(f"strategy={name}: the first line of its YAML must be `# @package strategy.{name}`")


def _unused(name: str, options: dict[str, Any]) -> list[str]:
    """Options of a strategy that is not in the stack: checked all the same, a misspelling is a mistake in any job."""
    node = _strategy_nodes([name], "strategy").get(name)
    given = [f"strategy.{name}.{key}={shown(value)}" for key, value in options.items()]
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
    return {name: {**node, **options.get(name, {})} for name, node in nodes.items() if node}


def _strategy_nodes(names: list[str], key: str) -> dict[str, Any]:
    """conf/strategy/<name>.yaml of each, wherever on the search path it is; the empty stack's is empty.

    A YAML of a whole stack brings a node for each of its members.
    """
    if not names:
        return {}
    from optexp.config import search_path

    known = search_path.options("strategy")
    for name in names:
        if name not in known:
            raise ConfigError(f"{key}={name} is not a choice{suggest(name, known)}")
    composed = plain(search_path.compose([f"strategy=[{','.join(names)}]"]).strategy)
    _require_first_line(composed)
    found: dict[str, Any] = {}
    for name in names:
        if composed.get(name):
            found[name] = composed[name]
        else:
            found |= plain(search_path.compose([f"strategy=[{name}]"]).strategy) or {name: {}}
    return found


def _build_all(nodes: Mapping[str, Any], key: str) -> Composed:
    strategies = [_strategy(node, key, name) for name, node in nodes.items()]
    return Composed(sorted(strategies, key=lambda s: (s.stage, s.name)))


def _strategy(node: Any, key: str, name: str) -> Strategy:
    built = build(node, f"{key}.{name}")
    if not isinstance(built, Strategy):
        kind = f"{type(built).__module__}.{type(built).__qualname__}"
        raise ConfigError(f"{key}.{name}: {kind} is no strategy: derive it from optexp.strategy.Strategy")
    if not isinstance(getattr(built, "stage", None), Stage):
        raise ConfigError(f"{key}.{name}: {type(built).__name__} has no stage: add one, as in stage = Stage.REWRITE")
    return named(built, name)


def _flat(prefix: str, instance: Any) -> dict[str, Any]:
    return {f"{prefix}.{f.name}": getattr(instance, f.name) for f in fields(instance)}
