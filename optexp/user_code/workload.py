"""The user's own code as a workload: what they give is taken as it is, what is missing gets a default that is reported.

Nothing of it runs before `build`, which happens in an arm: importing a user's file may do anything.
"""

from __future__ import annotations

import copy
import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from optexp.errors import ConfigError, NoReference
from optexp.program import (
    STEPS,
    Batch,
    Feed,
    NotCalled,
    Program,
    ResidentFeed,
    keeping,
    map_batch,
    mixes_precisions,
    placed,
    set_training,
    tensors_of,
)
from optexp.program.feeds import LoaderFeed
from optexp.schema import suggest
from optexp.support.float64 import InFloat64
from optexp.user_code.adapters import (
    LOSSES,
    OPTIMIZERS,
    Then,
    accepted,
    at_home,
    by_label,
    divide,
    dtype_name,
    entries,
    fits,
    kind,
    leading_size,
    own_loss,
    scalar,
    seed_all,
)
from optexp.user_code.aliasing import listed
from optexp.user_code.first_call import naming_inputs
from optexp.user_code.given_batches import GivenBatches
from optexp.user_code.layout import Layout, constants_of, find_labels
from optexp.user_code.learning import criterion, new_optimizer
from optexp.user_code.other_tensors import other_tensors
from optexp.user_code.own_program import OwnProgram
from optexp.user_code.own_step import primed, tried, with_optimizer
from optexp.user_code.parameter_attributes import attributes
from optexp.user_code.parts import Parts
from optexp.user_code.script_batches import is_nested
from optexp.user_code.step_modules import move
from optexp.user_code.step_state import TrackedStepState
from optexp.user_code.train_step import TrainStep
from optexp.user_code.trial_runs import loss_of_the_model, size_first_layers, try_loss, try_odd
from optexp.user_code.wrapped_weights import refuse_wrapped
from optexp.workload import Workload

if TYPE_CHECKING:
    from optexp.export.inlining import Inliner
    from optexp.export.repro import Source
    from optexp.user_code.listing import Spelled

OTHERS = (
    "the optimizer holds tensors that the model does not, which are put back before a step for a train_step alone:"
    " hold them in the model, or define train_step(model, batch, optimizer)"
)

CONVERTED = " (dtype=)"  # ends notes on parameters and inputs whose precision the setting overrides


