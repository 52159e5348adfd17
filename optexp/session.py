"""What the runner's story is told with: one comparison's experiment, device, processes, and its growing result."""

from __future__ import annotations

import hashlib
import importlib
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from optexp.arm import Spec
from optexp.config import ConfigError, Experiment
from optexp.launching import launcher
from optexp.measurement import placement
from optexp.measurement.environment import describe as describe_environment
from optexp.processes import InProcess, Launcher, Worker
from optexp.result import Result, Verdict
from optexp.stopwatch import Stopwatch
from optexp.strategy import Contract, Strategy, contract, environment
from optexp.terminal import Progress

RECORD_SCHEMA = 1
NOT_COMPARED = {"device", "isolation", "horizon_steps", "timeout_s"}  # they change what is run with, not what is run

ARM, REFERENCE = "optexp.arm:Arm", "optexp.arm:Reference"
Arm = Worker | InProcess


class Stop(Exception):
    """The comparison is over before it was measured: a verdict and the reason."""

    def __init__(self, verdict: Verdict, reason: str) -> None:
        super().__init__(reason)
        self.verdict, self.reason = verdict, reason


@dataclass
class Session:
    """Starts arms for one comparison and holds what they said."""

    experiment: Experiment
    device: str
    output: Path
    watch: Stopwatch
    progress: Progress
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    counters: dict[str, dict[str, float]] = field(default_factory=dict)
    own_launcher: Launcher | None = None
    samples: int = 0  # that one step processes, as soon as an arm has built the workload

    def __post_init__(self) -> None:
        e = self.experiment
        e.workload = e.workload.resolve(torch.device(self.device).type)
        self.workload = e.workload
        self.protocol = e.measurement
        self.stack, self.baseline = list(e.strategies), list(e.baseline)
        sizes = {f"workload.{key}": value for key, value in asdict(e.workload).items()}
        self.result = Result(
            verdict=Verdict.ERROR,
            headline="",
            workload=e.workload.name,
            strategy=[strategy.label for strategy in self.stack],
            device=self.device,
            seed=e.seed,
            environment=describe_environment(torch.device(self.device)),
            config=e.resolved | sizes | {"device": self.device},
        )
        self.result.fingerprint = fingerprint(self.result)
        self.result.measurement["notes"] = list(e.notes)
        self.cores = placement.choose(self.protocol.cpus, torch.device(self.device).type)
        count = f"{len(self.cores)} core{'s' if len(self.cores) > 1 else ''}"
        self.result.measurement["placement"] = {"cpus": self.cores, "text": f"both arms bound to the same {count}"}

    @property
    def contract(self) -> Contract:
        """What the candidate promises: nothing that it stacks on the baseline may promise less than both keep."""
        return contract([*self.stack, *self.baseline])

    @property
    def isolated(self) -> bool:
        return self.experiment.isolation == "process"

    @contextmanager
    def working(self, phase: str, text: str) -> Iterator[None]:
        """Count the time and tell the user."""
        self.progress.phase(phase, text)
        with self.watch.phase(phase):
            yield

    def spec(self, strategies: Sequence[Strategy], autocast: str | None = None, seed_offset: int = 0) -> Spec:
        e = self.experiment
        return Spec(e.workload, list(strategies), self.device, e.dtype, e.seed + seed_offset, self.contract, autocast)

    @contextmanager
    def arms_for_evidence(self, meanwhile: Callable[[], None]) -> Iterator[dict[str, Arm]]:
        """Candidate, baseline, fp64 reference, and a yardstick where the baseline is not the bare model.

        While they set up, this process has time for something else.
        """
        specs = {"candidate": self.spec(self.stack), "baseline": self.spec(self.baseline), "reference": self.spec(())}
        if self.baseline or self.contract.dtype is not None:
            specs["yardstick"] = self.spec((), autocast=self.contract.dtype)
        with self.working("arms", "starting the arms"):
            arms = self.start(specs)
        meanwhile()
        with self.working("arms", "setting up the arms"):
            # What fails in the plain program too is no strategy's fault: the baseline says it first.
            setups = {name: arms[name].wait() for name in sorted(arms, key=lambda name: name != "baseline")}
        self.learn(setups)
        self.notes = setups["candidate"]["notes"]
        self.result.baseline.setup_s = setups["baseline"]["setup_s"]
        self.result.candidate.setup_s = setups["candidate"]["setup_s"]
        yield {"yardstick": arms["baseline"], **arms}
        for arm in arms.values():
            arm.close()

    def learn(self, setups: Mapping[str, Mapping[str, Any]]) -> None:
        """What the arms found out about the workload by building it."""
        self.samples = setups["baseline"]["samples"]
        self.result.measurement["notes"] += setups["baseline"]["remarks"]
        built = setups["baseline"]["built"]
        for setup in setups.values():
            if different := [name for name, value in setup["built"].items() if built.get(name, value) != value]:
                raise Stop(
                    Verdict.UNVERIFIED,
                    f"the model is not the same in every process ({different[0].partition('/')[2]} differs):"
                    " what draws its values must follow the seed of torch, numpy or random",
                )

    def start(self, specs: Mapping[str, Spec]) -> dict[str, Arm]:
        """Begin to set up several arms side by side; `wait` of each tells how it went."""
        arms: dict[str, Arm] = {}
        for name, spec in specs.items():
            arms[name] = self.arm(REFERENCE if name == "reference" else ARM, name)
            arms[name].start("setup", packed=spec.pack())
        return arms

    def arm(self, role: str, name: str) -> Arm:
        """One worker process, or its object in this one."""
        if not self.isolated:
            if variables := environment([*self.stack, *self.baseline]):
                raise ConfigError(f"isolation=none cannot set {', '.join(variables)}: use isolation=process")
            module, _, cls = role.partition(":")
            return InProcess(getattr(importlib.import_module(module), cls)(), name)
        logs = self.output / "arms"
        logs.mkdir(exist_ok=True)
        return self.launcher().fork(role, name, (logs / f"{name}.log").resolve(), self.experiment.timeout_s)

    def launcher(self) -> Launcher:
        """The shared one, or one of this comparison's own where a strategy needs environment variables."""
        if self.own_launcher is None and (variables := environment([*self.stack, *self.baseline])):
            self.own_launcher = Launcher(variables)
        chosen = self.own_launcher or launcher()
        slow = {module for s in (*self.stack, *self.baseline) for module in s.preload}
        slow |= {module for module in self.workload.preload if find_spec(module.partition(".")[0])}
        chosen.preload(sorted(slow))
        return chosen

    def close(self) -> None:
        """End every process of this comparison."""
        if self.own_launcher is not None:
            self.own_launcher.close()
        if self.isolated:
            launcher().end_workers()


@contextmanager
def alongside(work: Callable[[], None]) -> Iterator[None]:
    """Do `work` in a thread while the block waits for other processes."""
    thread = Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def choose_device(setting: str) -> str:
    """auto is the first CUDA device, else the CPU."""
    if setting == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if setting.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={setting}: torch sees no CUDA device here; use device=cpu or device=auto")
    return "cuda:0" if setting == "cuda" else setting


def fingerprint(result: Result) -> str:
    """Equal fingerprints may be compared: same schema, work, stack, protocol, device and versions."""
    facts = [
        RECORD_SCHEMA,
        {key: value for key, value in result.config.items() if key not in NOT_COMPARED},
        result.environment.get("gpu") or result.environment.get("cpu"),
        [result.environment.get(key) for key in ("torch", "triton", "cuda")],
        platform.machine(),
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]
