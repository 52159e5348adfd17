"""A study: a sweep with a question, and the points with which its jobs answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from optexp.errors import ConfigError
from optexp.result import Result, Verdict
from optexp.schema import choice, plain, typed
from optexp.sweeps.figures import FIGURES, Point

STEP = "study.step"  # the key that tells a job which step it belongs to
LISTS = ("x", "y", "by", "show", "tell")  # a single name does as well


@dataclass
class Study:
    """The key `study` of a configuration.

    Names are figures (`figures.FIGURES`), settings as they are typed (`workload.size`), or metrics of an arm's profile
    (`memcpy`).

    question:  one sentence, which the sweep answers
    x:         names of the quantities that vary, each with a panel of its own, in which the others keep their first
               value. A figure that no job has (`kernels` on a CPU) is replaced by the settings in which the jobs differ
    y:         names of the figures that answer, each with a row of panels
    by:        names by whose values a panel has several lines; `arm` draws the baseline beside the candidate
    show:      names of further columns of the table
    tell:      names of columns that are repeated as sentences below the plot
    log:       the logarithmic axes
    steps:     overrides of sweeps that run one after the other, by the step's name
    step:      the name of a job's step; set by the sweeper
    """

    question: str
    x: list[str]
    y: list[str]
    by: list[str] = field(default_factory=list)
    show: list[str] = field(default_factory=list)
    tell: list[str] = field(default_factory=list)
    log: str = choice("", "x", "y", "xy")
    steps: dict[str, str] = field(default_factory=dict)
    step: str | None = None

    @classmethod
    def of(cls, config: DictConfig) -> Study | None:
        """The study of a sweep; None for a plain sweep.

        Raises:
            ConfigError: the key holds something else.
        """
        node = OmegaConf.select(config, "study")
        if node is None:
            return None
        if not isinstance(node, DictConfig):
            raise ConfigError(f"study={node} is not a study: experiments= names one")
        values = plain(node)
        lists = {key: [values[key]] for key in LISTS if isinstance(values.get(key), str)}
        return typed(cls, values | lists, "study")

    @property
    def columns(self) -> list[str]:
        """Of the table, without the verdict."""
        return list(dict.fromkeys([*self.x, *self.by, *self.y, *self.show, *self.tell]))


def points(study: Study, jobs: Iterable[tuple[Result, str]]) -> list[Point]:
    """One point for each job (a result and its step); with `by: arm` also one for each baseline.

    Jobs that differ only in their strategy have one baseline: that of the first job.
    """
    found: list[Point] = []
    baselines = set()
    for result, step in jobs:
        baseline = Point(result, "baseline", step)
        if result.verdict is Verdict.PROFILED:
            found.append(baseline)
            continue
        where = tuple(str(baseline.value(key)) for key in study.x)
        if "arm" in study.by and result.strategy and baseline.summary.step_us and where not in baselines:
            baselines.add(where)
            found.append(baseline)
        found.append(Point(result, "candidate", step))
    noise = between_jobs(found)
    return [replace(point, first=found[0], noise=noise) for point in found]


def completed(study: Study, jobs: Sequence[tuple[Result, str]]) -> Study:
    """The study with `x` extended by the settings that its names leave out and in which its jobs differ."""
    arms = ["baseline" if result.verdict is Verdict.PROFILED else "candidate" for result, _ in jobs]
    each = [Point(result, arm, step) for (result, step), arm in zip(jobs, arms, strict=True)]
    study = replace(study, x=[x for x in study.x if x not in FIGURES or any(p.value(x) is not None for p in each)])
    alike: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for result, step in jobs:
        point = Point(result, "candidate", step)
        named = (step, result.workload, result.label, *(str(point.value(name)) for name in (*study.x, *study.by)))
        alike.setdefault(named, []).append(result.config)
    groups, more = list(alike.values()), []
    for key in dict.fromkeys(key for group in groups for config in group for key in config):
        parts = [_parted(group, key) for group in groups]
        if any(len(part) > 1 for part in parts):
            more.append(key)
            groups = [group for part in parts for group in part]
    return replace(study, x=[*study.x, *more] or ["workload"])


def _parted(configs: Iterable[Mapping[str, Any]], key: str) -> list[list[Mapping[str, Any]]]:
    """The configurations grouped by the value of a key."""
    parts: dict[str, list[Mapping[str, Any]]] = {}
    for config in configs:
        parts.setdefault(str(config.get(key)), []).append(config)
    return list(parts.values())


def between_jobs(found: Sequence[Point]) -> float | None:
    """Noise between jobs: the largest ratio (at least 1) of two step times of one program.

    A program runs twice where jobs share a baseline, and where a baseline is compared with itself. None: no program
    ran twice.
    """
    groups: dict[str, list[float]] = {}
    for result in {id(point.result): point.result for point in found}.values():
        if result.baseline.step_us is None or result.verdict is Verdict.PROFILED:
            continue
        settings = {k: v for k, v in result.config.items() if k == "dtype" or k.startswith(("workload.", "baseline"))}
        group = groups.setdefault(f"{result.workload} {settings}", [])
        group.append(result.baseline.step_us)
        if not result.strategy and result.candidate.step_us and settings.get("baseline") == "baseline":
            group.append(result.candidate.step_us)
    return max((max(times) / min(times) for times in groups.values() if len(times) > 1), default=None)
