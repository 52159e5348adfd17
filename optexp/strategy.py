"""One optimization as an object that turns a `Program` into another, and how several are stacked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import IntEnum
from functools import total_ordering
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from optexp.errors import NotCovered
from optexp.errors import Unsupported as Unsupported  # extensions import these from here
from optexp.errors import first_line as first_line
from optexp.errors import refusing as refusing

if TYPE_CHECKING:
    import torch

    from optexp.profiling.bounds import Bound
    from optexp.profiling.view import View
    from optexp.program import Program
    from optexp.records.profile import Calibration
    from optexp.trace import Trace
    from optexp.workload import Workload

Notes = dict[str, Any]  # picklable facts that `apply` found out: patterns replaced, modules compiled, ...
Counters = Mapping[str, float]  # what the arm counted while it ran: dynamo's counters, ..., as "group/name"


class Stage(IntEnum):
    """The order in which a stack is folded, however it was listed; ties by name."""

    MODEL = 0  # another implementation takes the model's place, for all others to work on
    REWRITE = 1
    LAYOUT = 2  # how tensors lie in memory
    PRECISION = 3
    OPTIMIZER = 4
    COMPILE = 5
    STREAMS = 6
    FEED = 7
    MEMORY = 8
    CAPTURE = 9


NAME = "_yaml"  # attribute of a strategy: the name that its YAML gives it
PRECISIONS = ("bfloat16", "float16", "tf32", "int8")  # to which there is a plain autocast or rounding, as a yardstick


@total_ordering
@dataclass(frozen=True)
class Contract:
    """A strategy's promise about numbers.

    level: a larger one promises less
    name:  BITWISE, REASSOCIATES or PRECISION
    dtype: one of `PRECISIONS`, by whose limits results are judged; None for the program's own

    Raises:
        Unsupported: `dtype` is none of `PRECISIONS`.
    """

    level: int
    name: str
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (None, *PRECISIONS):
            raise Unsupported(f"{self} is no promise that can be checked: promise one of {', '.join(PRECISIONS)}")

    def __lt__(self, other: Contract) -> bool:
        return (self.level, self.dtype or "") < (other.level, other.dtype or "")

    def __str__(self) -> str:
        return f"{self.name}({self.dtype})" if self.dtype else self.name


BITWISE = Contract(0, "BITWISE")
REASSOCIATES = Contract(1, "REASSOCIATES")


def precision(dtype: str) -> Contract:
    """PRECISION(dtype): the arithmetic of plain autocast to `dtype`, or of matrices rounded to int8.

    Args:
        dtype: One of `PRECISIONS`.

    Raises:
        Unsupported: there is no plain autocast to `dtype`.
    """
    # float16 and tf32 keep 11 bits, bfloat16 8, int8 7 of a tensor's largest value: the weakest promise sorts last.
    return Contract({"bfloat16": 3, "int8": 4}.get(dtype, 2), "PRECISION", dtype)


@dataclass(frozen=True)
class Evidence:
    """The proof that a strategy engaged, or the reason why it did not."""

    engaged: bool
    text: str


@dataclass(frozen=True)
class Remedy:
    """A strategy's answer to a bottleneck.

    against: name of the bottleneck's cause (`optexp.profiling.diagnosis`)
    rank:    of all answers to one cause, the lowest is tried first
    options: fields of the strategy that differ from their defaults in this answer
    """

    against: str
    rank: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class UserFile:
    """A user's file as `Strategy.patch` sees it: names that the file binds, and how they are used.

    device:      type of the device that the stack was measured on
    mode:        of the workload: forward, forward_backward or train
    model:       name of the model's class or function
    forward:     what a call of the model runs, to be bound anew: `Model.forward`; of a function, its name
    loss, optimizer, loader, train_step: names; None where the step uses none of the file
    missing:     by the name of such a part, the reason
    """

    device: str
    mode: str
    model: str
    forward: str
    loss: str | None = None
    optimizer: str | None = None
    loader: str | None = None
    train_step: str | None = None
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def calls(self) -> list[str]:
        """The function that runs the model, and the one that runs a loss outside `train_step`; to be bound anew.

        Raises:
            NotCovered: the loss is not the file's.
        """
        return [self.forward] if self.mode == "forward" or self.train_step else [self.forward, self.part("loss")]

    def part(self, name: str) -> str:
        """The name that the file gives a part.

        Raises:
            NotCovered: the step uses no such part of the file.
        """
        if found := getattr(self, name):
            return str(found)
        raise NotCovered(self.missing.get(name, f"the file has no {name}"))


@dataclass
class Strategy(ABC):
    """One optimization. The dataclass's fields are the keys of its YAML, checked for name and type."""

    stage: ClassVar[Stage]
    preload: ClassVar[tuple[str, ...]] = ()  # slow imports of `workers.pool.SHARED`, made once before arms are forked
    # Options that a search (mode=auto) tries too, each as the fields that differ; those of `remedies` are tried anyway.
    variants: ClassVar[Sequence[Mapping[str, Any]]] = ()
    level: ClassVar[str] = ""  # kernel, system, memory or application; of the report's checklist, else by the stage

    @property
    def name(self) -> str:
        """The name used on the command line: the YAML's, or the Python file's where no YAML asked for it."""
        return str(vars(self).get(NAME) or filed(self))

    @property
    def contract(self) -> Contract:
        """The promise about numbers that verification holds the strategy to."""
        return REASSOCIATES

    @property
    def provides(self) -> frozenset[str]:
        """Traits that others may require or exclude; a stage's name in lower case is always provided."""
        return frozenset()

    @property
    def requires(self) -> frozenset[str]:
        """Traits or names of strategies that another member of the stack has to provide."""
        return frozenset()

    @property
    def excludes(self) -> frozenset[str]:
        """Traits or names of strategies that no other member of the stack may have."""
        return frozenset()

    @property
    def overwrites(self) -> bool:
        """Whether a step writes its outputs over those of the step before: a caller that keeps them must copy them."""
        return False

    @property
    def changes(self) -> frozenset[str]:
        """Global settings that stay changed (see `optexp.equivalence.process_state`); others are reported."""
        return frozenset()

    @property
    def remedies(self) -> tuple[Remedy, ...]:
        """Causes of bottlenecks that this strategy answers; reports propose it against them."""
        return ()

    def helps(self, trace: Trace, calibration: Calibration | None) -> bool:
        """Whether the strategy can gain anything on the profiled program, as where that does not use it already.

        Args:
            trace: Steps of the program.
            calibration: Measured ceilings of the device; None if unknown.
        """
        return True

    def bound(self, view: View, ceilings: Calibration | None) -> Bound | None:
        """The shortest step that this strategy alone, with these options, can give on a profiled program.

        Where in doubt, shorter: a measurement below it is reported as an error. Of a step, `view.parts(ceilings)` has
        what strategies shorten, and makes the bound.

        Args:
            view: The program's trace and breakdown.
            ceilings: Of the device; None if unknown.

        Returns:
            None where nothing is known.
        """
        return None

    def check_options(self) -> None:
        """Raises ConfigError where what an option names is not there; called before anything is started."""
        return

    def environment(self) -> Mapping[str, str]:
        """Environment variables that an arm with this strategy starts with (torch reads some when it loads)."""
        return {}

    def limit(self, error: Exception) -> str | None:
        """The reason for UNSUPPORTED, and the remedy, where the error of a step is a known limit of this strategy.

        Args:
            error: Raised by `apply`, or by the first steps of a program that the plain one takes without an error.
        """
        return None

    def rebuild(self, workload: Workload) -> Workload:
        """The workload that the arm builds its plain program of; nothing of the user's runs here."""
        return workload

    def unsupported(self, program: Program, device: torch.device) -> str | None:
        """The reason why the strategy cannot apply to this program on this device, with advice; None where it can."""
        return self.unsupported_on(device)

    def unsupported_on(self, device: torch.device) -> str | None:
        """The same as far as `device.type` decides, whatever the program is: asked before an arm starts."""
        return None

    @abstractmethod
    def apply(self, program: Program) -> tuple[Program, Notes]:
        """The optimized program, and notes for `evidence`, `recipe` and the record.

        Args:
            program: The plain program, or the one that earlier stages made. It stays unchanged: `dataclasses.replace`
                makes the next one.

        Raises:
            Unsupported: the strategy cannot apply, as found out while applying it; the message says what to do.
        """

    @abstractmethod
    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        """The proof that the optimization engaged, from profiles, notes and counters.

        Args:
            before: Steps of the baseline.
            after: Steps of the candidate.
            notes: Of `apply`.
            counters: Counts of the candidate's process by "group/name", as those of dynamo.
        """

    def recipe(self, notes: Notes) -> str:
        """The same optimization in plain PyTorch: lines of `repro.py`, which runs the program without optexp.

        That file first makes the plain program out of names of its module; then come the recipes of the stack, in the
        order of their stages, as lines of the same module that assign some of the names anew (`notes` are `apply`'s):

            device, model       as in `Program`
            forward             begins as `model`; `predict(batch)` calls it: forward = torch.compile(forward)
            loss_fn             loss_fn(output, batch), or None
            optimizer, scaler   or None; the plain step scales the loss where there is a scaler
            step                step(batch) -> output or loss; looks `predict`, `loss_fn`, `optimizer`, `scaler` up when
                                it is called. Wrap it by `def step(batch, plain=step): ...`
            batches             iterator without end over batches on the device, each a tuple of tensors
            loader, bring       where bringing batches is part of the work: DataLoader(**loader_options), or a list of
                                batches in host memory; and bring(batch), their way to the device. `batches` looks both
                                up when the first batch is asked for
            pool                a memory pool, or None

        `torch`, `nn` and `F` are imported; other imports belong to the recipe. It may use functions and classes of its
        strategy's file, and those that they use: their source is copied in front. Variables of `environment()` are set
        at the top by themselves. Where nothing can be said, "": the file then says that this part is missing.
        """
        return ""

    def patch(self, notes: Notes, file: UserFile) -> str:
        """The same optimization as lines for a user's own file: `optimized.patch` adds them behind its definitions.

        The lines bind the file's names anew, as in `Model.forward = torch.compile(Model.forward)`; patches of a stack
        follow each other in the order of its stages. They are plain PyTorch that a reader of the file understands, and
        they leave what the file means to others as it is: a rewriting for inference must not reach training. `torch` is
        imported; other imports stand at the top of the lines, at their left edge.

        Args:
            notes: Of `apply`.
            file: Names that the file binds.

        Raises:
            NotCovered: a file cannot hold the optimization; the message says why. No patch is written then.
        """
        raise NotCovered("it changes nothing that has a name in the file")

    @property
    def label(self) -> str:
        """Name and the fields that differ from their default: `fusion[mode=max-autotune]`."""
        changed = ",".join(f"{name}={value}" for name, value in self.changed_options.items())
        return f"{self.name}[{changed}]" if changed else self.name

    @property
    def changed_options(self) -> Mapping[str, Any]:
        """Fields that differ from their default."""
        plain = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(self)}
        return {name: getattr(self, name) for name, value in plain.items() if getattr(self, name) != value}


