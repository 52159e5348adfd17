"""Comparison of two versions of one workload: a usual comparison, with each arm in its version's own home."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from optexp.api import compose
from optexp.comparison.adjudicate import Decision, Facts, adjudicate, measured, refused
from optexp.comparison.conclusion import conclude
from optexp.comparison.measure import measure, refuse_company
from optexp.comparison.modes import compare
from optexp.comparison.runner import problem, settle
from optexp.comparison.session import Session
from optexp.config import Experiment, resolve
from optexp.config.experiment import comparing
from optexp.config.overrides import rewrite
from optexp.duets.as_written import AsWritten
from optexp.errors import ConfigError, Distrusted, NoReference, Unsupported
from optexp.measurement.settings import SEVERAL
from optexp.reporting.terminal import Progress
from optexp.result import Result, Verdict
from optexp.support.stopwatch import Stopwatch
from optexp.workers.home import Homes

OURS = ("strategy", "baseline", "mode", "isolation", "verify")  # keys that a comparison of versions sets itself


@dataclass(frozen=True)
class Labels:
    """Names of both versions."""

    base: str
    head: str


def experiment_of(overrides: Sequence[str]) -> Experiment:
    """The experiment of a command line. Its A/A control (a second process of the base) is always on.

    Raises:
        ConfigError: A key or a choice does not exist, is one of `OURS`, or gives no verdict.
    """
    keys = (text.lstrip("+~").partition("=")[0].partition(".")[0] for text in overrides)
    if taken := [key for key in keys if key in OURS]:
        raise ConfigError(f"{taken[0]}= is for one version: both run as they are written, without a strategy")
    found = resolve(compose([*rewrite(list(overrides)), "tracking.enabled=false"], {}, {}))
    if found.measurement.trials:
        raise ConfigError(f"measurement={found.measurement.preset} decides nothing: use quick, default or rigorous")
    return replace(found, measurement=replace(found.measurement, controls=True))


def duet(
    experiment: Experiment, device: str, homes: Homes, labels: Labels, output: Path, progress: Progress, verified: bool
) -> Result:
    """Compare two versions of one workload.

    Args:
        device: Device of the arms, "cpu" or "cuda:0".
        output: Folder of logs and samples.
        verified: Whether the head's results are verified against the base's before timing.
    """
    head = [AsWritten(labels.head)]
    session = Session(comparing(experiment, head, ()), device, output, Stopwatch(), progress)
    session.pool.homes = homes
    session.result.config["baseline.version"] = labels.base
    try:
        facts = Facts()
        decision = _verified(session, facts) if verified else _timed(session, facts)
    except Exception as error:
        facts.problem = problem(error)
        decision = adjudicate(facts)
        if not isinstance(error, (Unsupported, ConfigError, NoReference, Distrusted)):
            session.result.error = facts.problem
    finally:
        session.close()
    settle(session, decision or Decision(Verdict.ERROR, "the comparison ended undecided"))
    session.result.seconds = session.watch.rounded()
    return session.result


def with_effort(experiment: Experiment, times: int, half_width: float | None) -> Experiment:
    """The experiment with `times` as many processes and as much time; an experiment of one process gets several.

    Args:
        half_width: Half-width at which measuring stops, if it is wider than the experiment's own.
    """
    m = experiment.measurement
    m = replace(m, half_width=max(m.half_width, half_width or 0.0))
    if times > 1:
        fewest, most = SEVERAL if m.processes_max == 1 else (times * m.processes_min, times * m.processes_max)
        m = replace(m, processes_min=fewest, processes_max=most, budget_s=times * m.budget_s)
    return replace(experiment, measurement=m)


def _verified(session: Session, facts: Facts) -> Decision | None:
    compare.run(session, facts, lambda: None)
    return adjudicate(facts)


def _timed(session: Session, facts: Facts) -> Decision | None:
    """Measure without verification: the rules of a measurement alone decide."""
    refuse_company(session)
    conclude(session, facts, measure(session))
    return refused(facts) or measured(facts)
