"""PARENT: one comparison. Its experiment, machine, workers and inputs, and the result that grows."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from math import isclose
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from optexp.comparison.edits import Files
from optexp.comparison.forecast import TOLD_S, Steps, announcement, late, total_s
from optexp.comparison.machine import Machine
from optexp.comparison.quiet import Quiet, Unshared
from optexp.config import Experiment, search_path
from optexp.config.experiment import comparing
from optexp.errors import SPENT, ConfigError, Distrusted, Failure, NoReference
from optexp.measurement.environment import describe as describe_environment
from optexp.measurement.gpu import UNREAD, Read
from optexp.measurement.neighbours import looking_out, neighbours
from optexp.measurement.settings import MeasurementSettings
from optexp.profiling.beaten import together
from optexp.records.patch import Patch
from optexp.records.profile import Calibration
from optexp.records.roofline import StepWork
from optexp.reporting.terminal import Progress
from optexp.result import SCHEMA, Placement, Result, Verdict
from optexp.schema import build
from optexp.strategy import REASSOCIATES, Composed, Contract, Strategy
from optexp.support.draws import Draws
from optexp.support.memory_plan import PLANS, thriftier
from optexp.support.shortage import OUT_OF_MEMORY
from optexp.support.stopwatch import Stopwatch
from optexp.support.units import duration, rough
from optexp.user_code.named_files import named
from optexp.user_code.texts import digest
from optexp.workers.arm import Arm
from optexp.workers.client import Client
from optexp.workers.messages import SetUp, WorkloadInfo
from optexp.workers.pool import ArmPool
from optexp.workers.reference import Reference
from optexp.workers.spec import Spec

if TYPE_CHECKING:
    from optexp.comparison.known_baseline import KnownBaseline

UNLIKE = (
    "the model is not the same in every process ({} differs): what draws its values must follow the seed of torch,"
    " numpy or random"
)
OTHER_VALUES = (
    "the second program's model begins with other values than the first one's ({} differs), as with another seed or"
    " another initialization: give both the same torch.manual_seed, and build the model in the same order"
)
ROUNDED = (
    "the model begins with other values in {} ({} differs, by less than 0.001 % of its sum): by a solver's rounding"
    " (lstsq, svd, qr), or by another constant; save the initial values to a file once, and load it where the model is"
    " built"
)
OTHER_MODES = (
    "one file alone puts the module {} into a mode that model.train() or model.eval() changes: a loop that calls it"
    " would run two other programs; set this mode in train_step, or in train() of the model"
)
BY_ROUNDING = 1e-5  # relative difference of a tensor's sums: other seeds give larger ones
BY_FAR = 1.5  # times the remaining time of a search that a forecast exceeds: it may be too long itself
# Keys that change how a comparison runs, and not what it compares.
NOT_COMPARED = {"replay", "device", "isolation", "verify", "horizon_steps", "timeout_s", "profile", "auto", "patch"}


@dataclass
class Session:
    """One comparison: its experiment, machine, workers and inputs, and the result that grows.

    tried:          memory plans with which memory ran out, in words
    samples:        that one step processes; 0 until an arm has built the workload
    plan:           index in `memory_plan.PLANS` of the plan that fits, as far as is known
    calibration:    the device's ceilings; None until an arm has measured them
    told_s:         seconds that the job announced at its start; 0 where it announced none
    patch:          of the user's file; None until the arms are set up
    work:           of the bare program's step; None until its arm has found it
    known_baseline: verified by an earlier comparison of the same job; None where there is none
    looks:          a first look decides whether the candidate is verified
    quiet:          on the card, where other comparisons share it
    """

    experiment: Experiment
    device: str
    output: Path
    watch: Stopwatch
    progress: Progress
    tried: list[str] = field(default_factory=list)
    samples: int = 0
    plan: int = 0
    calibration: Calibration | None = None
    told_s: float = 0.0
    patch: Patch | None = None
    work: StepWork | None = None
    known_baseline: KnownBaseline | None = None
    looks: bool = False
    quiet: Quiet = field(default_factory=Unshared)

    def __post_init__(self) -> None:
        e = self.experiment
        e.workload = e.workload.resolve(torch.device(self.device).type)
        self.workload = e.workload
        self.settings = e.measurement
        self.draws = Draws.of(e.replay)
        self.files = Files.now()
        self.texts = {str(file.resolve()): digest(file.read_bytes()) for file in named(self._config())}
        self.stack, self.baseline = Composed(e.strategies), Composed(e.baseline)
        self.result = Result(
            verdict=Verdict.ERROR,
            headline="",
            workload=e.workload.name,
            strategy=list((self.baseline if e.mode == "profile" else self.stack).labels),
            device=self.device,
            seed=e.seed,
            environment=describe_environment(torch.device(self.device)),
            config=self._config(),
            id=uuid4().hex,
            compared=e.compared,
        )
        self.machine = Machine.claim(self.device, self.settings.cpus)
        if self.machine.gpu is None and self.machine.on_gpu:
            e.notes.append(UNREAD)
        if self.settings.l2 != "warm" and not (self.machine.on_gpu and self.workload.operation):
            e.notes.append(f"measurement.l2={self.settings.l2}: only a single operation on a GPU is measured that way")
            self.settings = replace(self.settings, l2="warm")
        if self.quiet.others:
            e.notes.append("other comparisons shared the device: set-up times include theirs")
        timed = e.verify != "only" and e.mode != "profile" and not self.settings.trials
        if timed and not self.isolated:  # one process holds all arms, so there is no spread between processes
            try:
                self.settings = replace(self.settings, processes_min=1, processes_max=1)
            except ValueError as reason:
                raise ConfigError(f"isolation=none measures one process: {reason}") from None
        cores = self.machine.cores
        logs, caches = self.output / "arms", self._empty_caches()
        self.pool = ArmPool(self.device, self.isolated, logs, e.timeout_s, self.workload.preload, caches)
        self.result.fingerprint = fingerprint(self.result, len(cores))
        self.result.notes, self.result.draws = list(e.notes), self.draws
        count = f"{len(cores)} core{'s' if len(cores) > 1 else ''}"
        self.result.placement = Placement(cores, f"both arms bound to the same {count}")

    def _config(self) -> dict[str, Any]:
        e = self.experiment
        sizes = {f"workload.{key}": value for key, value in asdict(e.workload).items()}
        return e.resolved | sizes | {"device": self.device}

    def choose(self, stack: Sequence[Strategy]) -> None:
        """Make `stack` the candidate, for a mode that searches for it."""
        e = self.experiment
        self.experiment = replace(comparing(e, stack, e.baseline, mode=e.mode), notes=e.notes)
        self.stack = Composed(stack)
        self.result.strategy, self.result.config = list(self.stack.labels), self._config()
        self.result.fingerprint = fingerprint(self.result, len(self.machine.cores))

    @property
    def contract(self) -> Contract:
        """The candidate's contract."""
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
        """Count the block's time as a phase, and show the phase to the user."""
        self.progress.phase(phase, text)
        with self.watch.phase(phase):
            yield

    def begin_quiet(self) -> None:
        """Before a program is timed: pause others that share the card, and wait until what they launched has ended."""
        if self.quiet.others:
            with self.working("wait", "other comparisons on this card"):
                self.quiet.begin()
                if self.machine.gpu:
                    self.machine.gpu.until_idle()

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """The block has the card to itself."""
        self.begin_quiet()
        try:
            yield
        finally:
            self.quiet.end()

    def neighbours(self, since_s: float | None = None) -> tuple[list[str], int]:
        """Other programs on the card; see `optexp.measurement.neighbours`. Comparisons that share it are none while
        they are paused."""
        gpu = self.machine.gpu
        return neighbours(gpu, self.pool.processes(), since_s, self.quiet.others) if gpu else ([], 0)

    def looking_out(self, since_s: float, met: dict[str, str]) -> Read:
        """A function that reads the card, if there is one, and adds other programs on it to `met`."""
        gpu = self.machine.gpu
        return looking_out(gpu, self.pool.processes(), since_s, met, self.quiet.others) if gpu else lambda: None

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
            device=self.pool.arm_device,
            dtype=e.dtype,
            seed=e.seed + seed_offset,
            # Verified arms and timed arms meet different batches.
            draws=self.draws.seed("examined" if generic else "batches", seed_offset),
            contract=judges,
            cores=tuple(self.machine.cores),
            folders=self.machine.folders,
            autocast=autocast,
            generic=generic,
            plan=self.plan,
            sharing=self.quiet.sharing,
        )

    def learn(self, bare: SetUp, setups: Iterable[SetUp], judge: WorkloadInfo | None = None) -> None:
        """Take the workload's properties from the arms that built it.

        Raises:
            NoReference: The arms built different models.
        """
        self.samples, built = bare.workload.samples, bare.workload.built
        self.plan = max([self.plan, *(setup.plan for setup in setups)])
        if self.plan:
            self.result.notes += self.on_memory(bare.batch_bytes)
        notes = self.result.notes
        notes += [remark for remark in bare.workload.remarks if remark not in notes]
        infos = [*((setup.workload, setup.rebuilt) for setup in setups), *([(judge, False)] if judge else [])]
        for info, rebuilt in infos:
            modes = bare.workload.kept_modes
            if odd := [name for name, kept in info.kept_modes.items() if kept is not modes.get(name, kept)]:
                raise NoReference(OTHER_MODES.format(odd[0]))
            if different := [name for name, value in info.built.items() if built.get(name, value) != value]:
                tensor = different[0].partition("/")[2]
                sums = ((float(built[name]), float(info.built[name])) for name in different)
                if all(isclose(*pair, rel_tol=BY_ROUNDING) for pair in sums):
                    raise NoReference(ROUNDED.format("the second program" if rebuilt else "each process", tensor))
                raise NoReference(OTHER_VALUES.format(tensor) if rebuilt else UNLIKE.format(tensor))

    def calibrated(self, calibration: Calibration) -> Calibration:
        """Set the device's ceilings; a CPU's are the highest that this comparison has seen."""
        self.calibration = self.result.profile.calibration = together(self.calibration, calibration)
        return self.calibration

    @property
    def in_turns(self) -> bool:
        """Whether an arm that waits gives its memory back."""
        return PLANS[self.plan].in_turns

    def on_memory(self, batch_bytes: float) -> list[str]:
        """Notes on the memory plan and its costs, without those that the result has already."""
        plan, said = PLANS[self.plan], self.result.notes
        notes = [f"memory: a batch has {batch_bytes / 2**30:.3g} GiB: {plan.describe()}"]
        if plan.batches == 1:
            notes.append(
                "with one distinct batch, a result that is kept and handed out again shows on fresh inputs alone, and"
                " not in what was timed"
            )
        return [note for note in notes if note not in said]

    def forecast(self, arm: Client[Arm], told: SetUp, setup_s: float, verified: int) -> None:
        """Note early how long a comparison of several minutes takes, and which preset takes less.

        Args:
            arm: The baseline's.
            told: Its answer when it was set up beside other arms.
            setup_s: Of the slower arm.
            verified: Number of steps that are checked on each set of inputs.

        Raises:
            Failure: A search has by far less time left.
        """
        workload, trains = self.workload, self.workload.mode != "forward"
        families = len(workload.families) - 1
        steps = Steps(told.step_s, told.compute_s, setup_s, verified, trains, workload.mode == "train", families)
        measured = self.experiment.verify != "only" and not self.settings.trials
        seconds = total_s(steps, self.settings, measured)
        if seconds > BY_FAR * (left_s := self.pool.until_s - time.monotonic()):
            raise Failure(SPENT, f"this takes about {rough(seconds)}, and {duration(max(left_s, 0.0))} are left: ended")
        if seconds < TOLD_S:
            text = late(self.told_s, self.watch.total, seconds) if self.told_s else ""
            self.progress.expect(seconds, text and f"optexp: {text}")
            return
        wall_s, compute_s = arm.call(Arm.one_step)
        steps = replace(steps, wall_s=wall_s, compute_s=compute_s)
        quick: MeasurementSettings = build(search_path.compose(["measurement=quick"]).measurement, "measurement")
        if text := announcement(steps, self.settings, measured, {"quick": quick}):
            self.result.notes.append(text)
            self.progress.update(text, remaining_s=total_s(steps, self.settings, measured))

    def retry_with_less_memory(self, failure: Failure) -> bool:
        """Choose the next plan, which needs less memory, after memory ran out; False where there is none, or where the
        comparison is made again with the card to itself."""
        following = thriftier(self.plan)
        if failure.type != OUT_OF_MEMORY or following is None or self.quiet.again_alone:
            return False
        tried, self.plan = PLANS[self.plan], following
        self.tried = [*self.tried, tried.describe()]
        self.result.notes.append(f"memory: {failure.worker or 'an arm'} ran out with {tried.describe()}")
        self.pool.end_workers()
        return True

    def set_up(
        self, specs: Mapping[str, Spec], judge: Spec, first: Sequence[str] = ()
    ) -> tuple[dict[str, Client[Arm]], Client[Reference], dict[str, SetUp], WorkloadInfo]:
        """Arms and the reference, as memory allows; see `ArmPool.set_up`."""
        return self.pool.set_up(specs, judge, first, self.in_turns)

    def check_identities(self, arms: Mapping[str, Client[Arm]]) -> None:
        """Compare each arm's own name and stack with those that the session gave it.

        Raises:
            Distrusted: An arm stands in another's place, or runs another version's code, or another text of a file.
        """
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
            self.pool.check_home(name, arm)
            if not self.isolated:  # this process keeps what it has imported for all comparisons
                continue
            changed = [path for path, text in said.texts.items() if self.texts.setdefault(path, text) != text]
            if changed:
                raise Distrusted(f"{', '.join(changed[:3])} changed while optexp ran: not all arms ran the same text")

    def refuse_edits(self) -> None:
        """Check the files that decide a verdict.

        Raises:
            Distrusted: One was edited since the comparison began.
        """
        if edits := self.files.edits():
            raise Distrusted(edits)

    @property
    def cold_caches(self) -> bool:
        """Whether compilers begin with empty caches."""
        return self.settings.cold_caches and self.isolated

    def _empty_caches(self) -> dict[str, str]:
        """Environment variables that put compile caches into this comparison's own folder; none with warm caches."""
        names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR") if self.cold_caches else ()
        return {name: str(Path(self.machine.folders[-1]) / name.lower()) for name in names}

    def close(self) -> None:
        """End every process of this comparison, and release its cores and folders."""
        self.pool.close()
        if not self.isolated:
            self.machine.restore_process()
        self.machine.release()


@contextmanager
def alongside(work: Callable[[], None]) -> Iterator[None]:
    """Do `work` in a thread while the block waits for other processes."""
    thread = Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def fingerprint(result: Result, cores: int) -> str:
    """Equal fingerprints may be compared: same schema, work, stack, measurement settings, device and versions."""
    facts = [
        SCHEMA,
        {key: value for key, value in result.config.items() if key.partition(".")[0] not in NOT_COMPARED},
        result.environment.get("gpu") or result.environment.get("cpu"),
        [result.environment.get(key) for key in ("torch", "triton", "cuda")],
        [platform.machine(), cores],
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]
