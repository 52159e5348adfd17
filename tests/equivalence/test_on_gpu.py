"""The same on a GPU, where the baseline's convolutions are TF32 and atomics may add in any order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from optexp.equivalence import gates, tensor_math
from optexp.equivalence.autocast import autocast
from optexp.equivalence.fp64_reference import Fp64Reference
from optexp.equivalence.input_families import NORMAL
from optexp.equivalence.judge import Judge
from optexp.errors import NoReference
from optexp.program import Program
from optexp.strategy import REASSOCIATES, precision
from optexp.workloads.gelu import Gelu
from optexp.workloads.mlp import Mlp

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = torch.device("cuda")


def channels_last(program: Program) -> Program:
    program.model.to(memory_format=torch.channels_last)
    inner = program.model.forward
    return replace(program, forward=lambda x: inner(x.to(memory_format=torch.channels_last)))


def split_k(program: Program) -> Program:
    def forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        k = layer.in_features // 2
        return x[..., :k] @ layer.weight[:, :k].T + x[..., k:] @ layer.weight[:, k:].T + layer.bias

    for layer in program.model.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = lambda x, layer=layer: forward(layer, x)
    return program


def capturable(program: Program) -> Program:
    """What a graph of the whole step needs: step count and learning rate on the device."""
    for group in program.optimizer.param_groups:
        group["capturable"] = True
        group["lr"] = torch.tensor(group["lr"], device=CUDA)
    for values in program.optimizer.state.values():
        values["step"] = values["step"].to(CUDA)
    return program


def in_bfloat16(program: Program) -> Program:
    inner = program.model.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return inner(x).float()

    return replace(program, forward=forward)


@pytest.mark.parametrize("mode", ["forward", "forward_backward", "train"])
@pytest.mark.parametrize("change", [channels_last, split_k])
def test_honest_candidates_pass(check, net, change, mode):
    verification = check(net(mode=mode), change, seeds=20, device=CUDA)
    assert verification.ok, verification.headline
    assert verification.reference == "fp64 on cuda"


def test_a_model_without_parameters_passes(check, net):
    assert check(net(mode="forward", make=nn.GELU), device=CUDA).ok


def test_a_capturable_optimizer_passes(check):
    verification = check(Mlp(mode="train", dim=64), capturable, seeds=5, device=CUDA)
    assert verification.ok, verification.headline


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast_passes_its_contract(check, net, dtype):
    verification = check(
        net(mode="train"), lambda program: autocast(split_k(program), dtype), precision(dtype), seeds=10, device=CUDA
    )
    assert verification.ok, verification.headline


@pytest.mark.parametrize("mode", ["forward", "forward_backward", "train"])
def test_silent_bfloat16_is_caught(check, mode):
    assert not check(Mlp(mode=mode, dim=64), in_bfloat16, device=CUDA).ok


def test_silent_tf32_is_caught(check):
    def tf32(program: Program) -> Program:
        def step(inner: Program, batch: object) -> dict[str, torch.Tensor]:
            torch.backends.cuda.matmul.allow_tf32 = True
            try:
                return program.step(inner, batch)
            finally:
                torch.backends.cuda.matmul.allow_tf32 = False

        return replace(program, step=step)

    assert not check(Mlp(mode="forward_backward"), tf32, device=CUDA).ok


def test_random_numbers_on_the_device_are_noticed(check, net):
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, 10))

    with pytest.raises(Exception, match="random"):
        check(net(mode="forward_backward", make=model), device=CUDA)


def test_fp64_that_does_not_fit_moves_to_the_cpu(net):
    judge = Judge(net(mode="forward"), CUDA, torch.float32, 0, REASSOCIATES)
    golden, failed = judge.fp64.step, []

    def once(step: int, state: object) -> object:
        if not failed:
            failed.append(step)
            torch.empty(2**50, device=CUDA)
        return golden(step, state)

    judge.fp64.step = once
    judge.draw(0, 1)
    assert judge.info().reference == "fp64 on cpu"


@pytest.mark.parametrize("call", [1, 2, 3, 5, 8])
def test_fp64_may_move_to_the_cpu_in_the_middle(check, monkeypatch, call):
    """What is known of earlier runs is held against what is found there."""
    step, calls = Fp64Reference.step, []

    def once(self: Fp64Reference, index: int, state: object) -> object:
        calls.append(index)
        if len(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(self, index, state)

    monkeypatch.setattr(Fp64Reference, "step", once)
    verification = check(Mlp(mode="train", dim=256, batch_size=512), split_k, seeds=3, device=CUDA)
    assert len(calls) > call
    assert verification.ok, verification.headline


@pytest.mark.parametrize("count", [1, 5000, tensor_math.FETCHED, tensor_math.FETCHED + 1])
def test_small_tensors_are_judged_on_the_cpu_and_large_ones_where_they_are_alike(count: int) -> None:
    reference = torch.randn(count, dtype=torch.float64)
    candidate = reference.float() + 1e-4 * torch.randn(count)
    here, there = (tensor_math.error(candidate.to(d), reference.to(d), 1.0) for d in ("cpu", "cuda"))
    assert there.rms == pytest.approx(here.rms)
    assert (there.index, there.candidate) == (here.index, here.candidate)
    yardstick = gates.Yardstick.of(there) | gates.Yardstick.of(there)
    limits = gates.Limits(gates.TOLERANCES["float32"])
    assert gates.measure("output", there, 1.0, yardstick, yardstick, limits).ok
    assert tensor_math.identical(candidate.cuda(), candidate.cuda())
    assert gates.structure(candidate.cuda(), candidate.cuda()) is None


class Probability(nn.Module):
    """A loss whose kernel asserts that what it is given lies between 0 and 1: the process cannot use the card after."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(192, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        target = x.flatten(1)
        return nn.functional.binary_cross_entropy(self.lin(target).sigmoid(), target)


def test_inputs_that_a_kernel_would_assert_on_are_tried_on_the_host(net) -> None:
    class Images(net):
        def batch(self, generator: torch.Generator):
            return tuple(t.sigmoid() if t.is_floating_point() else t for t in super().batch(generator))

    golden = Fp64Reference(Images(mode="forward", make=Probability), CUDA, torch.float32, 7)
    with pytest.raises(NoReference, match="does not take such values"):
        golden.draw(0, 1, "large")
    golden.draw(0, 1, NORMAL)
    assert golden.step(0, golden.initial)["out/output"].isfinite()


def test_a_large_step_that_asserts_on_nothing_is_not_tried_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    golden = Fp64Reference(Gelu(size=8192), CUDA, torch.float32, 7)
    golden.draw(0, 1, NORMAL)
    golden.step(0, golden.initial)
    monkeypatch.setattr(golden.source, "_try_on_host", lambda batch: pytest.fail("tried on the host"))
    golden.draw(0, 1, "large")
    assert golden.step(0, golden.initial)["out/output"].isfinite().all()
