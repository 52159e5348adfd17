"""A search's finding must hold twice: of many comparisons some differ by chance, and the best of them was lucky."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from optexp.comparison.adjudicate import adjudicate, facts_of
from optexp.measurement.statistics import holm as holm
from optexp.records import filenames
from optexp.reporting.titles import titles
from optexp.reporting.wording import agreeing, corrected_headline
from optexp.result import ByItself, Result, Verdict, against_itself

NEW_SEED = 1000  # other inputs and other orders than any process of the search had
FOLDER = "winners"

Run = Callable[[DictConfig, Path], Result]


def corrected(results: Sequence[Result]) -> list[Result]:
    """The results, in place; a claim that does not survive the correction becomes INCONCLUSIVE, and says so."""
    family = [
        (result, found, p_value(result, found.p_value))
        for result in results
        if result.speedup and (found := result.measurement) and found.p_value is not None
        if not against_itself(result.config)
    ]
    for (result, found, _), p in zip(family, holm([p_value for _, _, p_value in family]), strict=True):
        found.p_holm, found.comparisons = p, len(family)
        decision = adjudicate(facts_of(result))
        if decision and decision.alone and result.verdict is not Verdict.INCONCLUSIVE:
            alone = result.headline
            result.by_itself = result.by_itself or ByItself(result.verdict, alone)
            result.verdict = decision.verdict
            result.explanation = agreeing(result.verdict, result.explanation, result.profile)
            result.headline = corrected_headline(decision.verdict, decision.reason, alone)
    return list(results)


def p_value(result: Result, alone: float) -> float:
    """Of a job's claim; of a search among all that it has measured."""
    trials = [trial.p_value for trial in result.trials if trial.p_value is not None] if result.search else []
    return holm([alone, *trials])[0]


def winners(results: Mapping[Path, Result]) -> list[Path]:
    """The fastest job of every workload for which several were measured, where its preset asks for a second look.

    A job that made many comparisons has measured its winner anew, or is no claim of a sweep.
    """
    by_workload = defaultdict(list)
    for (job, result), title in zip(results.items(), titles(list(results.values())), strict=True):
        if result.speedup and not against_itself(result.config):
            by_workload[title].append((result.verdict is Verdict.FASTER, result.speedup.low, job))
    best = [max(tried) for tried in by_workload.values() if len(tried) > 1]
    once = [job for faster, _, job in best if faster and not results[job].trials]
    return [job for job in once if results[job].config.get("measurement.confirm")]


def confirm(results: Mapping[Path, Result], folder: Path, run: Run) -> dict[Path, Result]:
    """The results, each winner's replaced by what new processes found on other inputs.

    Where that falls behind another, the other is the winner, and was as lucky: it is measured again too.
    """
    found = dict(results)
    done = [job for job, result in found.items() if result.by_itself and result.by_itself.again]  # a sweep that goes on
    while due := [job for job in winners(found) if job not in done]:
        for job in due:
            found[job] = measured_again(job, results[job], folder / FOLDER / str(len(done)), run)
            done.append(job)
    return found


def measured_again(job: Path, first: Result, output: Path, run: Run) -> Result:
    """The result of new processes on other inputs; the first result where it cannot be measured here."""
    config = OmegaConf.load(job / filenames.HYDRA_CONFIG)
    assert isinstance(config, DictConfig)
    config.seed += NEW_SEED
    if config.get("replay") is not None:  # other inputs, which a replay of this run meets again
        config.replay = f"{config.replay}/{NEW_SEED}"
    config.device = first.device  # the same card
    again = run(config, output)
    assert first.speedup is not None
    if again.verdict is Verdict.ERROR and not (again.error and again.error.worker):  # its device may not be here
        note = f"the winner could not be measured again: {again.headline}"
        return replace(first, notes=[*first.notes, note])
    for key in ("seed", "replay"):  # its row stands for the job's
        again.config[key] = first.config.get(key)
    headline = ""
    note = f"the winner, measured again with seed {again.seed}"
    if again.verdict.measured:  # no speedup is shown beside another verdict, nor one of before
        headline = first.headline
        note += f": in the search it was {first.speedup.estimate:.3g}×"
    again.by_itself = ByItself(first.verdict, headline, os.path.relpath(output, job))
    again.notes.append(note)
    return again
