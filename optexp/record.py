"""Write a result down and show it: result.json, the report, MLflow, the terminal."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from omegaconf import DictConfig, OmegaConf

from optexp.config import ConfigError, Experiment
from optexp.result import Result, Verdict
from optexp.stopwatch import Stopwatch

if TYPE_CHECKING:
    from optexp.terminal import Progress
    from optexp.tracking import Run


class Recorder:
    """Holds the MLflow run open while a comparison works, so that an interrupted one is marked KILLED."""

    def __init__(self, experiment: Experiment, output: Path, watch: Stopwatch, progress: Progress) -> None:
        self.experiment, self.output, self.watch, self.progress = experiment, output, watch, progress
        self.run: Run | None = None
        self.trouble: str | None = None

    def start(self, name: str) -> None:
        """Open the MLflow run; a store that cannot be reached costs the record there, not the result."""
        from optexp import tracking

        if not self.experiment.tracking.enabled:
            return
        self.progress.phase("record", "opening the MLflow run")
        with self.watch.phase("record"):
            try:
                self.run = tracking.start(self.experiment.tracking, name, os.environ.get("OPTEXP_PARENT_RUN"))
            except tracking.TrackingError as error:
                self.trouble = str(error)

    def finish(self, result: Result) -> None:
        """Write everything, log everything, show it."""
        from optexp import report, terminal, tracking

        self.progress.phase("record", "writing the report and the MLflow run")
        if self.trouble:
            result.measurement.setdefault("notes", []).append(f"not in MLflow: {self.trouble}")
        with self.watch.phase("record"):
            self._write(result)
            report.write(result, self.output / "report.html")
            if self.run is not None:
                try:
                    self.run.log(result, self.output)
                    self.run.finish("FINISHED")
                except tracking.TrackingError as error:
                    result.measurement.setdefault("notes", []).append(f"not in MLflow: {error}")
        self._write(result)
        self.progress.stop()
        terminal.show(result, self.output, self.run)

    def _write(self, result: Result) -> None:
        result.measurement["seconds"] = self.watch.rounded()
        result.write(self.output / "result.json")
        (self.output / "environment.json").write_text(json.dumps(result.environment, indent=2) + "\n")
        (self.output / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(result.config)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self.run is not None:
            self.run.finish("KILLED" if issubclass(kind, KeyboardInterrupt) else "FAILED")


def configuration_error(error: ConfigError, config: DictConfig, output: Path) -> Result:
    """A job that could not be built: one sentence, and a record so that a sweep can rank it."""
    from optexp import terminal

    plain: dict[str, Any] = OmegaConf.to_container(config)  # type: ignore[assignment]
    result = Result(
        verdict=Verdict.ERROR,
        headline=f"ERROR: {error}",
        workload=str(plain.get("workload", {}).get("_target_", "?")).rpartition(".")[2].lower(),
        strategy=list(plain.get("strategy") or {}),
        device=str(plain.get("device")),
        seed=0,
        config=plain,
        error={"type": "ConfigError", "message": str(error), "traceback": "", "worker": ""},
    )
    result.write(output / "result.json")
    terminal.show(result, output, None)
    return result
