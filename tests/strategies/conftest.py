"""Programs with batches in their feed, and what a few steps of them compute."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from optexp.program import Program, gradients
from optexp.strategy import Stack, Unsupported, compose
from optexp.workload import Workload
from optexp.workloads.gelu import Gelu
from optexp.workloads.mlp import Mlp

WORKLOADS: dict[str, Workload] = {
    "gelu": Gelu(size=64),
    "mlp-forward": Mlp(mode="forward", dim=32, batch_size=16),
    "mlp-forward_backward": Mlp(mode="forward_backward", dim=32, batch_size=16),
    "mlp-adamw": Mlp(mode="train", dim=32, batch_size=16),
    "mlp-sgd": Mlp(mode="train", dim=32, batch_size=16, optim="sgd"),
    "mlp-relu": Mlp(mode="train", dim=32, batch_size=16, activation="relu"),
}

Build = Callable[..., Program]


@pytest.fixture(params=WORKLOADS)
def workload(request: pytest.FixtureRequest) -> Workload:
    return WORKLOADS[request.param]


@pytest.fixture
def build() -> Build:
    """A workload's program with a stack folded over it, as an arm does; four batches wait in its feed."""

    def build(workload: Workload, *stack: Stack, device: str = "cpu", seed: int = 0) -> Program:
        program = workload.build(torch.device(device), torch.float32, seed)
        generator = torch.Generator(device).manual_seed(seed + 100)
        batches = [workload.batch(generator) for _ in range(4)]
        program.feed.reset(batches)
        for strategy in compose(stack):
            if reason := strategy.unsupported(program, torch.device(device)):
                raise Unsupported(reason)
            program, _ = strategy.apply(program)
        program.feed.reset(batches)
        return program

    return build


@pytest.fixture
def observe() -> Callable[[Program, int], list[dict[str, Tensor]]]:
    """Outputs, gradients and parameters of successive steps, each on another batch, cloned."""

    def observe(program: Program, steps: int = 3) -> list[dict[str, Tensor]]:
        observed = []
        for _ in range(steps):
            values = program.run() | gradients(program)
            values |= {f"param/{name}": p.detach() for name, p in program.model.named_parameters()}
            observed.append({name: value.clone() for name, value in values.items()})
        return observed

    return observe
