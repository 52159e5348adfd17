"""One job of a sweep: its configuration, its folder, and the work of the process that runs it."""

from __future__ import annotations

import fcntl
import io
import json
import os
import sys
import tarfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import run_job, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from optexp.comparison.quiet import Shared
from optexp.config import search_path
from optexp.records import filenames
from optexp.result import Result
from optexp.support.nvml_count import count_by_nvml

MARK, LOCK, LOG = "job.json", ".lock", "job.log"
PASSED_ON = ("MLFLOW_", "OPTEXP_")  # environment variables that reach workers on other machines
_quiet: Shared | None = None  # of this worker, where it shares a card


@dataclass(frozen=True)
class Job:
    """One job, as the sweep hands it to a worker.

    number: place in the sweep, and name of its folder
    config: composed, with the node `hydra`
    folder: absolute
    key:    of settings, code and versions (`resume.key`): equal keys describe equal work
    """

    number: int
    config: DictConfig
    folder: Path
    key: str

    @property
    def label(self) -> str:
        """The overrides, without those that are about the sweep."""
        typed = (str(text).lstrip("+") for text in self.config.hydra.overrides.task)
        return " ".join(text for text in typed if not text.startswith(("sweep.", "tracking.")))

    def record(self) -> Result | None:
        """The record of this very work; None while the job has not ended."""
        try:
            mark = json.loads((self.folder / MARK).read_text())
            return Result.read(self.folder / filenames.RESULT) if mark["key"] == self.key else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def mark(self) -> None:
        """Say that the record is complete. A process that is killed while it writes leaves no mark."""
        draft = self.folder / f"{MARK}.{os.getpid()}"
        draft.write_text(json.dumps({"key": self.key, "overrides": self.label}) + "\n")
        draft.replace(self.folder / MARK)

    def unmark(self) -> None:
        """Forget a record that was left here before."""
        (self.folder / MARK).unlink(missing_ok=True)

    def write_config(self) -> None:
        """The files that Hydra leaves when a job starts, for a job that never did."""
        path = self.folder / filenames.HYDRA_CONFIG
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            OmegaConf.save(OmegaConf.masked_copy(self.config, ["hydra"]), self.folder / filenames.HYDRA_SETTINGS)
            rest = [str(key) for key in self.config if key != "hydra"]
            OmegaConf.save(OmegaConf.masked_copy(self.config, rest), path)

    def at(self, folder: Path) -> Job:
        """The same job in another folder, on a machine that does not see its own."""
        config = self.config.copy()
        with read_write(config), open_dict(config):
            config.hydra.sweep.dir = str(folder.parent)
            config.hydra.sweep.subdir = folder.name
        return replace(self, config=config, folder=folder)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from this job: an engine may start it twice, and so may a sweep that is resumed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / LOCK, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when its process ends, however it does
            yield


@dataclass(frozen=True)
class Surroundings:
    """Of the process that sweeps: working folder, modules, and variables that jobs depend on.

    shared:  address of the `SharedCard` of a worker's card; None where it shares none
    sharing: workers of that card
    """

    folder: str
    path: tuple[str, ...]
    variables: Mapping[str, str]
    shared: str | None = None
    sharing: int = 1

    @classmethod
    def here(cls) -> Surroundings:
        passed_on = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
        return cls(os.getcwd(), tuple(sys.path), passed_on)

    def enter(self) -> None:
        """Make this process like the one that sweeps."""
        global _quiet
        if os.path.isdir(self.folder):  # another machine may not have it
            os.chdir(self.folder)
        sys.path += [entry for entry in self.path if entry not in sys.path]
        os.environ.update(self.variables)
        count_by_nvml()
        if self.shared is not None and _quiet is None:
            _quiet = Shared(self.shared, self.sharing)


def task(config: DictConfig) -> None:
    """One comparison in this process; whatever goes wrong in it is in its record."""
    from optexp.workers import launching

    if config.get("isolation") != "none":
        launching.launcher()  # imports torch while this process does
    from optexp.comparison import runner  # not before a job starts: --help must not wait for torch

    runner.run(config, Path(HydraConfig.get().runtime.output_dir), quiet=_quiet)


def run(job: Job, context: HydraContext) -> None:
    """Run a job in this process unless its record is there. Raises only KeyboardInterrupt."""
    from optexp.reporting import tracking

    with job.alone():
        if job.record():
            return
        tracking.close_left_open(job.config.tracking, job.folder)  # of an earlier start that was killed
        done = run_job(
            hydra_context=context,
            task_function=task,
            config=job.config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        if isinstance(error := done._return_value, Exception):
            traceback.print_exception(error)
        elif (job.folder / filenames.RESULT).is_file():
            job.mark()


def work(job: Job, surroundings: Surroundings) -> None:
    """Run a job in a worker process of an engine. What it prints goes to `job.log` in its folder."""
    surroundings.enter()
    job.folder.mkdir(parents=True, exist_ok=True)
    with open(job.folder / LOG, "a") as log, redirect_stdout(log), redirect_stderr(log):
        run(job, _context(job))


def work_anywhere(job: Job, surroundings: Surroundings) -> bytes | None:
    """As `work`. Where this machine does not see the sweep's folder, the packed record is returned."""
    if job.folder.parent.is_dir():
        work(job, surroundings)
        return None
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="optexp-job-") as folder:
        there = job.at(Path(folder) / str(job.number))
        uri = there.config.tracking.uri or surroundings.variables.get("MLFLOW_TRACKING_URI")
        if uri is None or uri.startswith("sqlite:"):  # a file of the other machine: the sweep logs the record itself
            there.config.tracking.enabled = False
        work(there, surroundings)
        return pack(there.folder)


def pack(folder: Path) -> bytes:
    """The files of a folder as one piece."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(folder, arcname=".")
    return packed.getvalue()


def unpack(packed: bytes, folder: Path) -> None:
    """Unpack the result of `pack` into another folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
        archive.extractall(folder, filter="data")


def _context(job: Job) -> HydraContext:
    """Hydra as the command line has it, in a process that it did not start."""
    search_path.register()
    setup_globals()
    if not GlobalHydra.instance().is_initialized():
        initialize_config_dir(version_base="1.3", config_dir=str(search_path.CONF), job_name="optexp")
    OmegaConf.register_new_resolver("optexp.options", lambda group: "", replace=True)  # of the help, which no job shows
    return HydraContext(GlobalHydra.instance().config_loader(), Callbacks(_without_our_callbacks(job.config)))


def _without_our_callbacks(config: DictConfig) -> DictConfig:
    """The user's callbacks: ours are about the whole sweep, and belong to the process that sweeps."""
    callbacks = {
        name: node
        for name, node in (config.hydra.callbacks or {}).items()
        if not str(node.get("_target_", "")).startswith("optexp.sweeps.")
    }
    return OmegaConf.create({"hydra": {"callbacks": callbacks}})