def grouped(counters: Counters, name: str) -> dict[str, float]:
    """Counters of one group, by name.

    The group "claimed" holds the regions that a strategy of its own had torch.compile make, by compile id.
    """
    return {key.partition("/")[2]: count for key, count in counters.items() if key.partition("/")[0] == name}


Stack = Sequence[Strategy]
S = TypeVar("S", bound=Strategy)


class Composed(list[Strategy]):
    """Strategies with their labels and contract, asked once, so that all callers get the same answers.

    labels:   of each member, as on the command line
    contract: the weakest member's promise; BITWISE for the empty stack, which is the baseline itself
    """

    labels: list[str]
    contract: Contract

    def __init__(self, strategies: Iterable[Strategy]) -> None:
        super().__init__(strategies)
        if isinstance(strategies, Composed):
            self.labels, self.contract = strategies.labels, strategies.contract
        else:
            self.labels = [s.label for s in self]
            promises = (s.contract for s in self)
            # A strategy that is judged by the limits of a dtype promises that precision, under any name.
            self.contract = max((precision(p.dtype) if p.dtype else p for p in promises), default=BITWISE)


def compose(strategies: Stack) -> list[Strategy]:
    """The stack in the order of its stages, ties by name.

    Raises:
        Unsupported: a member is there twice, misses a requirement, excludes another, or needs another value of an
            environment variable; or two members compile or capture.
    """
    stack = sorted(strategies, key=lambda s: (s.stage, s.name))
    if twice := [name for name, count in Counter(s.name for s in stack).items() if count > 1]:
        raise Unsupported(f"{twice[0]} is twice in the stack: leave one out, or give one a YAML of another name")
    for trait in ("compile", "capture"):
        members = [s.name for s in stack if trait in traits(s)]
        if len(members) > 1:
            raise Unsupported(
                f"{' and '.join(members)} both {trait} the program; a stack can {trait} once: leave one out"
                + (" (or use strategy.fusion.mode=default)" if trait == "capture" and "fusion" in members else "")
            )
    for strategy in stack:
        others = [s for s in stack if s is not strategy]
        provided = frozenset().union(*(traits(s) | names(s) for s in others))
        if missing := strategy.requires - provided:
            raise Unsupported(f"{strategy.name} needs {' and '.join(sorted(missing))} in the stack: add it")
        if clash := [s.label for s in others if strategy.excludes & (traits(s) | names(s))]:
            raise Unsupported(f"{strategy.label} does not work with {' and '.join(clash)}: leave one out")
    environment(stack)  # refuses members that disagree
    return stack


