"""Verification in one process: arms that dispatch to the real functions, and small workloads to run them on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optexp.equivalence import bits, families
from optexp.equivalence.autocast import autocast
from optexp.equivalence.generic import turn_parameters
from optexp.equivalence.judge import Judge
from optexp.equivalence.observation import observed, overwritten, repeats
from optexp.equivalence.parting import watched
from optexp.equivalence.protocol import Plan, Verification, verify
from optexp.equivalence.trajectory import RATES, Rates, losses
from optexp.program import Batch, Program, Snapshot, keeping, map_batch
from optexp.schema import choice
from optexp.strategy import REASSOCIATES, Contract
from optexp.workload import Workload

CPU = torch.device("cpu")
Change = Callable[[Program], Program]


@dataclass
class Sent:
    """A parcel that stays in this process."""

    nest: Any
    pieces: int = 1


class LocalArm:
    """One program; `calls` counts what was asked of it."""

    name = "local"

    def __init__(self, program: Program) -> None:
        program = keeping(program)
        self.program, self.start, self.rates = program, Snapshot(program), Rates(program)
        self.fresh: list[Batch] = []
        self.calls: list[str] = []

    def call(self, method: str, **arguments: Any) -> Any:
        self.calls.append(method)
        return getattr(self, method)(**arguments)

    def fill(self, piece: int) -> None:
        pass

    def expect(self, parcel: Sent) -> None:
        self.arrived = parcel.nest

    def take(self, piece: int) -> None:
        pass

    def load(self, index: int, family: str) -> None:
        if index == 0:
            self.fresh, self.family, self.brought = [], family, None
        self.fresh.append(map_batch(torch.clone, self.arrived))

    def rest(self, keep_fresh: bool = False) -> None:
        self.fresh = self.fresh if keep_fresh else []

    def restore(self) -> None:
        self.start.restore(self.program)
        self.rates.set(1.0)

    def turn_parameters(self) -> None:
        turn_parameters(self.start.values)
        self.restore()

    def observe(
        self,
        step: int,
        restore: bool,
        noise: int | None = None,
        forward: bool = False,
        order: int | None = None,
        repeating: bool = False,
    ) -> Sent:
        if restore:
            self.restore()
        self.rates.set(RATES[step % len(RATES)])
        given = self.program.feed.bring(self.fresh[step % len(self.fresh)])
        if self.family == families.ONE_BY_ONE:
            given = self.brought = families.refilled(self.brought, given)
        elif self.family == families.NONCONTIGUOUS:
            given = map_batch(families.with_gaps, given)
        with bits.deterministic() if repeating else nullcontext():
            seen = observed(self.program, given, noise, forward, None if restore else self.start.values, order)
        self.reassociated = int(seen["flag/reassociated"])
        return Sent(seen)

    def passed(self):
        self.restore()
        with watched(self.program.model) as passed:
            self.program.step(self.program, self.program.feed.bring(self.fresh[0]))
        return passed

    def reassociated_operators(self) -> int:
        return self.reassociated

    def repeats(self, times: int) -> bool:
        self.restore()
        return repeats(self.program, self.fresh[0], self.start, times)

    def varying(self, times: int, step: int = 0, repeating: bool = False) -> list[str]:
        self.restore()
        with bits.deterministic() if repeating else nullcontext():
            return bits.varying(self.program, self.fresh[step], self.start, times)

    def overwritten(self) -> list[str]:
        self.restore()
        return overwritten(self.program, self.fresh[0], self.fresh[1])

    def losses(self, unit: float, seed: int) -> list[float]:
        self.restore()
        return losses(self.program, self.fresh, self.rates, unit, seed)


class LocalReference:
    """The judge, as an arm."""

    def __init__(self, judge: Judge) -> None:
        self.judgement = judge

    def call(self, method: str, **arguments: Any) -> Any:
        if method == "reference_info":
            return self.judgement.info()
        if method == "batch":
            return Sent(self.judgement.batches[arguments["index"]])
        if method == "expect":
            self.arrived = arguments["parcel"].nest
        if method in ("expect", "take", "fill"):
            return None
        if method not in ("judge", "yardstick"):
            return getattr(self.judgement, method)(**arguments)
        answer = getattr(self.judgement, method)(arguments["step"], self.arrived)
        return [finding.to_dict() for finding in answer] if method == "judge" else answer


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
    eager = baseline(workload.build(device, dtype, seed=7))
    if contract.name == "PRECISION":
        assert contract.dtype is not None
        eager = autocast(eager, contract.dtype)
    reference = LocalReference(Judge(workload, device, dtype, 7, contract))
    candidate = LocalArm(change(workload.build(device, dtype, seed=7)))
    steps = steps or (3 if workload.mode == "train" else 1)
    plan = Plan(range(first, first + seeds), steps, **options)
    return verify(reference, LocalArm(eager), candidate, plan, contract)


@pytest.fixture
def check() -> Callable[..., Verification]:
    return verified


@pytest.fixture
def net() -> type[Net]:
    return Net
