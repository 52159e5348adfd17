"""The user's own code as a workload: what they give is taken as it is, what is missing gets a default that is reported.

Nothing of it runs before `build`, which happens in an arm: importing a user's file may do anything.
"""

from __future__ import annotations

import copy
import inspect
import random
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import Any, Self

import cloudpickle
import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from optexp.config import ConfigError, suggest
from optexp.feeds import LoaderFeed
from optexp.program import STEPS, Batch, Feed, Program, ResidentFeed, flatten, map_batch, prime, tensors_of
from optexp.trainstep import TrainStep
from optexp.workload import Workload

LOSSES = {name: loss for name, loss in vars(F).items() if name.endswith(("_loss", "entropy", "_logits", "kl_div"))}
LOSSES |= {name: loss for name, loss in vars(nn).items() if name.endswith("Loss")}
OPTIMIZERS = {
    name: value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
}


@dataclass
class Parts:
    """What a user's code gives: a model, where its batches come from, and, if they like, how it learns.

    model():                              a new model
    inputs(dims, device):                 what one call of the model takes: tensors, and values that stay the same
    loader():                             the batches of the user's own training loop; instead of `inputs`
    loss(outputs, batch):                 a scalar
    optimizer(parameters):                an optimizer
    train_step(model, batch, optimizer):  one optimizer step; instead of loss, backward and step
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[Mapping[str, int], torch.device], Any] | None = None
    loader: Callable[[], Any] | None = None
    loss: Callable[[Any, Any], Tensor] | None = None
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    train_step: Callable[..., Any] | None = None


@dataclass
class Layout:
    """What a batch is made of, by name, or by position ("0", "1"): inputs first, then what only the loss sees."""

    names: list[str]
    labels: list[str]
    constants: dict[str, Any]
    integer_labels: bool

    @property
    def plain(self) -> bool:
        """Whether a tuple says it all."""
        return not self.constants and all(name.isdigit() for name in self.names)


@dataclass
class Own(Workload):
    """loss, optimizer:  names in torch.nn.functional or torch.nn, and in torch.optim; before what the code itself gives
    labels:            how many entries at a batch's end only the loss sees; None finds out
    shapes:            values of named sizes, which take turns
    """

    loss: str | None = None  # type: ignore[assignment]  # here a name; `build` finds what it stands for
    loss_args: dict[str, Any] = field(default_factory=dict)
    optimizer: str | None = None  # type: ignore[assignment]
    optimizer_args: dict[str, Any] = field(default_factory=dict)
    lr: float = 1e-3
    labels: int | None = None
    shapes: list[dict[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for key, value, known in (("loss", self.loss, LOSSES), ("optimizer", self.optimizer, OPTIMIZERS)):
            if value is not None and value not in known:
                raise ValueError(f"{key}={value} is not a choice{suggest(value, known)}")

    @abstractmethod
    def load(self) -> Parts:
        """Import or unpack the user's code; `ConfigError` where something is missing."""

    @cached_property
    def parts(self) -> Parts:
        return self.load()

    # --- a workload ---------------------------------------------------------------------------------------------

    def resolve(self, device: str) -> Self:
        return self

    @property
    def samples(self) -> int:
        """The mean leading size of the batches drawn last."""
        return round(sum(self.sizes) / len(self.sizes))

    @property
    def variety(self) -> int:
        return max(1, len(self.shapes))

    @property
    def targets(self) -> int:
        return len(self.layout.labels)

    def notes(self) -> list[str]:
        return list(dict.fromkeys(self.remarks))

    def model(self) -> nn.Module:
        return self.parts.model()

    def batch(self, generator: torch.Generator) -> Batch:
        return self.batches(generator, 1)[0]

    def batches(self, generator: torch.Generator, count: int) -> list[Batch]:
        batches = [map_batch(lambda t: t.to(generator.device), self.pack(g)) for g in self.give(generator, count)]
        self.sizes = [_leading(tensors_of(batch)) for batch in batches]
        return batches

    def feed(self, device: torch.device, dtype: torch.dtype) -> Feed:
        if self.parts.loader is None:
            return ResidentFeed(device)
        loader = copy.copy(self.loader())
        loader.collate_fn = Then(loader.collate_fn, self.pack)
        return LoaderFeed(loader, device, dtype)

    def build(self, device: torch.device, dtype: torch.dtype, seed: int) -> Program:
        self.remarks: list[str] = []
        parts, trains, learns = self.parts, self.mode != "forward", self.mode == "train"
        seed_all(seed)
        model = parts.model()
        self.note_conversion("parameters", model.parameters(), dtype)
        model = model.to(device=device, dtype=dtype)
        model.train(trains)
        if trains and not any(p.requires_grad for p in model.parameters()):
            raise ConfigError(f"workload.mode={self.mode}: the model has no parameters to train: use mode=forward")
        self.layout = self.learn_layout(model, device, dtype)
        own_step = parts.train_step if learns else None
        if parts.train_step is not None and not learns:
            self.remarks.append("train_step is not used: workload.mode=train does")
        program = Program(
            model=model,
            step=TrainStep(own_step, self.unpack) if own_step else STEPS[self.mode],
            feed=self.feed(device, dtype),
            loss=self.criterion() if trains and not own_step else None,
            targets=self.targets,
            constants=self.layout.constants,
            optimizer=self.new_optimizer(model) if learns else None,
        )
        prime(program)
        return program

    # --- batches ------------------------------------------------------------------------------------------------

    def give(self, generator: torch.Generator, count: int) -> list[Any]:
        """`count` batches as the user's code makes them; equal generators give equal ones."""
        seed_all(int(torch.randint(2**62, (1,), generator=generator, device=generator.device)))
        if self.parts.loader is not None:
            if self.shapes:
                raise ConfigError("workload.shapes are sizes of inputs, and batches come from a loader: leave them out")
            loader = copy.copy(self.loader())
            loader.num_workers = loader.timeout = 0  # a few batches are not worth a process
            return list(islice(_endless(loader), count))
        if self.parts.inputs is None:
            raise ConfigError("the workload has no inputs")
        kinds: Sequence[Mapping[str, int]] = self.shapes or [{}]
        return [self.parts.inputs(kinds[index % len(kinds)], generator.device) for index in range(count)]

    def loader(self) -> DataLoader[Any]:
        """The user's own; what else can be iterated becomes one."""
        assert self.parts.loader is not None
        given = self.parts.loader()
        if isinstance(given, DataLoader):
            return given
        if not isinstance(given, Iterable):
            raise ConfigError(f"the loader is a {type(given).__name__}: it must give batches, as a DataLoader does")
        return DataLoader(_Iterated(given), batch_size=None)

    @cached_property
    def layout(self) -> Layout:
        return self.learn_layout(self.model(), torch.device("cpu"), torch.float32)

    def learn_layout(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> Layout:
        """Look at one batch, and at what the model's `forward` takes."""
        self.remarks = self.__dict__.get("remarks", [])
        given = self.give(torch.Generator(device).manual_seed(0), 1)[0]
        tensors, constants = divide(given)
        if not tensors:
            raise ConfigError(f"a batch is {kind(given)}: there is no tensor in it")
        self.sizes = [_leading(tensors)]
        self.note_conversion("inputs", tensors.values(), dtype)
        if constants and self.parts.loader is not None:
            dropped = ", ".join(constants)
            if not isinstance(given, Mapping):
                raise ConfigError(f"a batch of the loader is {kind(given)}: make it tensors, in the loader's collate_fn")
            self.remarks.append(f"left out of the batches, because it is no tensor: {dropped}")
            constants = {}
        labels = self.find_labels(list(tensors), model)
        inputs = [name for name in tensors if name not in labels]
        integer = bool(labels) and not tensors[labels[-1]].is_floating_point()
        return Layout([*inputs, *labels], labels, constants, integer)

    def find_labels(self, names: list[str], model: nn.Module) -> list[str]:
        if self.labels is not None:
            return names[max(0, len(names) - self.labels) :]
        positions, keywords = accepted(model)
        found = [n for n in names if (int(n) >= positions if n.isdigit() else keywords is not None and n not in keywords)]
        learns = self.loss is not None or (names[-1].isdigit() and (self.parts.loss or self.parts.loader))
        if not found and learns and len(names) > 1:
            found = names[-1:]
        if found:
            self.remarks.append(f"not given to the model: {_entries(found)} of a batch (workload.labels)")
        return found

    def pack(self, given: Any) -> Batch:
        """A batch of the user's, as a program takes it."""
        tensors, _ = divide(given)
        if tensors.keys() != set(self.layout.names):
            raise ConfigError(f"batches differ: the first has {_entries(self.layout.names)}, another {_entries(tensors)}")
        batch = {name: tensors[name] for name in self.layout.names}
        return tuple(batch.values()) if self.layout.plain else batch

    def unpack(self, batch: Batch) -> Any:
        """A program's batch, as the user's code makes it."""
        if isinstance(batch, tuple):
            return batch
        entries = {**batch, **self.layout.constants}
        if all(name.isdigit() for name in entries):
            return tuple(entries[name] for name in sorted(entries, key=int))
        return entries

    # --- learning -----------------------------------------------------------------------------------------------

    def criterion(self) -> Callable[[Any, Batch], Tensor]:
        """loss(output, batch) of a program."""
        count = self.targets
        if self.loss is not None:
            return against(bound(LOSSES[self.loss], self.loss_args), self.needed_labels(self.loss))
        if (given := self.parts.loss) is not None:
            if by_label(given):
                return against(given, self.needed_labels("loss"))
            return lambda output, batch: given(output, self.unpack(batch))
        if count:
            name = "cross_entropy" if self.layout.integer_labels else "mse_loss"
            self.remarks.append(f"loss: {name}, because none was given (workload.loss=)")
            return against(LOSSES[name], count)
        self.remarks.append("loss: the output's own, else the mean of its squares, because none was given (workload.loss=)")
        return _own_loss

    def needed_labels(self, name: str) -> int:
        if not self.targets:
            raise ConfigError(f"{name} compares outputs with a target, and a batch has none: add one to the inputs")
        return self.targets

    def new_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        if self.optimizer is None and self.parts.optimizer is not None:
            made = self.parts.optimizer(parameters)
            if not isinstance(made, torch.optim.Optimizer):
                raise ConfigError(f"get_optimizer(params) returned {kind(made)}: it must be a torch.optim.Optimizer")
            return made
        if self.optimizer is None:
            self.remarks.append(f"optimizer: AdamW with lr={self.lr:g}, because none was given (workload.optimizer=)")
        cls: Any = OPTIMIZERS[self.optimizer or "AdamW"]
        made = cls([p for p in parameters if p.requires_grad], lr=self.lr, **self.optimizer_args)
        assert isinstance(made, torch.optim.Optimizer)
        return made

    def note_conversion(self, what: str, tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
        """Say so where the user's code chose a precision, and `dtype=` overrides it."""
        found = {t.dtype for t in tensors if t.is_floating_point()} - {dtype, torch.float32}
        if found:
            names = ", ".join(sorted(_name(other) for other in found))
            self.remarks.append(f"{what} in {names} became {_name(dtype)} (dtype=)")


# --- models ------------------------------------------------------------------------------------------------------


def maker(given: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, key: str = "model") -> Any:
    """How to get a new model from what the user named: a class, a factory, a function to time, or an instance."""
    kwargs = kwargs or {}
    if isinstance(given, nn.Module):
        return Copies(given)
    if isinstance(given, type) and issubclass(given, nn.Module):
        return partial(given, *args, **kwargs)
    if not callable(given):
        raise ConfigError(f"{key} is {kind(given)}: it must be an nn.Module, its class, a factory or a function")
    return partial(_make, given, tuple(args), dict(kwargs), key)


class Copies:
    """A new copy of one model each time; a copy that is pickled also reaches another process."""

    def __init__(self, model: nn.Module) -> None:
        self.packed = travelling("model", model)

    def __call__(self) -> nn.Module:
        model = cloudpickle.loads(self.packed)
        assert isinstance(model, nn.Module)
        return model


class Function(nn.Module):
    """A function where a model is expected."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _make(given: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], key: str) -> nn.Module:
    try:
        inspect.signature(given).bind(*args, **kwargs)
    except (TypeError, ValueError):  # it wants more: that is what the inputs are for; or it is no Python function
        return Function(partial(given, *args, **kwargs) if args or kwargs else given)
    made = given(*args, **kwargs)
    if not callable(made):
        raise ConfigError(f"{key}, called without inputs, returned {kind(made)}: a factory must return an nn.Module")
    return made if isinstance(made, nn.Module) else Function(made)


def travelling(what: str, value: Any) -> bytes:
    """Pickled, classes of a notebook included; or what to do where that is impossible."""
    try:
        packed: bytes = cloudpickle.dumps(value)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason given'}"
        raise ConfigError(
            f"{what} cannot be copied to another process ({reason}): give a function that makes it instead"
        ) from error
    return packed


def accepted(model: nn.Module) -> tuple[float, set[str] | None]:
    """How many positional arguments `forward` takes, and the names of its arguments (None: any)."""
    try:
        function = model.function if isinstance(model, Function) else model.forward
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return float("inf"), None
    kinds = [p.kind for p in parameters]
    positional = sum(k in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for k in kinds)
    unlimited = inspect.Parameter.VAR_POSITIONAL in kinds
    any_name = inspect.Parameter.VAR_KEYWORD in kinds
    return float("inf") if unlimited else positional, None if any_name else {p.name for p in parameters}


# --- losses ------------------------------------------------------------------------------------------------------


def bound(loss: Any, options: Mapping[str, Any]) -> Callable[..., Tensor]:
    """A loss with its options: a function's, or those that a class is made with."""
    made: Callable[..., Tensor] = loss(**options) if isinstance(loss, type) else partial(loss, **options)
    return made if options or isinstance(loss, type) else loss


def by_label(loss: Callable[..., Any]) -> bool:
    """Whether a loss is torch's own, which takes (output, target) where a user's takes (outputs, batch)."""
    return isinstance(loss, nn.modules.loss._Loss) or loss in LOSSES.values()


def against(loss: Callable[..., Tensor], labels: int) -> Callable[[Any, Batch], Tensor]:
    """loss(output, *labels) as loss(output, batch); of several outputs the first counts."""

    def compared(output: Any, batch: Batch) -> Tensor:
        predicted = output if isinstance(output, Tensor) else next(iter(flatten(output).values()))
        return loss(predicted, *list(tensors_of(batch).values())[-labels:])

    return compared


def _own_loss(output: Any, batch: Batch) -> Tensor:
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    means = [t.float().square().mean() for t in flatten(output).values() if t.is_floating_point()]
    return torch.stack(means).sum()


# --- batches -----------------------------------------------------------------------------------------------------


def divide(given: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a user's code gives as a batch: tensors, and all else, by name or position."""
    if not isinstance(given, (Mapping, list, tuple)):
        given = (given,)
    entries = dict(given) if isinstance(given, Mapping) else {str(i): entry for i, entry in enumerate(given)}
    arrays = {name: torch.as_tensor(e) for name, e in entries.items() if isinstance(e, (Tensor, numpy.ndarray))}
    others = {name: entry for name, entry in entries.items() if name not in arrays}
    for name, other in others.items():
        if any(isinstance(leaf, (Tensor, numpy.ndarray)) for leaf in tree_leaves(other)):
            raise ConfigError(f"entry {name} of a batch is {kind(other)} with tensors in it: make them entries of their own")
    return arrays, others


def _leading(tensors: Mapping[str, Tensor]) -> int:
    """The batch size, as far as one can tell."""
    first = next(iter(tensors.values()))
    return len(first) if first.ndim else 1


class Then:
    """One function after another, in any process."""

    def __init__(self, first: Callable[[Any], Any], second: Callable[[Any], Any]) -> None:
        self.first, self.second = first, second

    def __call__(self, value: Any) -> Any:
        return self.second(self.first(value))


class _Iterated(IterableDataset[Any]):
    """Batches of anything that can be iterated again and again."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ConfigError("the loader gives no batch: is the data set smaller than one?")


def seed_all(seed: int) -> None:
    """Everything that a user's code may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


# --- words -------------------------------------------------------------------------------------------------------


def kind(value: Any) -> str:
    """What something is: "a dict with a, b", "a list of Tensor, str", "a Foo"."""
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with {', '.join(map(str, value)) or 'nothing'}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {', '.join(type(entry).__name__ for entry in value) or 'nothing'}"
    return f"a {type(value).__name__}"


def _entries(names: Iterable[str]) -> str:
    """Entries of a batch as people count and name them."""
    return ", ".join(f"entry {name}" if name.isdigit() else name for name in names)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