def traits(strategy: Strategy) -> frozenset[str]:
    """Traits that a strategy provides, its stage's name included."""
    return strategy.provides | {strategy.stage.name.lower()}


def names(strategy: Strategy) -> frozenset[str]:
    """Names by which others require or exclude a strategy: its YAML's and its Python file's."""
    return frozenset({strategy.name, filed(strategy)})


def filed(strategy: Strategy) -> str:
    """Name of a strategy's Python file."""
    return type(strategy).__module__.rpartition(".")[2]


def named(strategy: S, name: str) -> S:
    """The same object, named after its YAML: a file may hold several classes, and a class may serve several YAMLs."""
    setattr(strategy, NAME, name)  # no field, which would be an option
    return strategy


def captures(stack: Stack) -> bool:
    """Whether a member records the program or its model in a CUDA graph."""
    return any("capture" in traits(strategy) for strategy in stack)


def contract(stack: Stack) -> Contract:
    """Promise of a stack: the weakest of its members'."""
    return Composed(stack).contract


def label(stack: Stack) -> str:
    """`amp+cuda_graph`, or `baseline` for the empty stack."""
    return "+".join(Composed(stack).labels) or "baseline"


def environment(stack: Stack) -> dict[str, str]:
    """Environment variables of all members.

    Raises:
        Unsupported: two members need different values of one variable.
    """
    merged: dict[str, tuple[str, Strategy]] = {}
    for strategy in stack:
        for name, value in strategy.environment().items():
            other, by = merged.setdefault(name, (value, strategy))
            if other != value:
                raise Unsupported(
                    f"{strategy.name} needs {name}={value} and {by.name} needs {name}={other}: leave one out"
                )
    return {name: value for name, (value, _) in merged.items()}
