"""One job from its configuration to its record: build, run the mode, adjudicate, record."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from optexp.comparison import gpu_lock, regression
from optexp.comparison.adjudicate import Decision, Facts, adjudicate
from optexp.comparison.defaults import taken as defaults_taken
from optexp.comparison.forecast import welcome
from optexp.comparison.known_baseline import KnownBaseline
from optexp.comparison.quiet import Quiet, Throughout, Unshared
from optexp.comparison.recorder import Recorder, not_built, silent
from optexp.comparison.session import Session
from optexp.config import Experiment, resolve, search_path
from optexp.errors import ConfigError, Distrusted, Failure, Hopeless, NoReference, Unsupported
from optexp.measurement.machine_load import MachineLoad
from optexp.records import filenames
from optexp.records.folder import full, refusal, tolerating
from optexp.records.patch import allowed
from optexp.reporting import terminal
from optexp.reporting.terminal import Progress
from optexp.reporting.wording import at_precision, headline, replayed, unchecked_bits
from optexp.result import Problem, Result, Verdict
from optexp.strategy import label
from optexp.support.garbage import uncollected
from optexp.support.stopwatch import Stopwatch, process_age_s
from optexp.workers.serving import describe
from optexp.workload import Workload

_first_run = True


def run(
    config: DictConfig,
    output: Path,
    workload: Workload | None = None,
    show: terminal.Show = terminal.show,
    quiet: Quiet | None = None,
) -> Result:
    """One comparison (or one profile) from its configuration to its record. Raises only KeyboardInterrupt.

    Args:
        workload: An object instead of the configuration's; then this process is not the command's own.
        quiet: Where other comparisons share the card; None where none does.
    """
    global _first_run
    watch = Stopwatch(process_age_s() if _first_run and workload is None else 0.0)
    _first_run = False
    output.mkdir(parents=True, exist_ok=True)
    (output / filenames.RESULT).unlink(missing_ok=True)  # an earlier job's, in a folder that was named anew
    with Progress() as progress, ExitStack() as held:
        try:
            with watch.phase("import"):
                experiment = resolve(config, workload)
            accepted = experiment.environment.allow_foreign  # who accepts other programs waits for none
            waiting = None if accepted else partial(_waiting, watch, progress)
            device = held.enter_context(gpu_lock.locked(experiment.device, waiting, shared=quiet is not None))
            with watch.phase("import"):
                session = Session(experiment, device, output, watch, progress, quiet=quiet or Unshared())
            if quiet is not None and (experiment.mode != "compare" or session.settings.trials):
                held.callback(quiet.end)
                session.begin_quiet()
                session.quiet = Throughout(quiet)  # it times programs until its end
            if not search_path.in_sweep():
                session.told_s, said = welcome(experiment, MachineLoad.now())
                defaults = defaults_taken(experiment) if HydraConfig.initialized() else ""
                progress.expect(session.told_s, "\n".join(f"optexp: {text}" for text in (defaults, said) if text))
        except KeyboardInterrupt as error:
            not_built(error, config, output)
            raise
        except Exception as error:
            return not_built(error, config, output, show)
        with Recorder(session, show) as recorder:
            perform(session, recorder)
    return session.result


def run_beside(
    job: Session,
    experiment: Experiment,
    output: Path,
    progress: Progress,
    known_baseline: KnownBaseline | None = None,
    until_s: float = float("inf"),
    looks: bool = False,
) -> Result:
    """One comparison of a job that makes several, on the device that the job holds; the job shows it with all others.

    Args:
        known_baseline: That an earlier comparison of the job verified.
        until_s: Time of `time.monotonic` at which it is cut.
        looks: A first look decides whether the stack is verified (see `optexp.comparison.first_look`).
    """
    output.mkdir(parents=True, exist_ok=True)
    (output / filenames.RESULT).unlink(missing_ok=True)
    session = Session(experiment, job.device, output, Stopwatch(), progress)
    session.work, session.known_baseline, session.pool.until_s = job.work, known_baseline, until_s
    session.quiet = job.quiet
    session.looks = looks
    parent = job.result.environment.get("mlflow_run")
    with Recorder(session, silent, parent) as recorder:
        perform(session, recorder)
    return session.result


def perform(session: Session, recorder: Recorder) -> None:
    """Run the experiment's mode, settle the verdict, and record it."""
    with uncollected() if session.isolated else nullcontext():  # in this process arms are timed with their own
        _perform(session, recorder)


