"""What the runner's story is told with: one comparison's experiment, device, processes, and its growing result."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Generic, TypeVar

import torch

from optexp.comparison.edits import Files
from optexp.comparison.forecast import Steps, announcement, total_s
from optexp.config import Experiment, search_path
from optexp.errors import ConfigError, Distrusted, Failure, NoReference
from optexp.measurement import placement
from optexp.measurement.environment import describe as describe_environment
from optexp.measurement.gpu import UNREAD, Gpu
from optexp.measurement.settings import Protocol
from optexp.records.profile import Calibration
from optexp.reporting.terminal import Progress
from optexp.result import SCHEMA, Placement, Result, Verdict
from optexp.schema import build
from optexp.strategy import REASSOCIATES, Composed, Contract, Strategy, environment
from optexp.support.draws import Draws
from optexp.support.memory_plan import PLANS, thriftier
from optexp.support.stopwatch import Stopwatch
from optexp.support.tf32 import allow_tf32, tf32_allowed
from optexp.workers.arm import Arm
from optexp.workers.client import Client, InProcess, Pending
from optexp.workers.launching import launcher
from optexp.workers.messages import SetUp, WorkloadInfo
from optexp.workers.peer import Peer
from optexp.workers.process import Launcher
from optexp.workers.reference import Reference
from optexp.workers.spec import Spec

# Packages that all arms may find imported: importing any other may change more than how long that takes.
SHARED = {"torch", "triton", "torchvision", "transformers", "sklearn"}
# They change what is run with, not what is run.
NOT_COMPARED = {"replay", "device", "isolation", "verify", "horizon_steps", "timeout_s"}

A = TypeVar("A", bound=Peer)
S = TypeVar("S")


@dataclass(frozen=True)
class Starting(Generic[A, S]):
    """A process whose set-up is under way."""

    arm: Client[A]
    setup: Pending[S]


@dataclass
class Session:
    """Starts arms for one comparison and holds what they said."""

    experiment: Experiment
    device: str
    output: Path
    watch: Stopwatch
    progress: Progress
    launchers: dict[frozenset[tuple[str, str]], Launcher] = field(default_factory=dict)  # by environment variables
    tried: list[str] = field(default_factory=list)  # plans with which memory ran out
    samples: int = 0  # that one step processes, as soon as an arm has built the workload
    plan: int = 0  # index in `memory_plan.PLANS`: what fits, as far as is known
    calibration: Calibration | None = None  # of the device, as soon as an arm has measured it

    def __post_init__(self) -> None:
        e = self.experiment
        e.workload = e.workload.resolve(torch.device(self.device).type)
        self.workload = e.workload
        self.protocol = e.measurement
        self.draws = Draws.of(e.replay)
        self.files = Files.now()
        self.stack, self.baseline = Composed(e.strategies), Composed(e.baseline)
        sizes = {f"workload.{key}": value for key, value in asdict(e.workload).items()}
        self.result = Result(
            verdict=Verdict.ERROR,
            headline="",
            workload=e.workload.name,
            strategy=list((self.stack if e.mode == "compare" else self.baseline).labels),
            device=self.device,
            seed=e.seed,
            environment=describe_environment(torch.device(self.device)),
            config=e.resolved | sizes | {"device": self.device},
        )
        self.gpu = Gpu.open(torch.device(self.device))
        if self.gpu is None and self.device.startswith("cuda"):
            e.notes.append(UNREAD)
        if self.protocol.l2 != "warm" and not (self.device.startswith("cuda") and self.workload.operation):
            e.notes.append(f"measurement.l2={self.protocol.l2}: only a single operation on a GPU is measured that way")
            self.protocol = replace(self.protocol, l2="warm")
        timed = e.verify != "only" and e.mode == "compare" and not self.protocol.trials
        if timed and not self.isolated:  # arms made anew have this process's luck in common
            try:
                self.protocol = replace(self.protocol, processes_min=1, processes_max=1)
            except ValueError as reason:
                raise ConfigError(f"isolation=none measures one process: {reason}") from None
        self.cores = placement.choose(self.protocol.cpus, torch.device(self.device).type)
        self.own_cores, self.own_threads = os.sched_getaffinity(0), torch.get_num_threads()
        self.own_tf32 = tf32_allowed()
        # Shared memory, and an ordinary folder for what does not fit into it; both go with the session.
        places = [place for place in ("/dev/shm", tempfile.gettempdir()) if os.path.isdir(place)]
        self.folders = tuple(tempfile.mkdtemp(prefix="optexp-", dir=place) for place in places)
        self.result.fingerprint = fingerprint(self.result, len(self.cores))
        self.result.notes, self.result.draws = list(e.notes), self.draws
        count = f"{len(self.cores)} core{'s' if len(self.cores) > 1 else ''}"
        self.result.placement = Placement(self.cores, f"both arms bound to the same {count}")

    @property
    def contract(self) -> Contract:
        """What the candidate promises."""
        return self.stack.contract

    @property
    def precision(self) -> str:
        """The dtype by whose limits the candidate's results are judged."""
        return self.contract.dtype or self.experiment.dtype

    @property
    def isolated(self) -> bool:
        return self.experiment.isolation == "process"

    @contextmanager
    def working(self, phase: str, text: str) -> Iterator[None]:
        """Count the time and tell the user."""
        self.progress.phase(phase, text)
        with self.watch.phase(phase):
            yield

    def spec(
        self,
        strategies: Sequence[Strategy],
        autocast: str | None = None,
        seed_offset: int = 0,
        judges: Contract = REASSOCIATES,
        generic: bool = False,
    ) -> Spec:
        e = self.experiment
        return Spec(
            workload=e.workload,
            strategies=list(strategies),
            device=self.arm_device,
            dtype=e.dtype,
            seed=e.seed + seed_offset,
            # What arms met that were verified is nothing that others are timed on.
            draws=self.draws.seed("examined" if generic else "batches", seed_offset),
            contract=judges,
            cores=tuple(self.cores),
            folders=self.folders,
            autocast=autocast,
            generic=generic,
            plan=self.plan,
        )

    def learn(self, bare: SetUp, setups: Iterable[SetUp], judge: WorkloadInfo | None = None) -> None:
        """Properties of the workload, from the arms that built it; `NoReference` where they built different models."""
        self.samples, built = bare.workload.samples, bare.workload.built
        self.plan = max([self.plan, *(setup.plan for setup in setups)])
        if self.plan:
            self.result.notes += self.on_memory(bare.batch_bytes)
        notes = self.result.notes
        notes += [remark for remark in bare.workload.remarks if remark not in notes]
        for info in (*(setup.workload for setup in setups), *([judge] if judge else [])):
            if different := [name for name, value in info.built.items() if built.get(name, value) != value]:
                raise NoReference(
                    f"the model is not the same in every process ({different[0].partition('/')[2]} differs):"
                    " what draws its values must follow the seed of torch, numpy or random",
                )

    def calibrated(self, calibration: Calibration) -> None:
        """The device's ceilings are known."""
        self.calibration = self.result.profile.calibration = calibration

    @property
    def in_turns(self) -> bool:
        """Whether an arm that waits gives its memory back."""
        return PLANS[self.plan].in_turns

    def on_memory(self, batch_bytes: float) -> list[str]:
        """What is done, and not done, so that everything fits; for people, and not said before."""
        plan, said = PLANS[self.plan], self.result.notes
        notes = [f"memory: a batch has {batch_bytes / 2**30:.3g} GiB: {plan.describe()}"]
        if plan.batches == 1:
            notes.append(
                "with one distinct batch, a result that is kept and handed out again shows on fresh inputs alone, and"
                " not in what was timed"
            )
        return [note for note in notes if note not in said]

    def forecast(self, arm: Client[Arm], told: SetUp, setup_s: float, verified: int) -> None:
        """Say early that it takes minutes, and what would take less.

        arm:      the baseline's;  told: by it when it was set up, beside others
        setup_s:  of the slower arm
        verified: steps that each set of inputs is checked on
        """
        workload, trains = self.workload, self.workload.mode != "forward"
        families = len(workload.families) - 1
        steps = Steps(told.step_s, told.compute_s, setup_s, verified, trains, workload.mode == "train", families)
        measured = self.experiment.verify != "only" and not self.protocol.trials
        quick: Protocol = build(search_path.compose(["measurement=quick"]).measurement, "measurement")
        if not announcement(steps, self.protocol, measured, {"quick": quick}):
            return
        wall_s, compute_s = arm.call(Arm.one_step)
        steps = replace(steps, wall_s=wall_s, compute_s=compute_s)
        if text := announcement(steps, self.protocol, measured, {"quick": quick}):
            self.result.notes.append(text)
            self.progress.update(text, remaining_s=total_s(steps, self.protocol, measured))

    def spare(self, failure: Failure) -> bool:
        """After memory ran out: begin anew with less of it, where there is a way."""
        following = thriftier(self.plan)
        if failure.type != "OutOfMemoryError" or following is None:
            return False
        tried, self.plan = PLANS[self.plan], following
        self.tried = [*self.tried, tried.describe()]
        self.result.notes.append(f"memory: {failure.worker or 'an arm'} ran out with {tried.describe()}")
        for own in self.launchers.values():
            own.end_workers()
        if self.isolated:
            launcher().end_workers()
        return True

    def set_up(
        self, specs: Mapping[str, Spec], judge: Spec, first: Sequence[str] = ()
    ) -> tuple[dict[str, Client[Arm]], Client[Reference], dict[str, SetUp], WorkloadInfo]:
        """Arms and the reference, with what their set-up returned: side by side or, where memory is known to be short,
        one after the other.

        Args:
            first: Whose failures are reported before others'.
        """
        order = list(dict.fromkeys([*first, *specs]))
        starting, done = dict[str, Starting[Arm, SetUp]](), dict[str, SetUp]()
        if not self.in_turns:
            starting = self.start(specs)
            reference = self.start_reference(judge)
        for name in order:
            if self.in_turns:
                starting |= self.start({name: specs[name]})
            done[name] = starting[name].setup.wait()
        if self.in_turns:
            reference = self.start_reference(judge)
        info = reference.setup.wait()
        return {name: starting[name].arm for name in order}, reference.arm, done, info

    def start(self, specs: Mapping[str, Spec]) -> dict[str, Starting[Arm, SetUp]]:
        """Begin to set up several arms side by side."""
        if self.isolated:
            for spec in specs.values():
                self.launcher(spec.strategies)  # those that are not there yet begin to start, side by side
        starting = {}
        for name, spec in specs.items():
            arm = self.arm(Arm, name, spec.strategies)
            starting[name] = Starting(arm, arm.start(Arm.setup, packed=replace(spec, name=name).pack()))
        return starting

    def start_reference(self, spec: Spec, name: str = "reference") -> Starting[Reference, WorkloadInfo]:
        """Begin to set up the process that judges."""
        reference = self.arm(Reference, name, ())
        return Starting(reference, reference.start(Reference.setup, packed=replace(spec, name=name).pack()))

    def arm(self, role: type[A], name: str, stack: Sequence[Strategy]) -> Client[A]:
        """One worker process, or its object in this one."""
        if not self.isolated:
            if variables := environment(stack):
                raise ConfigError(f"isolation=none cannot set {', '.join(variables)}: use isolation=process")
            return InProcess(role(), name)
        logs = self.output / "arms"
        logs.mkdir(exist_ok=True)
        log = (logs / f"{name}.log").resolve()
        return self.launcher(stack).fork(role, name, log, self.experiment.timeout_s, self.visible)

    @property
    def arm_device(self) -> str:
        """What an arm calls the device: of the cards it sees one."""
        return "cuda:0" if self.isolated and self.device.startswith("cuda") else self.device

    @property
    def visible(self) -> dict[str, str]:
        """Variables by which an arm sees one card: work that it leaves to another is not possible."""
        return {"CUDA_VISIBLE_DEVICES": one_card(self.device)} if self.device.startswith("cuda") else {}

    def prove(self, arms: Mapping[str, Client[Arm]]) -> None:
        """Each arm says which it is, and what it was built of; `Distrusted` where one stands in another's place."""
        stacks: dict[str, Sequence[Strategy]] = {
            "bare": (),
            "baseline": self.baseline,
            "again": self.baseline,
            "candidate": self.stack,
        }
        for name, arm in arms.items():
            said = arm.call(Arm.identity)
            if (said.name, said.strategies) != (name, Composed(stacks[name]).labels):
                built = f"{said.name} ({'+'.join(said.strategies) or 'no strategy'})"
                raise Distrusted(f"arms were swapped: the {name} says that it is the {built}")

    def refuse_edits(self) -> None:
        """`Distrusted` where a file that decides the verdict is another one than when the comparison began."""
        if edits := self.files.edits():
            raise Distrusted(edits)

    def launcher(self, stack: Sequence[Strategy]) -> Launcher:
        """The shared one, or one of this comparison's own where a stack needs environment variables.

        An arm has the variables of its own stack and no other: those are what is compared.
        """
        variables = {**self.caches, **environment(stack)}
        key = frozenset(variables.items())
        if variables and key not in self.launchers:
            self.launchers[key] = Launcher(variables)
        chosen = self.launchers[key] if variables else launcher()
        slow = {module for part in (*self.stack, *self.baseline, self.workload) for module in part.preload}
        chosen.preload(sorted(module for module in slow if _shared(module.partition(".")[0])))
        return chosen

    @property
    def caches(self) -> dict[str, str]:
        """Variables that make compilers begin with nothing, where that is asked for; empty where it is not."""
        if not (self.protocol.cold_caches and self.isolated):
            return {}
        names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
        return {name: str(Path(self.folders[-1]) / name.lower()) for name in names}

    def processes(self) -> list[int]:
        """Those that arms descend from."""
        if not self.isolated:
            return [os.getpid()]
        return [launcher().process.pid, *(own.process.pid for own in self.launchers.values())]

    def close(self) -> None:
        """End every process of this comparison, and leave nothing behind."""
        for own in self.launchers.values():
            own.close()
        if self.isolated:
            launcher().end_workers()
        else:
            placement.bind_process(sorted(self.own_cores))
            torch.set_num_threads(self.own_threads)
            if self.own_tf32 != tf32_allowed():
                allow_tf32(**self.own_tf32)
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


def one_card(device: str) -> str:
    """What CUDA_VISIBLE_DEVICES says of a device, "cuda:1" being the second of those that this process sees."""
    index, seen = int(device.partition(":")[2] or 0), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return seen[index].strip() if seen != [""] else str(index)


def _shared(package: str) -> bool:
    return package in SHARED and find_spec(package) is not None


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


def fingerprint(result: Result, cores: int) -> str:
    """Equal fingerprints may be compared: same schema, work, stack, protocol, device and versions."""
    facts = [
        SCHEMA,
        {key: value for key, value in result.config.items() if key not in NOT_COMPARED},
        result.environment.get("gpu") or result.environment.get("cpu"),
        [result.environment.get(key) for key in ("torch", "triton", "cuda")],
        [platform.machine(), cores],
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]
