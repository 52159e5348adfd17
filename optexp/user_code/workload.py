"""The user's own code as a workload: what they give is taken as it is, what is missing gets a default that is reported.

Nothing of it runs before `build`, which happens in an arm: importing a user's file may do anything.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from optexp.equivalence.float64 import InFloat64
from optexp.errors import ConfigError, NoReference, first_line
from optexp.program import (
    STEPS,
    TAKE_SPARSE,
    Batch,
    Feed,
    Program,
    ResidentFeed,
    clear_gradients,
    flatten,
    keeping,
    map_batch,
    placed,
    preserved,
    prime,
    tensors_of,
)
from optexp.program.feeds import LoaderFeed
from optexp.schema import suggest
from optexp.support.sparse import is_sparse
from optexp.user_code.adapters import (
    LOSSES,
    OPTIMIZERS,
    Iterated,
    Maker,
    Then,
    accepted,
    against,
    bound,
    by_label,
    divide,
    drawn_from,
    dtype_name,
    endless,
    entries,
    fits,
    kind,
    leading_size,
    odd_rows,
    own_loss,
    remade,
    required,
    scalar,
    seed_all,
    shapes,
)
from optexp.user_code.drawing import Inputs, drawing
from optexp.user_code.step_state import TrackedStepState, move
from optexp.user_code.train_step import TrainStep
from optexp.workload import Workload

if TYPE_CHECKING:
    from optexp.export.inlining import Inliner
    from optexp.export.repro import Source
    from optexp.user_code.listing import Spelled


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

    model: Maker
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
    single: bool = False  # one tensor, given as it is
    made: Callable[[Any], Any] | None = None  # makes a batch of a type of its own from a tuple or a dict

    @property
    def numbered(self) -> bool:
        """Whether batches are sequences."""
        return all(name.isdigit() for name in (*self.names, *self.constants))

    @property
    def plain(self) -> bool:
        """Whether a tuple describes a batch completely."""
        return not self.constants and self.numbered


@dataclass
class UserWorkload(Workload):
    """loss, optimizer:  names in torch.nn.functional or torch.nn, and in torch.optim; before what the code itself gives
    labels:            how many entries at a batch's end only the loss sees; None finds out
    shapes:            values of named sizes, which take turns
    odd_batch:         leave out the last rows of every batch, so that an odd number stays
    """

    families: ClassVar = ("normal", "integers", "large", "small", "offset")
    tails_may_be_refused: ClassVar = True

    loss: str | None = None  # type: ignore[assignment]  # here a name; `build` finds what it stands for
    loss_args: dict[str, Any] = field(default_factory=dict)
    optimizer: str | None = None  # type: ignore[assignment]
    optimizer_args: dict[str, Any] = field(default_factory=dict)
    lr: float = 1e-3
    labels: int | None = None
    shapes: list[dict[str, int]] = field(default_factory=list)
    odd_batch: bool = False

    def __post_init__(self) -> None:
        if self.mode not in STEPS:
            raise ValueError(f"mode={self.mode} is not a choice{suggest(self.mode, STEPS)}")
        spelt = {name.lower(): name for name in OPTIMIZERS}
        self.optimizer = self.optimizer and spelt.get(self.optimizer.lower(), self.optimizer)
        for key, value, known in (("loss", self.loss, LOSSES), ("optimizer", self.optimizer, OPTIMIZERS)):
            if value is not None and value not in known:
                raise ValueError(f"{key}={value} is not a choice{suggest(value, known)}")

    @abstractmethod
    def load(self) -> Parts:
        """The user's code, imported or unpacked.

        Raises:
            ConfigError: a part is missing.
        """

    @cached_property
    def parts(self) -> Parts:
        return self.load()

    @property
    def own_step(self) -> Callable[..., Any] | None:
        """The user's training step, in mode=train."""
        return self.parts.train_step if self.mode == "train" else None

    # --- a workload ---------------------------------------------------------------------------------------------

    def resolve(self, device: str) -> Self:
        return self

    def tails(self) -> list[Self]:
        if self.odd_batch:
            return []
        tail = copy.copy(self)  # what it holds that is no field goes along
        tail.odd_batch = True
        return [tail]

    @property
    def samples(self) -> int:
        """Mean leading size of the batches drawn last."""
        return round(sum(self.leading) / len(self.leading))

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
        self.leading = [leading_size(tensors_of(batch)) for batch in batches]
        return batches

    def feed(self, device: torch.device, dtype: torch.dtype) -> Feed:
        if self.parts.loader is None:
            return ResidentFeed(device)
        loader = copy.copy(self.loader)
        loader.collate_fn = Then(loader.collate_fn, self.pack)
        return LoaderFeed(loader, device, dtype)

    def build(self, device: torch.device, dtype: torch.dtype, seed: int) -> Program:
        self.remarks: list[str] = []
        parts, trains, learns = self.parts, self.mode != "forward", self.mode == "train"
        seed_all(seed)
        model = parts.model()
        self.note_conversion("parameters", model.parameters(), dtype)
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise ConfigError("the model lies on the meta device, where it has no values: build it on another")
        model = placed(model, device, dtype)
        model.train(trains)
        if trains and not any(p.requires_grad for p in model.parameters()):
            raise ConfigError(f"mode={self.mode}: the model has no parameters to train; what is left is mode=forward")
        self.layout = self.learn_layout(model, device, dtype)
        self.size_lazy_layers(model, device, dtype)
        own_step = self.own_step
        if parts.train_step is not None and not own_step:
            self.remarks.append("train_step is not used, because mode is not train")
        loss = scalar(self.criterion()) if trains and not own_step else None
        optimizer = self.new_optimizer(model) if learns else None
        for code in (own_step, parts.loss if trains else None):
            if code is not None:
                move(code, model, device, dtype)
        step_state = TrackedStepState(own_step, model, optimizer) if own_step and optimizer else None
        if step_state is not None and step_state.lost:
            lost = ", ".join(step_state.lost)
            self.remarks.append(f"train_step keeps what cannot be put back from step to step: {lost}")
        program = Program(
            model=model,
            step=TrainStep(own_step, self.unpack) if own_step else STEPS[self.mode],
            feed=self.feed(device, dtype),
            loss=loss,
            targets=self.targets,
            constants=self.layout.constants,
            optimizer=optimizer,
            made_with=(parts.model.args, parts.model.kwargs),
            step_state=step_state,
        )
        torchs_loss = trains and not own_step and (self.loss is not None or parts.loss is None)
        if torchs_loss and dtype is not torch.float64 and not self.odd_batch:
            self.try_loss(program, dtype)
        prime(program)
        if self.odd_batch:
            self.try_odd(program, dtype)
        return keeping(program)

    def size_lazy_layers(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """Give lazy layers their sizes from a first batch, before any step."""
        if not any(map(is_lazy, (*model.parameters(), *model.buffers()))):
            return
        batch = self.batch(torch.Generator(device).manual_seed(0))
        real = map_batch(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)
        feed, constants = ResidentFeed(device), self.layout.constants
        with torch.no_grad():
            Program(model.eval(), STEPS["forward"], feed, targets=self.targets, constants=constants).predict(real)
        model.train(self.mode != "forward")

    def try_loss(self, program: Program, dtype: torch.dtype) -> None:
        """Call one of torch's losses once, so that a mistake has no traceback.

        Raises:
            ConfigError: the loss does not take the model's output.
        """
        assert program.loss is not None
        with preserved(program), torch.no_grad():
            drawn = self.batch(torch.Generator(program.device).manual_seed(0))
            batch = map_batch(lambda t: t.to(dtype) if t.is_floating_point() else t, drawn)
            output = program.predict(batch)
            try:
                program.loss(output, batch)
            except (ConfigError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                labels = list(tensors_of(batch).values())[len(tensors_of(batch)) - program.targets :]
                raise ConfigError(
                    f"the loss does not take an output of shape {shapes(flatten(output).values())} with labels of shape"
                    f" {shapes(labels)}: {first_line(error)}"
                ) from None

    def try_odd(self, program: Program, dtype: torch.dtype) -> None:
        """Call the model once on an odd number of rows, which it may refuse by itself.

        Raises:
            NoReference: the model refuses that number.
        """
        batch = self.batch(torch.Generator(program.device).manual_seed(0))
        try:
            with preserved(program), InFloat64() if dtype is torch.float64 else nullcontext():
                program.step(program, map_batch(lambda t: t.to(dtype) if t.is_floating_point() else t, batch))
        except Exception as error:
            raise NoReference(f"the model does not take {self.leading[0]} rows ({first_line(error)})") from error
        clear_gradients(program.model)

    # --- batches ------------------------------------------------------------------------------------------------

    def give(self, generator: torch.Generator, count: int) -> list[Any]:
        """Batches of the user's code; equal generators give equal ones.

        Args:
            generator: Source of the seed; its device is the batches'.
            count: Number of batches.

        Raises:
            ConfigError: there are no inputs, or `shapes` are given for batches of a loader.
        """
        seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device))
        seed_all(seed)
        if self.parts.loader is not None:
            if self.shapes:
                raise ConfigError("workload.shapes are sizes of inputs, and batches come from a loader: leave them out")
            return list(islice(endless(drawn_from(self.loader)), count))
        if self.parts.inputs is None:
            raise ConfigError("the workload has no inputs")
        kinds: Sequence[Mapping[str, int]] = self.shapes or [{}]
        made = [self.drawing(kind, generator.device) for kind in kinds[:count]]
        seed_all(seed)
        return [made[index % len(made)](kinds[index % len(kinds)], generator.device) for index in range(count)]

    def drawing(self, sizes: Mapping[str, int], device: torch.device) -> Inputs:
        """The function that draws batches of these sizes, found once (see `optexp.user_code.drawing`)."""
        assert self.parts.inputs is not None
        known: dict[tuple[str, str], Inputs] = self.__dict__.setdefault("drawn_by", {})
        key = str(sizes), str(device)
        if key not in known:
            known[key] = drawing(self.parts.inputs, sizes, device)
        return known[key]

    @cached_property
    def loader(self) -> DataLoader[Any]:
        """The user's loader; another iterable becomes one.

        Raises:
            ConfigError: it cannot be iterated.
        """
        assert self.parts.loader is not None
        given = self.parts.loader()
        if isinstance(given, DataLoader):
            return given
        if not isinstance(given, Iterable):
            raise ConfigError(f"the loader is {kind(given)}: it must give batches, as a DataLoader does")
        return DataLoader(Iterated(self.parts.loader), batch_size=None)

    @cached_property
    def layout(self) -> Layout:
        return self.learn_layout(self.model(), torch.device("cpu"), torch.float32)

    def learn_layout(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> Layout:
        """Derive the layout of batches from one batch and the signature of the model's `forward`.

        Raises:
            ConfigError: a batch is of a type that no program takes, or holds no tensor.
        """
        self.remarks = self.__dict__.get("remarks", [])
        given = self.give(torch.Generator(device).manual_seed(0), 1)[0]
        tensors, constants = divide(given)
        if not tensors:
            raise ConfigError(f"a batch is {kind(given)}: there is no tensor in it")
        self.leading = [leading_size(tensors)]
        self.note_conversion("inputs", tensors.values(), dtype)
        if constants and self.parts.loader is not None:
            dropped = ", ".join(constants)
            if not isinstance(given, Mapping):
                raise ConfigError(f"the loader's batches are {kind(given)}: make them tensors, in its collate_fn")
            self.remarks.append(f"left out of the batches, because it is no tensor: {dropped}")
            constants = {}
        labels = self.find_labels(list(tensors), model)
        inputs = [name for name in tensors if name not in labels]
        integer = bool(labels) and not tensors[labels[-1]].is_floating_point()
        single = not isinstance(given, (Mapping, list, tuple))
        return Layout([*inputs, *labels], labels, constants, integer, single, remade(given))

    def find_labels(self, names: list[str], model: nn.Module) -> list[str]:
        if self.labels is not None:
            return names[max(0, len(names) - self.labels) :]
        positions, keywords = accepted(model)
        found = [name for name in names if not fits(name, positions, keywords)]
        learns = self.loss is not None or (names[-1].isdigit() and (self.parts.loss or self.parts.loader))
        if not found and learns and len(names) > 1 and not required(names[-1], model):
            found = names[-1:]
        if found and not self.own_step:
            self.remarks.append(f"labels: {entries(found)} of a batch, which the model does not see")
        return found

    def pack(self, given: Any) -> Batch:
        """A user's batch as a program takes it.

        Raises:
            ConfigError: it has other entries than the first batch.
        """
        tensors, _ = divide(given)
        if tensors.keys() != set(self.layout.names):
            expected = entries(self.layout.names)
            raise ConfigError(f"batches differ: the first has {expected}, another {entries(tensors)}")
        batch = {name: tensors[name] for name in self.layout.names}
        batch = odd_rows(batch) if self.odd_batch else batch
        return tuple(batch.values()) if self.layout.plain else batch

    def unpack(self, batch: Batch) -> Any:
        """A program's batch in the form of the user's code."""
        given: Any = batch if isinstance(batch, tuple) else {**batch, **self.layout.constants}
        if isinstance(given, dict) and self.layout.numbered:
            given = tuple(given[name] for name in sorted(given, key=int))
        return given if self.layout.made is None else self.layout.made(given)

    # --- as source ----------------------------------------------------------------------------------------------

    @abstractmethod
    def spelled(self) -> Spelled:
        """Expressions for the user's objects in a file of their own."""

    def listing(self, program: Program, batch: Batch, inliner: Inliner) -> Source:
        from optexp.user_code.listing import listing

        return listing(self, program, self.spelled())

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
            self.remarks.append(f"loss: {name}, because none was given")
            return against(LOSSES[name], count)
        self.remarks.append("loss: the output's own, else the mean of its squares, because none was given")
        return own_loss

    def needed_labels(self, name: str) -> int:
        if not self.targets:
            raise ConfigError(
                f"{name} compares outputs with a target, and a batch has none: add one after the model's inputs,"
                " as in {shape: [32], dtype: int64, high: 10}"
            )
        return self.targets

    def new_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The user's optimizer of the model's parameters, AdamW by default.

        Raises:
            ConfigError: the optimizer does not take the parameters or their gradients, or is no optimizer.
        """
        parameters = list(model.parameters())
        if self.optimizer is None and self.parts.optimizer is not None:
            made = self.parts.optimizer(parameters)
            if not isinstance(made, torch.optim.Optimizer):
                raise ConfigError(f"get_optimizer(params) returned {kind(made)}: it must be a torch.optim.Optimizer")
            return made
        if self.optimizer is None:
            self.remarks.append(f"optimizer: AdamW with lr={self.lr:g}, because none was given")
        cls: Any = OPTIMIZERS[self.optimizer or "AdamW"]
        if odd := [n for n, p in model.named_parameters() if p.requires_grad and is_sparse(p)]:
            layout = str(model.get_parameter(odd[0]).layout).removeprefix("torch.")
            raise ConfigError(
                f"the parameter {odd[0]} is {layout}, and no optimizer of torch's updates such a one: hold its values"
                " in a dense parameter, freeze it, or compare gradients alone with workload.mode=forward_backward"
            )
        if any(getattr(module, "sparse", False) is True for module in model.modules()) and cls not in TAKE_SPARSE:
            raise ConfigError(
                f"the model has sparse gradients (sparse=True), which {cls.__name__} does not take: leave that out, or"
                f" give an optimizer that does ({', '.join(each.__name__ for each in TAKE_SPARSE)})"
            )
        try:
            made = cls([p for p in parameters if p.requires_grad], lr=self.lr, **self.optimizer_args)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"optimizer={self.optimizer or 'AdamW'}: {first_line(error)}") from None
        assert isinstance(made, torch.optim.Optimizer)
        return made

    def note_conversion(self, what: str, tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
        """Note where `dtype=` overrides a precision of the user's code."""
        found = {t.dtype for t in tensors if t.is_floating_point()} - {dtype, torch.float32}
        if found:
            names = ", ".join(sorted(dtype_name(other) for other in found))
            self.remarks.append(f"{what} in {names} became {dtype_name(dtype)} (dtype=)")
