"""Verification in one process, and small workloads to run it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optexp.equivalence.tensor_math import name_of
from optexp.errors import Failure, NoReference
from optexp.program import Batch, Program
from optexp.records.verification import Verification
from optexp.schema import choice
from optexp.strategy import REASSOCIATES, Contract, Counters, Evidence, Notes, Stage, Strategy
from optexp.trace import Trace
from optexp.verification.trial import Plan
from optexp.verification.verify import verify
from optexp.workers.arm import Arm
from optexp.workers.client import InProcess
from optexp.workers.reference import Reference
from optexp.workers.spec import Spec
from optexp.workload import Workload

CPU = torch.device("cpu")
Change = Callable[[Program], Program]


@dataclass
class Changed(Strategy):
    """Any change of a program."""

    stage = Stage.REWRITE
    change: Change = field(default=lambda program: program)

    def apply(self, program: Program) -> tuple[Program, Notes]:
        return self.change(program), {}

    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        return Evidence(True, "")


@dataclass
class Net(Workload):
    """Convolution, batch norm, max-pool, layer norm, linear: everything that makes honest gradients jump."""

    mode: str = choice("forward", "forward_backward", "train")
    optim: str = "adamw"
    batch_size: int = 8
    layer_norm_eps: float = 1e-2
    make: Callable[[], nn.Module] | None = field(default=None, repr=False)

    @property
    def samples(self) -> int:
        return self.batch_size

    @property
    def targets(self) -> int:
        return 0 if self.mode == "forward" else 1

    def model(self) -> nn.Module:
        if self.make is not None:
            return self.make()
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.LayerNorm(72, eps=self.layer_norm_eps), nn.Linear(72, 32), nn.ReLU(), nn.Linear(32, 10),
        )  # fmt: skip

    def batch(self, generator: torch.Generator) -> Batch:
        device = generator.device
        x = torch.randn(self.batch_size, 3, 8, 8, generator=generator, device=device)
        labels = torch.randint(10, (self.batch_size,), generator=generator, device=device)
        return (x, labels)[: 1 + self.targets]

    def loss(self, output: Any, batch: Batch) -> Tensor:
        assert isinstance(batch, tuple)
        return nn.functional.cross_entropy(output, batch[-1])

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optim == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=1e-3)


def verified(
    workload: Workload,
    change: Change = lambda program: program,
    contract: Contract = REASSOCIATES,
    seeds: int = 2,
    first: int = 0,
    dtype: torch.dtype = torch.float32,
    baseline: Change = lambda program: program,
    device: torch.device = CPU,
    steps: int | None = None,
    **options: Any,
) -> Verification:
    """Verify the program that `change` makes of the workload's."""

    def spec(change: Change | None = None, autocast: str | None = None) -> Spec:
        stack = [] if change is None else [Changed(change)]
        return Spec(workload, stack, str(device), name_of(dtype), 7, contract=contract, autocast=autocast)

    def arm(name: str, spec: Spec) -> InProcess[Arm]:
        made = InProcess(Arm(), name)
        made.target.hold(spec)
        return made

    eager, candidate = arm("baseline", spec(baseline, contract.dtype)), arm("candidate", spec(change))
    reference = InProcess(Reference(), "reference")
    reference.target.hold(spec())
    steps = steps or (3 if workload.mode == "train" else 1)
    plan = Plan(range(first, first + seeds), steps, **options)
    try:
        return verify(reference, eager, candidate, plan, contract)
    except Failure as failure:  # of a worker's process
        raise (NoReference(failure.message) if failure.type == "NoReference" else failure) from None


@pytest.fixture
def check() -> Callable[..., Verification]:
    return verified


@pytest.fixture
def net() -> type[Net]:
    return Net
