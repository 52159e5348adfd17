"""A deterministic piece of PyTorch work: a model, where its batches come from and, for training, how it learns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from optexp.config import one_of
from optexp.program import STEPS, Batch, Program, ResidentFeed, prime


@dataclass
class Workload(ABC):
    """The dataclass's fields are the keys of its YAML, checked for name and type.

    A workload says what its model, batches, loss and optimizer are; `build` makes a `Program` of them.
    """

    families: ClassVar[tuple[str, ...]] = ("normal",)

    mode: str = one_of("forward", "forward_backward", "train")

    @property
    def name(self) -> str:
        """The name used on the command line: the file's."""
        return type(self).__module__.rpartition(".")[2]

    def resolve(self, device: str) -> Self:
        """This workload with sizes that were left open filled in for the kind of device ("cuda" or "cpu")."""
        return self

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

    def build(self, device: torch.device, dtype: torch.dtype, seed: int) -> Program:
        """The program of this workload: equal seeds give equal parameters, on every device and in every process."""
        torch.manual_seed(seed)
        model = self.model().to(device=device, dtype=dtype)
        trains = self.mode != "forward"
        model.train(trains)
        program = Program(
            model=model,
            step=STEPS[self.mode],
            feed=ResidentFeed(device),
            loss=self.loss if trains else None,
            targets=self.targets,
            optimizer=self.optimizer(model) if self.mode == "train" else None,
        )
        prime(program)
        return program
