"""The exit status: what the jobs wrote down, because Hydra returns nothing from a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from optexp.records import filenames
from optexp.records.verdict import REGRESSION_STATUS
from optexp.result import Result, Verdict, worst_status
from optexp.sweeps import sweep
from optexp.sweeps.study import Study

_finished: list[int] = []


class ExitStatus(Callback):
    """Reads the `result.json` files when all jobs are done, wherever a launcher ran them."""

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        path = Path(config.hydra.run.dir) / filenames.RESULT
        # A job that left no result ended in a way that nothing could record.
        _finished.append((Result.read(path) if path.is_file() else Verdict.ERROR).exit_status)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        results = sweep.read(Path(config.hydra.sweep.dir)).values()
        verdicts = [result.verdict for result in results]
        regressed = any(result.exit_status == REGRESSION_STATUS for result in results)
        _finished.append(worst_status(answering(verdicts) if Study.of(config) else verdicts, regressed))


def answering(verdicts: Sequence[Verdict]) -> Sequence[Verdict]:
    """Those that count for a study: that a strategy finds nothing to do is an answer, where other jobs answer too."""
    rest = [verdict for verdict in verdicts if verdict is not Verdict.NOT_ENGAGED]
    return rest if any(verdict.exit_status == 0 for verdict in rest) else verdicts


def status() -> int:
    """Of the run or the sweep that has ended; 0 where there was none, as after --help."""
    return _finished[-1] if _finished else 0