def _perform(session: Session, recorder: Recorder) -> None:
    facts = Facts()
    try:
        mode = import_module(f"optexp.comparison.modes.{session.experiment.mode}")
        decision = mode.run(session, facts, recorder.start) or adjudicate(facts)
        settle(session, decision or Decision(Verdict.ERROR, "the comparison ended undecided"))
    except Exception as error:
        facts.problem = problem(error)
        if (reason := full(session.output)) is not None:  # whatever failed: a profiler leaves no trace, and no error
            facts.problem = Problem("OSError", f"cannot write {session.output}: {reason}")
        settle(session, adjudicate(facts) or Decision(Verdict.ERROR, facts.problem.message))
        expected = isinstance(error, (Unsupported, ConfigError, NoReference, Distrusted, Hopeless))
        session.result.error = None if expected else facts.problem
    finally:
        session.close()
    settings, result = session.experiment.regression, session.result
    with tolerating(result.notes):
        leave_patch(session)
    if settings.against and result.verdict.measured and result.speedup:
        with session.working("record", f"comparing with {settings.against}"):
            result.regression = regression.check(settings, session.experiment.tracking, result)
    recorder.finish(result)
    if settings.on_alert and result.regression and result.regression.alarm:
        regression.alert(settings.on_alert, result, session.output)


@contextmanager
def _waiting(watch: Stopwatch, progress: Progress, reason: str) -> Iterator[None]:
    progress.phase("wait", reason)
    with watch.phase("wait"):
        yield


def problem(error: Exception) -> Problem:
    """An exception as the record of a comparison that it ended."""
    if sentence := refusal(error):
        return Problem(type(error).__name__, sentence)
    if isinstance(error, Failure):
        return Problem(error.type, error.message, error.traceback, error.worker)
    if isinstance(error, (Unsupported, ConfigError, NoReference, Distrusted, Hopeless)):
        kind = "Unsupported" if isinstance(error, Unsupported) else type(error).__name__
        return Problem(kind, str(error))
    raised = describe(error)
    return Problem(raised.type, raised.message, traceback.format_exc())


def leave_patch(session: Session) -> None:
    """Write the patch of the user's file where the verdict allows it; a note tells its use, or why there is none.

    One of an earlier job in the same folder is removed.
    """
    result, patch, file = session.result, session.patch, session.output / filenames.PATCH
    file.unlink(missing_ok=True)
    if patch is None or not allowed(result.verdict, session.experiment.patch):
        return
    if patch.reason:
        result.notes.append(f"no {filenames.PATCH}: {patch.reason}")
        return
    file.write_bytes(patch.diff)
    result.notes.append(f"{filenames.PATCH} puts {label(session.stack)} into {patch.path}: git apply {file}")


def settle(session: Session, decision: Decision) -> None:
    """Write the verdict into the result, with a headline, and withhold every figure that it does not allow."""
    result, verdict = session.result, decision.verdict
    result.verdict = verdict
    if verdict is Verdict.VERIFIED:
        result.headline = _verified(session)
    elif verdict.measured and not decision.reason and result.speedup:
        weakness = result.equivalence.weakness if result.equivalence else None
        result.headline = headline(result, session.precision, label(session.baseline), weakness)
    else:
        result.headline = f"{verdict}: {decision.reason}"
    if verdict in (Verdict.PROFILED, Verdict.ERROR, Verdict.UNSUPPORTED):
        pass  # of no inputs, or of none that matter
    elif not verdict.measured:
        result.headline += replayed(result)
    if not verdict.measured and verdict is not Verdict.PROFILED:
        result.withhold()


def _verified(session: Session) -> str:
    at = at_precision(session.precision, session.result.equivalence)
    unchecked = unchecked_bits(session.result.equivalence.unchecked_bits) if session.result.equivalence else ""
    facts = f"VERIFIED: the results are the same{at}", unchecked, "nothing was timed"
    return "; ".join(filter(None, facts))
