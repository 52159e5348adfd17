"""A deterministic piece of PyTorch work: a model, where its batches come from and, for training, how it learns."""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from optexp.errors import ConfigError, Unsupported
from optexp.program import STEPS, Batch, Feed, Program, ResidentFeed, Step, keeping, placed, prime
from optexp.schema import choice

if TYPE_CHECKING:
    from optexp.export.inlining import Inliner
    from optexp.export.repro import Source


@dataclass
class Workload(ABC):
    """The dataclass's fields are the keys of its YAML, checked for name and type.

    A workload says what its model, batches, loss and optimizer are; `build` makes a `Program` of them.
    """

    families: ClassVar[tuple[str, ...]] = ("normal",)  # of inputs that mean something to it (optexp.equivalence)
    sizes: ClassVar[Mapping[str, Mapping[str, int]]] = {}  # of fields left open (None), by kind of device
    tails_may_be_refused: ClassVar[bool] = False  # families of inputs are then tried at its own sizes too
    operation: ClassVar[bool] = False  # a single one: whether its inputs lie in the cache is then half of its time
    preload: ClassVar[tuple[str, ...]] = ()  # slow imports, made once before arms are forked, where installed

    mode: str = choice("forward", "forward_backward", "train")

    @property
    def name(self) -> str:
        """The name used on the command line: the file's."""
        return type(self).__module__.rpartition(".")[2]

    def resolve(self, device: str) -> Self:
        """This workload with sizes that were left open filled in for the kind of device ("cuda" or "cpu")."""
        left_open: dict[str, Any] = {k: v for k, v in self.sizes.get(device, {}).items() if getattr(self, k) is None}
        resolved = replace(self, **left_open)
        for name in ("batch_size", *self.sizes.get(device, ())):
            if isinstance(size := getattr(resolved, name, None), int) and size < 1:
                raise ConfigError(f"workload.{name}={size} must be at least 1")
        return resolved

    def tails(self) -> list[Self]:
        """The same on small, odd sizes, whose last tiles are partial; families of inputs are then tried there."""
        return []

    @property
    @abstractmethod
    def samples(self) -> int:
        """How many samples one step processes, for throughput."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model on the CPU in float32; the caller has set the seed."""

    @abstractmethod
    def batch(self, generator: torch.Generator) -> Batch:
        """One batch on the generator's device, targets last (see `Program.targets`), float32 where real."""

    @property
    def variety(self) -> int:
        """How many kinds of batch take turns; each is met when an arm sets up, verified, and timed equally often."""
        return 1

    def batches(self, generator: torch.Generator, count: int) -> list[Batch]:
        """`count` batches one after the other, the first kind first."""
        return [self.batch(generator) for _ in range(count)]

    @property
    def flops(self) -> float | None:
        """Multiplications and additions of a step that no other way to compute it can save, where that is known."""
        return None

    def code(self) -> list[bytes]:
        """What it is written in, as far as that is known without importing a user's file: other code is other work."""
        files = (getattr(sys.modules[cls.__module__], "__file__", None) for cls in type(self).__mro__)
        return [Path(file).read_bytes() for file in dict.fromkeys(files) if file]

    @property
    def bounded(self) -> frozenset[str]:
        """Inputs, by name or position, whose values have a range of their own: families leave them as they are."""
        return frozenset()

    def notes(self) -> list[str]:
        """What the user should know about how the program came to be; asked after `build`."""
        return []

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """A scalar to differentiate."""
        raise TypeError(f"workload={self.name} has no loss: use workload.mode=forward")

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of mode=train."""
        raise TypeError(f"workload={self.name} has no optimizer: use workload.mode=forward or forward_backward")

    @property
    def targets(self) -> int:
        """How many trailing tensors of a batch are for the loss."""
        return 0

    def feed(self, device: torch.device, dtype: torch.dtype) -> Feed:
        """How batches reach the device: they lie there already, unless moving them is part of the work."""
        return ResidentFeed(device)

    def step(self) -> Step:
        """One unit of work, by `mode`."""
        return STEPS[self.mode]

    def listing(self, program: Program, batch: Batch, inliner: Inliner) -> Source:
        """What this workload's program is made of, as source that runs without optexp."""
        from optexp.export.repro import of_class

        return of_class(self, program, batch, inliner)

    def build(self, device: torch.device, dtype: torch.dtype, seed: int) -> Program:
        """The program of this workload: equal seeds give equal parameters, on every device and in every process."""
        torch.manual_seed(seed)
        model = placed(self.model(), device, dtype)
        trains = self.mode != "forward"
        model.train(trains)
        program = Program(
            model=model,
            step=self.step(),
            feed=self.feed(device, dtype),
            loss=self.loss if trains else None,
            targets=self.targets,
            optimizer=self.optimizer(model) if self.mode == "train" else None,
        )
        prime(program)
        return keeping(program)


def known(size: int | None) -> int:
    """A size that `resolve` has filled in."""
    assert size is not None, "workload.resolve(device) comes first"
    return size


def extra(module: str, workload: str) -> ModuleType:
    """A module of the extra `optexp[models]`; where it is missing, the workload cannot run here."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise  # it is there, and something that it imports is not
        raise Unsupported(f"workload={workload} needs {package}: pip install 'optexp[models]'") from None


def sgd_or_adamw(optim: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The two that most training runs use; SGD with momentum 0.9."""
    if optim == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=lr)
