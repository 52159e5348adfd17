"""A deterministic piece of PyTorch work: a model, where its batches come from and, for training, how it learns."""

from __future__ import annotations

import copy
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from optexp.errors import ConfigError, Unsupported
from optexp.program import STEPS, Batch, Feed, Program, ResidentFeed, Step, keeping, map_batch, placed, prime
from optexp.schema import choice
from optexp.support.float64 import InFloat64

if TYPE_CHECKING:
    from optexp.export.inlining import Inliner
    from optexp.export.repro import Source
    from optexp.records.patch import Patch
    from optexp.strategy import Notes, Strategy


@dataclass
class Workload(ABC):
    """The dataclass's fields are the keys of its YAML, checked for name and type.

    A workload says what its model, batches, loss and optimizer are; `build` makes a `Program` of them.
    """

    families: ClassVar[tuple[str, ...]] = ("normal",)  # of inputs that mean something to it (optexp.equivalence)
    sizes: ClassVar[Mapping[str, Mapping[str, int]]] = {}  # of fields left open (None), by kind of device
    tails_may_be_refused: ClassVar[bool] = False  # families of inputs are then tried at its own sizes too
    operation: ClassVar[bool] = False  # a single one: whether its inputs lie in the cache is then half of its time
    # By name and class of each module of the user's model, whether `model.train` or `model.eval` changes its mode.
    kept_modes: ClassVar[Mapping[str, bool]] = {}
    preload: ClassVar[tuple[str, ...]] = ()  # slow imports, made once before arms are forked, where installed

    mode: str = choice("forward", "forward_backward", "train")

    @property
    def name(self) -> str:
        """The name used on the command line: the file's."""
        return type(self).__module__.rpartition(".")[2]

    def resolve(self, device: str) -> Self:
        """This workload with its open sizes (None) filled in.

        Args:
            device: Kind of device, "cuda" or "cpu".

        Raises:
            ConfigError: a size is below 1.
        """
        left_open: dict[str, Any] = {k: v for k, v in self.sizes.get(device, {}).items() if getattr(self, k) is None}
        resolved = replace(self, **left_open)
        for name in ("batch_size", *self.sizes.get(device, ())):
            if isinstance(size := getattr(resolved, name, None), int) and size < 1:
                raise ConfigError(f"workload.{name}={size} must be at least 1")
        return resolved

    def tails(self) -> list[Self]:
        """Copies with small, odd sizes, whose last tiles are partial; families of inputs are then tried there."""
        return []

    @property
    @abstractmethod
    def samples(self) -> int:
        """Samples that one step processes, for throughput."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model on the CPU in float32; the caller has set the seed."""

    @abstractmethod
    def batch(self, generator: torch.Generator) -> Batch:
        """One batch on the generator's device, targets last (see `Program.targets`), float32 where real."""

    @property
    def variety(self) -> int:
        """Number of kinds of batch that take turns; each is met in set-up, verified, and timed equally often."""
        return 1

    def batches(self, generator: torch.Generator, count: int) -> list[Batch]:
        """Consecutive batches, the first kind first.

        Args:
            generator: Source of randomness; its device is the batches'.
            count: Number of batches.
        """
        return [self.batch(generator) for _ in range(count)]

    def remainder(self, generator: torch.Generator) -> Batch | None:
        """A batch as small as the last one of an epoch; None where all are of one size.

        Args:
            generator: Source of randomness; its device is the batch's.
        """
        return None

    def in_dtype(self, batch: Batch, dtype: torch.dtype) -> Batch:
        """The batch as a step takes it.

        Args:
            batch: As drawn.
            dtype: Of real inputs, but for those whose dtype is part of the problem.
        """
        return map_batch(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch)

    @property
    def flops(self) -> float | None:
        """Floating-point operations of a step that no implementation can save; None where unknown."""
        return None

    def code(self) -> list[bytes]:
        """Source files of the class and its bases, as far as known without an import of a user's file."""
        files = (getattr(sys.modules[cls.__module__], "__file__", None) for cls in type(self).__mro__)
        return [Path(file).read_bytes() for file in dict.fromkeys(files) if file]

    @property
    def bounded(self) -> frozenset[str]:
        """Inputs, by name or position, with a range of their own: families of inputs leave their values unchanged."""
        return frozenset()

    def anew(self) -> Self:
        """The same workload, for a program beside this one's: variables of its code's modules are its own."""
        return copy.copy(self)

    @property
    def remedies(self) -> Mapping[str, str]:
        """Settings of this workload that answer a bottleneck, as they are typed, by its label or cause."""
        return {}

    def notes(self) -> list[str]:
        """Remarks for the user on how the program was made; asked after `build`."""
        return []

    def first_call(self, model: nn.Module, batch: Batch) -> AbstractContextManager[None]:
        """Around the first call of the plain model on a batch: what it refuses may be told in a sentence."""
        return nullcontext()

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """A scalar to differentiate.

        Args:
            output: Of the model.
            batch: With its trailing `targets`.

        Raises:
            TypeError: the workload has no loss.
        """
        raise TypeError(f"workload={self.name} has no loss: use workload.mode=forward")

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of mode=train.

        Raises:
            TypeError: the workload has no optimizer.
        """
        raise TypeError(f"workload={self.name} has no optimizer: use workload.mode=forward or forward_backward")

    @property
    def targets(self) -> int:
        """Number of a batch's trailing tensors for the loss alone."""
        return 0

    def feed(self, device: torch.device, dtype: torch.dtype) -> Feed:
        """The way of batches to the device; by default they lie there already.

        Args:
            device: Of the step.
            dtype: Of real tensors.
        """
        return ResidentFeed(device)

    def step(self) -> Step:
        """One unit of work, by `mode`."""
        return STEPS[self.mode]

    def listing(self, program: Program, batch: Batch, inliner: Inliner) -> Source:
        """Source of this workload's program that runs without optexp, for `repro.py`.

        Args:
            program: The plain program.
            batch: One batch of it.
            inliner: Collects copied definitions and imports.

        Raises:
            NotCovered: a part has no source that could be copied.
        """
        from optexp.export.repro import of_class

        return of_class(self, program, batch, inliner)

    def patch(self, program: Program, stack: Sequence[Strategy], notes: Mapping[str, Notes]) -> Patch | None:
        """A stack as a patch of the file that the program comes from; None where it comes from no user's file.

        Args:
            program: The plain program.
            stack: Strategies.
            notes: Of their `apply`, by name.
        """
        return None

    def build(self, device: torch.device, dtype: torch.dtype, seed: int) -> Program:
        """The program: equal seeds give equal parameters, on every device and in every process.

        Args:
            device: Of parameters and batches.
            dtype: Of parameters and real inputs.
            seed: Of torch's global generator, which this sets.
        """
        torch.manual_seed(seed)
        model = placed(self.model(), device, dtype)
        trains = self.mode != "forward"
        model.train(trains)
        feed = self.feed(device, dtype)
        with InFloat64() if dtype is torch.float64 else nullcontext():  # an optimizer makes its state at once, or later
            program = Program(
                model=model,
                step=self.step(),
                feed=feed,
                loss=self.loss if trains else None,
                targets=self.targets,
                optimizer=self.optimizer(model) if self.mode == "train" else None,
            )
            prime(program)
        return keeping(program)


def known(size: int | None) -> int:
    """A size that `resolve` has filled in.

    Raises:
        AssertionError: the size is still open.
    """
    assert size is not None, "workload.resolve(device) comes first"
    return size


def extra(module: str, workload: str) -> ModuleType:
    """A module of the extra `optexp[models]`.

    Args:
        module: Dotted name.
        workload: Its name in the message.

    Raises:
        Unsupported: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise  # it is there, and something that it imports is not
        raise Unsupported(f"workload={workload} needs {package}: pip install 'optexp[models]'") from None


def sgd_or_adamw(optim: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """SGD with momentum 0.9 where `optim` is "sgd", else AdamW.

    Args:
        lr: Learning rate.
    """
    if optim == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=lr)