@dataclass
class UserWorkload(Workload):
    """loss, optimizer:  names in torch.nn.functional or torch.nn, and in torch.optim; before what the code itself gives
    labels:            how many entries at a batch's end only the loss sees; None finds out
    shapes:            values of named sizes, which take turns
    odd_batch:         leave out the last rows of every batch, so that an odd number stays
    """

    families: ClassVar = ("normal", "integers", "corners", "large", "small", "offset")
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
        for key, made in (("loss", LOSSES.get(self.loss or "")), ("optimizer", OPTIMIZERS.get(self.optimizer or ""))):
            if made is not None:
                taken = inspect.signature(made).parameters
                for name in getattr(self, f"{key}_args").keys() - taken.keys():
                    raise ValueError(f"{key}_args: {getattr(self, key)} takes no {name}{suggest(name, taken)}")

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

    def anew(self) -> Self:
        found = copy.copy(self)
        for loaded in ("parts", "given", "layout"):
            found.__dict__.pop(loaded, None)
        return found

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

    @property
    def inputs_key(self) -> str:
        """Where its batches stem from, for messages."""
        return "its loader" if self.parts.loader is not None else "its inputs"

    def first_call(self, model: nn.Module, batch: Batch) -> AbstractContextManager[None]:
        converted = [remark for remark in self.remarks if remark.endswith(CONVERTED)]
        return naming_inputs(model, batch, self.inputs_key, converted)

    def notes(self) -> list[str]:
        return list(dict.fromkeys(self.remarks))

    def model(self) -> nn.Module:
        return self.parts.model()

    def batch(self, generator: torch.Generator) -> Batch:
        return self.batches(generator, 1)[0]

    def batches(self, generator: torch.Generator, count: int) -> list[Batch]:
        packed = (self.layout.pack(given, self.odd_batch) for given in self.given.give(generator, count))
        batches = [map_batch(lambda t: at_home(t, generator.device), batch) for batch in packed]
        self.leading = [leading_size(tensors_of(batch)) for batch in batches]
        return batches

    def remainder(self, generator: torch.Generator) -> Batch | None:
        given = None if self.odd_batch else self.given.remainder(generator)
        return None if given is None else map_batch(lambda t: t.to(generator.device), self.layout.pack(given))

    def feed(self, device: torch.device, dtype: torch.dtype) -> Feed:
        if self.parts.loader is None:
            return ResidentFeed(device)
        loader = copy.copy(self.given.loader)
        loader.collate_fn = Then(loader.collate_fn, partial(self.layout.pack, odd=self.odd_batch))
        return LoaderFeed(loader, device, dtype, non_blocking=loader.pin_memory)

    def build(self, device: torch.device, dtype: torch.dtype, seed: int) -> Program:
        self.remarks: list[str] = []
        parts, trains, learns = self.parts, self.mode != "forward", self.mode == "train"
        seed_all(seed)
        model = self.new_model(device, dtype)
        had = attributes(model)
        self.layout = self.learn_layout(model, device, dtype)
        size_first_layers(self, model, device, dtype)
        own_step = self.own_step
        if self.may_take_labels(model) and trains and not own_step and loss_of_the_model(self, model, dtype):
            self.remarks = [remark for remark in self.remarks if not remark.startswith("labels: ")]
            self.layout = self.learn_layout(model, device, dtype, labels=0)
        if parts.train_step is not None and not own_step:
            self.remarks.append(f"train_step is not run in mode={self.mode}: workload.mode=train judges it")
        chosen = criterion(self) if trains and not own_step else None
        given = self.optimizer is not None or parts.optimizer is not None
        with InFloat64() if dtype is torch.float64 else nullcontext():  # it may make its state now
            optimizer = None if not learns else new_optimizer(self, model) if given or not own_step else NotCalled()
        if optimizer is not None and not own_step and any(other_tensors(optimizer, model)):
            raise NoReference(OTHERS)
        for code in (own_step, parts.loss if trains else None):
            if code is not None:
                move(code, model, device, dtype)
        program = OwnProgram(
            model=model,
            step=TrainStep(own_step, self.layout.unpack) if own_step else STEPS[self.mode],
            feed=self.feed(device, dtype),
            loss=None if chosen is None else scalar(chosen),
            shows=chosen is own_loss,
            targets=self.targets,
            constants=self.layout.constants,
            layout=self.layout,
            optimizer=optimizer,
            made_with=(parts.model.args, parts.model.kwargs),
            step_state=self.tracked(own_step, model, optimizer) if own_step and optimizer else None,
        )
        if isinstance(optimizer, NotCalled):
            batch = self.batch(torch.Generator(device).manual_seed(0))
            program = with_optimizer(self, program, self.in_dtype(batch, dtype))
        torchs_loss = trains and not own_step and (self.loss is not None or parts.loss is None)
        if torchs_loss and dtype is not torch.float64 and not self.odd_batch:
            try_loss(self, program, dtype)
        program = primed(self, program, dtype)
        if own_step:
            batch = self.batch(torch.Generator(device).manual_seed(0))
            program = tried(self, program, own_step, self.in_dtype(batch, dtype), had)
        if self.odd_batch:
            try_odd(self, program, dtype)
        return keeping(program)

    def new_model(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The user's model where a program needs it.

        Raises:
            ConfigError: the model has no values, or nothing to train.
            NoReference: a weight is a tensor around others that hides them, or learns.
        """
        trains, model = self.mode != "forward", self.parts.model()
        refuse_wrapped(model, trains)
        if keeps := dtype is not torch.float64 and mixes_precisions(model):
            self.remarks.append("parameters and buffers keep their precisions, as some are narrower than float32")
        else:
            self.note_conversion("parameters", model.parameters(), dtype)
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise ConfigError("the model lies on the meta device, where it has no values: build it on another")
        model = placed(model, device, None if keeps else dtype)
        others = set_training(model, trains)
        named = ((name, f"{name} ({type(part).__name__})") for name, part in model.named_modules())
        self.kept_modes = {told: name in others for name, told in named}  # type: ignore[misc]  # of the class at first
        if others:
            mode = "evaluation" if trains else "training"
            self.remarks.append(f"modules that the file puts into {mode} mode stay there: {listed(others)}")
        if trains and not any(p.requires_grad for p in model.parameters()):
            raise ConfigError(f"mode={self.mode}: the model has no parameters to train; what is left is mode=forward")
        return model

    def tracked(
        self,
        own_step: Callable[..., Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        aside: Sequence[Any] = (),
    ) -> TrackedStepState:
        """Python state of the user's step, to put back before each step.

        Args:
            aside: Objects that hold nothing of their own.
        """
        found = TrackedStepState(own_step, model, optimizer, aside)
        if found.lost:
            lost = ", ".join(found.lost)
            self.remarks.append(f"train_step keeps what cannot be put back from step to step: {lost}")
        return found

    # --- batches ------------------------------------------------------------------------------------------------

    @cached_property
    def given(self) -> GivenBatches:
        return GivenBatches(self.parts, self.shapes)

    @cached_property
    def layout(self) -> Layout:
        return self.learn_layout(self.model(), torch.device("cpu"), torch.float32)

    def may_take_labels(self, model: nn.Module) -> bool:
        """Whether the model takes what the file's own loss alone sees now, and may compute the loss itself."""
        own, labels = self.parts.loss, self.layout.labels
        if own is None or by_label(own) or not labels or (self.loss, self.labels) != (None, None):
            return False
        return all(fits(name, *accepted(model)) for name in labels)

    def learn_layout(
        self, model: nn.Module, device: torch.device, dtype: torch.dtype, labels: int | None = None
    ) -> Layout:
        """Derive the layout of batches from one batch and the signature of the model's `forward`.

        Args:
            labels: Number of entries that only the loss sees; None finds out.

        Raises:
            ConfigError: a batch is of a type that no program takes, or holds no tensor.
        """
        self.remarks = self.__dict__.get("remarks", [])
        given = self.given.give(torch.Generator(device).manual_seed(0), 1)[0]
        if is_nested(given) or self.keeps_others(given):
            layout = Layout.nested(given, model, self.labels if labels is None else labels)
            self.leading = [leading_size(tensors_of(layout.pack(given)))]
            if layout.of_loss and not self.own_step:
                self.remarks.append(f"labels: {entries(layout.of_loss)} of a batch, which the model does not see")
            return layout
        tensors, constants = divide(given)
        if not tensors:
            raise ConfigError(f"a batch is {kind(given)}: there is no tensor in it")
        self.leading = [leading_size(tensors)]
        self.note_conversion("inputs", tensors.values(), dtype)
        constants = constants_of(constants, self.parts.loader is not None, self.remarks)
        return Layout.of(given, tensors, self.find_labels(list(tensors), model, labels), constants)

    def keeps_others(self, given: Any) -> bool:
        """Whether entries of a loader's batch that are no tensors stay in it: texts beside images, by their place or
        for a step that may read them. A model that is called with a mapping's entries does not take them."""
        if self.parts.loader is None or not isinstance(given, (Mapping, list, tuple)):
            return False
        return all(divide(given)) and (bool(self.own_step) or not isinstance(given, Mapping))

    def find_labels(self, names: list[str], model: nn.Module, count: int | None) -> list[str]:
        """Entries of a batch that only the loss sees."""
        if (count := self.labels if count is None else count) is not None:
            return names[max(0, len(names) - count) :]
        learns = self.loss is not None or (names[-1].isdigit() and bool(self.parts.loss or self.parts.loader))
        found = find_labels(names, model, learns)
        if found and not self.own_step:
            self.remarks.append(f"labels: {entries(found)} of a batch, which the model does not see")
        return found

    # --- as source ----------------------------------------------------------------------------------------------

    @abstractmethod
    def spelled(self) -> Spelled:
        """Expressions for the user's objects in a file of their own."""

    def listing(self, program: Program, batch: Batch, inliner: Inliner) -> Source:
        from optexp.user_code.listing import listing

        return listing(self, program, self.spelled())

    def note_conversion(self, what: str, tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
        """Note where `dtype=` overrides a precision of the user's code."""
        found = {t.dtype for t in tensors if t.is_floating_point()} - {dtype, torch.float32}
        if found:
            names = ", ".join(sorted(dtype_name(other) for other in found))
            self.remarks.append(f"{what} in {names} became {dtype_name(dtype)}{CONVERTED}")
