"""Honest candidates pass, mutants are caught: the same verification that a comparison runs, in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import count

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optexp.equivalence.autocast import autocast
from optexp.equivalence.candidate_step import RESEEDED
from optexp.equivalence.fp64_reference import Fp64Reference
from optexp.equivalence.judge import Judge
from optexp.errors import NoReference
from optexp.program import Program, clear_gradients
from optexp.result import finite
from optexp.strategy import BITWISE, REASSOCIATES, precision
from optexp.verification import one_set
from optexp.workloads.mlp import Mlp

CPU = torch.device("cpu")
MODES = ("forward", "forward_backward", "train")


def mlp(mode: str, **options) -> Mlp:
    return Mlp(**{"mode": mode, "dim": 32, "layers": 2, "batch_size": 16, **options})


def linears(program: Program) -> list[nn.Linear]:
    return [m for m in program.model.modules() if isinstance(m, nn.Linear)]


def with_linear(function: Callable[[nn.Linear, torch.Tensor], torch.Tensor]) -> Callable[[Program], Program]:
    """A candidate whose linear layers compute `function(layer, x)`."""

    def change(program: Program) -> Program:
        for layer in linears(program):
            layer.forward = lambda x, layer=layer: function(layer, x)
        return program

    return change


def with_step(wrapper) -> Callable[[Program], Program]:
    """A candidate whose step is `wrapper(inner, program, batch)`."""

    def change(program: Program) -> Program:
        inner = program.step
        return replace(program, step=lambda program, batch: wrapper(inner, program, batch))

    return change


# --- honest ----------------------------------------------------------------------------------------------------


def split_k(layer, x):
    k = layer.in_features // 2
    return x[..., :k] @ layer.weight[:, :k].T + x[..., k:] @ layer.weight[:, k:].T + layer.bias


def functional(program: Program) -> Program:
    def forward(x):
        state = dict(program.model.named_parameters()) | dict(program.model.named_buffers())
        return torch.func.functional_call(program.model, state, (x,))

    return replace(program, forward=forward)


def channels_last(program: Program) -> Program:
    program.model.to(memory_format=torch.channels_last)
    inner = program.model.forward
    return replace(program, forward=lambda x: inner(x.to(memory_format=torch.channels_last)))


def counted_in_integers(program: Program) -> Program:
    """A step count of another kind than torch's."""

    def step(program, batch):
        for values in program.optimizer.state.values():
            values["step"] = values["step"].float()
        outputs = inner(program, batch)
        for values in program.optimizer.state.values():
            values["step"] = values["step"].long()
        return outputs

    inner = program.step
    return replace(program, step=step)


def by_loops(program: Program) -> Program:
    """The optimizer's other implementation."""
    for group in program.optimizer.param_groups:
        group["foreach"] = True
    return program


def on_device(program: Program) -> Program:
    """What capturable optimizers do on a GPU: step count and learning rate are tensors, of another dtype."""
    optimizer = program.optimizer
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
        group["foreach"] = False
    for values in optimizer.state.values():
        values["step"] = values["step"].double()
    return program


def fused(program: Program) -> Program:
    """torch's fused optimizer: its kernel holds rate and betas in float32."""
    for group in program.optimizer.param_groups:
        group["fused"] = True
    return program


HONEST = {
    "eager": lambda program: program,
    "split_k": with_linear(split_k),
    "functional": functional,
    "channels_last": channels_last,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", HONEST)
def test_honest_candidates_pass_on_every_seed(check, net, name, mode):
    first = 1000 * MODES.index(mode)
    verification = check(net(mode=mode), HONEST[name], seeds=20, first=first)
    assert verification.ok, verification.headline
    assert len(verification.seeds) == 20


@pytest.mark.parametrize("optim", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
@pytest.mark.parametrize("change", [with_linear(split_k), by_loops, fused], ids=["split_k", "foreach", "fused"])
def test_honest_training_passes_on_every_seed(check, optim, change):
    verification = check(mlp("train", optim=optim, activation="relu"), change, seeds=20)
    assert verification.ok, verification.headline
    assert "parameter changes" in verification.headline


def test_a_learning_rate_in_a_tensor_is_that_of_a_skipped_step(check):
    """A GradScaler leaves out some steps of inputs with a large offset, whose gradients overflow in float16."""

    class SmallLoss(Mlp):
        def loss(self, output, batch):
            return super().loss(output, batch) / 64

    workload = SmallLoss(mode="train", dim=32, layers=2, batch_size=16)
    narrow = [lambda program: on_device(autocast(program, "float16")), precision("float16")]
    verification = check(workload, *narrow, families=("small", "offset"))
    assert verification.ok, verification.headline
    assert "a step was skipped in both: its gradients overflow" in verification.notes


class InARow(torch.autograd.Function):
    """A bias for each row, whose gradient is added up as a compiled loop does: in eight sums, row after row."""

    @staticmethod
    def forward(ctx, bias, rows):
        return bias.expand(rows, -1).clone()

    @staticmethod
    def backward(ctx, gradient):
        total = torch.zeros(8, gradient.shape[1])
        for rows in gradient.split(8):
            total += rows
        return total.sum(0), None


@pytest.mark.parametrize("factor", [1.0, 1.0003])
def test_a_bias_may_be_summed_up_in_a_row(check, net, factor):
    """Where all rows say the same, each addition rounds by as much as the sum has become, and in one direction."""

    class Level(net):
        def loss(self, output, batch):
            return output.square().mean()

    def model():
        found = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
        nn.init.zeros_(found[1].weight)
        nn.init.constant_(found[1].bias, 3.1)
        return found

    def change(program: Program) -> Program:
        (layer,) = linears(program)
        layer.forward = lambda x: x @ layer.weight.T + InARow.apply(layer.bias, len(x)) * factor
        return program

    found = check(Level(mode="forward_backward", batch_size=4096, make=model), change, seeds=2)
    assert found.tensors["grad/1.bias"].error_ratio > 5, "as far from fp64 as the baseline"
    assert found.ok is (factor == 1.0), found.headline


WIDE = torch.float64


@pytest.mark.parametrize(
    ("factor", "dtype"), [(1.0, torch.float32), (1.0003, torch.float32), (1.0, WIDE), (1 + 1e-9, WIDE)]
)
def test_running_statistics_may_be_summed_up_in_a_row(check, net, factor, dtype):
    """As torch does itself on a CPU, where channels are stored last. Deviations that are all of one size show it."""

    class Signs(nn.Module):
        def forward(self, x):
            return 1.1 * x.sign()

    def model():
        return nn.Sequential(Signs(), nn.BatchNorm2d(3, momentum=1.0), nn.Flatten())

    def change(program: Program) -> Program:
        norm = program.model[1]

        @torch.no_grad()
        def keep(x):
            rows = x.movedim(1, -1).flatten(0, -2).contiguous()
            mean = torch.from_numpy(np.add.reduce(rows.numpy(), axis=0)) / len(rows)
            squares = torch.from_numpy(np.add.reduce((rows - mean).square().numpy(), axis=0))
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(squares / (len(rows) - 1) * factor)
            norm.num_batches_tracked += 1

        def forward(x):
            keep(x.detach())
            return F.batch_norm(x, None, None, norm.weight, norm.bias, True, eps=norm.eps)

        norm.forward = forward
        return program

    found = check(net(mode="forward_backward", batch_size=64, make=model), change, seeds=2, dtype=dtype)
    off = found.tensors["buffer/1.running_var"].error_ratio
    assert off > 4 or (dtype is WIDE and factor == 1.0), "as far from fp64 as the baseline"
    assert found.ok is (factor == 1.0), found.headline


class Named(nn.Module):
    """Calls its norm by keyword; a subclass of the norm has another order of dimensions."""

    class Last(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x.transpose(1, 2).contiguous()).transpose(1, 2).contiguous()

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(3), self.Last(8)

    def forward(self, x):
        return self.second(self.first(input=x).flatten(1, 2)).flatten(1)


@pytest.mark.parametrize("compiled", [False, True])
def test_norms_of_any_kind_can_be_verified(check, net, compiled):
    def model():
        found = nn.Sequential(nn.BatchNorm2d(3), Named())
        return torch.compile(found, backend="aot_eager") if compiled else found

    found = check(net(mode="forward_backward", batch_size=16, make=model), lambda program: program, seeds=1)
    assert found.ok, found.headline


def test_what_lies_on_a_grid_is_no_near_tie(check, net):
    class Levels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.lower = nn.Parameter(torch.tensor(16.0)), False

        def forward(self, x):
            levels = (x * 16).round().clamp(min=1) / 16 * self.scale
            return (levels.ceil() - 1 if self.lower else levels.floor()).int()

    def lowered(program: Program) -> Program:
        program.model.lower = True
        return program

    model = net(mode="forward", make=Levels)
    assert check(model).ok
    assert "output fails EXACT" in check(model, lowered).headline


def test_a_step_count_may_be_an_integer(check) -> None:
    verification = check(mlp("train"), counted_in_integers)
    assert verification.ok, verification.headline


def test_an_optimizer_with_its_state_in_tensors_passes(check):
    verification = check(mlp("train"), on_device)
    assert verification.ok, verification.headline


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast_passes_its_precision_contract(check, net, mode, dtype):
    def change(program):
        return autocast(with_linear(split_k)(program), dtype)

    verification = check(net(mode=mode), change, precision(dtype), seeds=10)
    assert verification.ok, verification.headline
    assert f"plain {dtype} autocast" in verification.headline
    assert not check(net(mode=mode), change, seeds=1).ok  # and would not be called equivalent


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_programs_in_other_dtypes(check, dtype):
    verification = check(mlp("train"), with_linear(split_k), seeds=5, dtype=dtype)
    assert verification.ok, verification.headline


# --- mutants ---------------------------------------------------------------------------------------------------


def scaled(inner, program, batch):
    return {name: value * (1 + 1e-3) for name, value in inner(program, batch).items()}


def slightly_scaled(inner, program, batch):
    return {name: value * (1 + 2e-6) for name, value in inner(program, batch).items()}


def one_element_off(inner, program, batch):
    outputs = {name: value.clone() for name, value in inner(program, batch).items()}
    for value in outputs.values():
        value.view(-1)[-1] += 1e-4
    return outputs


def wrong_dtype(inner, program, batch):
    return {name: value.double() for name, value in inner(program, batch).items()}


def wrong_shape(inner, program, batch):
    return {name: value[None] for name, value in inner(program, batch).items()}


def wrong_name(inner, program, batch):
    return {f"my_{name}": value for name, value in inner(program, batch).items()}


def extra_output(inner, program, batch):
    return inner(program, batch) | {"more": torch.zeros(1)}


def with_nan(inner, program, batch):
    outputs = {name: value.clone() for name, value in inner(program, batch).items()}
    for value in outputs.values():
        value.view(-1)[0] = torch.nan
    return outputs


def mutates_its_batch(inner, program, batch):
    outputs = inner(program, batch)
    batch[0].zero_()
    return outputs


def returns_its_input(inner, program, batch):
    value = inner(program, batch)["output"]
    return {"output": batch[0].view(-1)[: value.numel()].copy_(value.view(-1)).view(value.shape)}


def no_gradients(inner, program, batch):
    outputs = inner(program, batch)
    program.model[0].weight.grad = None
    return outputs


def stale_gradients(inner, program, batch):
    outputs = inner(program, batch)
    program.model[0].weight.grad.zero_()
    return outputs


class Stale:
    """Returns what the previous call computed."""

    def __init__(self):
        self.last = None

    def __call__(self, inner, program, batch):
        outputs = inner(program, batch)
        previous, self.last = self.last or outputs, outputs
        return previous


def in_bfloat16(layer, x):
    return nn.functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16()).float()


def in_tf32(layer, x):
    def truncated(tensor):
        return (tensor.detach().view(torch.int32) & ~0x1FFF).view(torch.float32) - tensor.detach() + tensor

    return nn.functional.linear(truncated(x), truncated(layer.weight), layer.bias)


def without_bias(layer, x):
    return nn.functional.linear(x, layer.weight)


OUTPUT_MUTANTS = {
    "scaled": (with_step(scaled), "G1"),
    "slightly_scaled": (with_step(slightly_scaled), "G1"),
    "one_element_off": (with_step(one_element_off), "G2"),
    "wrong_dtype": (with_step(wrong_dtype), "G0"),
    "wrong_shape": (with_step(wrong_shape), "G0"),
    "wrong_name": (with_step(wrong_name), "G0"),
    "extra_output": (with_step(extra_output), "G0"),
    "with_nan": (with_step(with_nan), "G0"),
    "mutates_its_batch": (with_step(mutates_its_batch), "G0"),
    "returns_its_input": (with_step(returns_its_input), "G0"),
    "stale": (with_step(Stale()), "G1"),
    "in_bfloat16": (with_linear(in_bfloat16), "G1"),
    "in_tf32": (with_linear(in_tf32), "G1"),
    "without_bias": (with_linear(without_bias), "G1"),
}


@pytest.mark.parametrize("name", OUTPUT_MUTANTS)
def test_mutants_of_the_output_are_caught(check, name):
    change, gate = OUTPUT_MUTANTS[name]
    verification = check(mlp("forward"), change)
    assert not verification.ok
    assert gate in {failed for failure in verification.failures for failed in failure.failed}
    assert not verification.gates[gate].passed
    assert verification.headline.startswith(f"{verification.worst.tensor} fails")
    json.dumps(finite(asdict(verification)), allow_nan=False)


@pytest.mark.parametrize(
    "change",
    [with_linear(in_bfloat16), with_linear(in_tf32), with_step(no_gradients), with_step(stale_gradients)],
    ids=["in_bfloat16", "in_tf32", "no_gradients", "stale_gradients"],
)
@pytest.mark.parametrize("seed", range(5))
def test_mutants_of_gradients_are_caught(check, change, seed):
    verification = check(mlp("forward_backward"), change, seeds=1, first=seed)
    assert any(failure.tensor.startswith("grad/") for failure in verification.failures)


def test_layer_norm_without_eps_is_caught(check, net):
    def model():
        return nn.Sequential(nn.Flatten(), nn.LayerNorm(192, eps=1e-5))

    def change(program):
        program.model[1].eps = 0.0
        return program

    workload = net(mode="forward", make=model)
    assert check(workload).ok
    verification = check(workload, change)
    assert verification.worst.gate == "G1"
    eager, mutant = workload.build(CPU, torch.float32, 0), change(workload.build(CPU, torch.float32, 0))
    (x,) = workload.batch(torch.Generator().manual_seed(0))
    assert torch.allclose(eager.predict((x,)), mutant.predict((x,)), rtol=1e-4, atol=1e-4)  # what others would say


# Training: mutants that only an update shows.


def faster(program: Program) -> Program:
    for group in program.optimizer.param_groups:
        group["lr"] *= 1.01
    return program


def no_update(inner, program, batch):
    kept = {name: tensor.clone() for name, tensor in program.state().items()}
    outputs = inner(program, batch)
    for name, tensor in program.state().items():
        tensor.copy_(kept[name])
    return outputs


def without_zero_grad(inner, program, batch):
    old = {p: p.grad.clone() for p in program.model.parameters() if p.grad is not None}
    clear_gradients(program.model)
    loss = program.loss(program.predict(batch), batch)
    loss.backward()
    for parameter, gradient in old.items():
        parameter.grad += gradient
    program.optimizer.step()
    return {"loss": loss.detach()}


def frozen_step_count(inner, program, batch):
    """A graph that replays the bias correction it was captured with: the count itself goes on."""
    counts = {p: values["step"].clone() for p, values in program.optimizer.state.items()}
    for values in program.optimizer.state.values():
        values["step"].zero_()
    outputs = inner(program, batch)
    for parameter, values in program.optimizer.state.items():
        values["step"].copy_(counts[parameter] + 1)
    return outputs


def frozen_layer(inner, program, batch):
    weight = program.model[0].weight
    kept = weight.detach().clone()
    outputs = inner(program, batch)
    weight.data.copy_(kept)
    return outputs


def other_start(program: Program) -> Program:
    with torch.no_grad():
        program.model[0].weight.add_(1e-3)
    return program


def slower_in_a_tensor(program: Program) -> Program:
    on_device(program)
    for group in program.optimizer.param_groups:
        group["lr"].mul_(0.99)
    return program


TRAINING_MUTANTS = {
    "faster": (faster, "change/"),
    "slower_in_a_tensor": (slower_in_a_tensor, "optimizer/group0/lr"),
    "no_update": (with_step(no_update), "change/"),
    "without_zero_grad": (with_step(without_zero_grad), "grad/"),
    "frozen_step_count": (with_step(frozen_step_count), "change/"),
    "frozen_layer": (with_step(frozen_layer), "change/0.weight"),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", TRAINING_MUTANTS)
def test_mutants_of_training_are_caught(check, name, seed):
    change, tensor = TRAINING_MUTANTS[name]
    verification = check(mlp("train"), change, seeds=1, first=seed)
    assert any(failure.tensor.startswith(tensor) for failure in verification.failures), verification.headline
    assert min(failure.step for failure in verification.failures) == (1 if name == "frozen_step_count" else 0)


def test_an_arm_starts_from_the_baselines_values(check):
    assert check(mlp("train"), other_start, BITWISE, seeds=1).ok


def off_by_2_percent(inner, program, batch):
    return {name: value * 1.02 for name, value in inner(program, batch).items()}


def in_5_bits(layer, x):
    def truncated(tensor):
        return (tensor.float().view(torch.int32) & ~0x3FFFF).view(torch.float32)

    return nn.functional.linear(truncated(x), truncated(layer.weight), layer.bias)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "change",
    [with_step(off_by_2_percent), with_linear(without_bias), with_linear(in_5_bits), with_step(mutates_its_batch)],
    ids=["off_by_2_percent", "without_bias", "in_5_bits", "mutates_its_batch"],
)
def test_low_precision_is_no_excuse(check, dtype, change):
    assert not check(mlp("forward"), lambda program: autocast(change(program), dtype), precision(dtype)).ok


@pytest.mark.parametrize("name", TRAINING_MUTANTS)
def test_low_precision_is_no_excuse_in_training(check, name):
    change, tensor = TRAINING_MUTANTS[name]
    verification = check(mlp("train"), lambda program: autocast(change(program), "bfloat16"), precision("bfloat16"))
    assert any(failure.tensor.startswith(tensor) for failure in verification.failures), verification.headline


# --- contracts, repetition, references -------------------------------------------------------------------------


def test_bitwise_wants_equal_bits(check):
    same = check(mlp("train"), contract=BITWISE, seeds=1)
    assert same.ok
    assert same.bitwise
    assert "bit for bit" in same.headline
    other = check(mlp("train"), with_linear(split_k), BITWISE, seeds=1, steps=1)
    assert not other.ok
    assert other.worst.gate == "BITWISE"
    assert check(mlp("train"), with_linear(split_k), seeds=1).ok


def wobbling(program: Program) -> Program:
    """A baseline that adds in another order every time, as atomics do."""
    generator = torch.Generator().manual_seed(0)

    def any_order(layer, x):
        order = torch.randperm(layer.in_features, generator=generator)
        return x[..., order] @ layer.weight[:, order].T + layer.bias

    return with_linear(any_order)(program)


def test_bits_that_the_baseline_does_not_repeat_are_named(check):
    verification = check(mlp("train"), wobbling, BITWISE, baseline=wobbling, seeds=3)
    assert verification.ok, verification.headline
    assert not verification.repeats
    assert verification.contract == str(BITWISE)
    assert {"grad/0.weight", "change/0.weight"} <= set(verification.unchecked_bits)  # one number may repeat by chance
    assert "equal bits, as promised, could not be checked for " in verification.headline
    assert not check(mlp("train"), with_linear(in_bfloat16), BITWISE, baseline=wobbling).ok


def test_a_candidate_may_change_its_batch_where_the_baseline_does(check, net):
    assert check(net(mode="forward", make=Cached)).ok


class Cached(nn.Module):
    """Keeps what it computes in its own input, times a factor; None: keeps nothing."""

    def __init__(self, factor: float | None = 1.0) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(192, 192), factor

    def forward(self, x):
        y = self.linear(x.flatten(1))
        if self.factor is not None:
            x.copy_(self.factor * y.view_as(x))
        return y


def with_factor(factor: float | None) -> Callable[[Program], Program]:
    def change(program: Program) -> Program:
        program.model.factor = factor
        return program

    return change


def test_what_a_step_leaves_in_its_input_is_judged_like_an_output(check, net):
    cached = net(mode="forward", make=Cached)
    verification = check(cached, with_linear(split_k))
    assert verification.ok, verification.headline
    assert verification.tensors["input/0"].error_rms > 0
    assert "input/0 fails G" in check(cached, with_factor(1.001)).headline
    assert (
        "the step leaves the caller's batch as it was; the baseline changes it"
        in check(cached, with_factor(None)).headline
    )
    alone = check(net(mode="forward", make=lambda: Cached(None)), with_factor(1.0))
    assert "the step changes the caller's batch; the baseline leaves it alone" in alone.headline


@pytest.mark.parametrize("touch", [lambda: torch.manual_seed(8), lambda: torch.rand(1)])
def test_a_candidate_that_touches_the_generators_is_told(check, touch):
    def reseeds(inner, program, batch):
        touch()
        return inner(program, batch)

    verification = check(mlp("forward"), with_step(reseeds), BITWISE)
    assert verification.ok, verification.headline
    assert RESEEDED in verification.notes
    assert verification.headline.startswith("outputs equal")
    assert RESEEDED not in check(mlp("forward")).notes


def test_randomness_leaves_equivalence_undecided(check, net):
    def model():
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, 10))

    with pytest.raises(NoReference, match="random"):
        check(net(mode="forward_backward", make=model))


def test_a_baseline_far_from_fp64_leaves_equivalence_undecided(check, net):
    class Cancelling(nn.Module):
        def forward(self, x):
            return (x + 1e8) - 1e8

    def wrong(program):
        return replace(program, forward=lambda x: 1.5 * x)

    found = check(net(mode="forward", make=Cancelling), wrong)
    assert found.undecided.startswith("a wrong output could not be told from a right one")
    assert not check(net(mode="forward", make=Cancelling)).undecided, "equal bits need no yardstick"


def test_a_model_that_needs_float32_has_no_reference(check, net):
    class Only32(nn.Module):
        def forward(self, x):
            if x.element_size() != 4:
                raise RuntimeError("float32 only")
            return x

    with pytest.raises(NoReference, match="float32 only"):
        check(net(mode="forward", make=Only32))


def test_an_output_that_fp64_lacks_is_not_passed_over(check, net):
    class More(nn.Module):
        def forward(self, x):
            return (x, x + 1) if x.element_size() == 4 else (x,)

    with pytest.raises(NoReference, match=r"out/output\.1"):
        check(net(mode="forward", make=More))


def test_fp64_moves_to_the_cpu_where_it_does_not_fit(check, monkeypatch):
    golden, failed = Fp64Reference.step, []

    def once(self, index, state):
        if not failed:
            failed.append(index)
            self.device = torch.device("meta")  # anything but the CPU
            raise torch.OutOfMemoryError("CUDA out of memory")
        return golden(self, index, state)

    monkeypatch.setattr(Fp64Reference, "step", once)
    verification = check(mlp("forward"))
    assert verification.ok
    assert verification.reference == "fp64 on cpu"


def test_a_loss_scale_settles_before_steps_are_compared(check):
    def change(program):
        return autocast(program, "float16")

    workload = mlp("train", optim="sgd")
    workload.loss = lambda output, batch: nn.functional.mse_loss(output, batch[-1]) * 4.0
    plain = check(workload, change, precision("float16"))
    assert plain.ok, plain.headline
    workload.loss = lambda output, batch: nn.functional.mse_loss(output, batch[-1]) * 1e6
    assert "NaN or Inf" in check(workload, change, precision("float16")).headline


def test_every_seed_gets_new_inputs_and_failures_say_which(check):
    calls = []

    def right_once(inner, program, batch):
        calls.append(batch[0].clone())
        outputs = inner(program, batch)
        return outputs if len(calls) <= 2 else {name: value + 1 for name, value in outputs.items()}

    verification = check(mlp("forward"), with_step(right_once), seeds=5, first=40)
    assert verification.seeds == [40, 41]
    assert verification.worst.seed == 41
    assert not torch.equal(*calls[-2:])  # the first is the arm's own


@pytest.mark.parametrize("at", [2, 3])
def test_a_step_that_was_wrong_once_is_judged_by_that_run(check, at):
    """A step that fails by narrow limits is judged again by wider ones: by the results that failed, not by others."""
    calls = count(1)

    def wrong_once(inner, program, batch):
        outputs, off = inner(program, batch), float(next(calls) == at)
        return {name: value + off for name, value in outputs.items()}

    assert not check(mlp("forward"), with_step(wrong_once), seeds=3).ok


def test_runs_that_only_widen_limits_are_made_where_a_step_did_not_pass_without_them(check, net, monkeypatch):
    made, plain = [], one_set.measure_disturbed

    def counted(*args):
        made.append(args)
        plain(*args)

    monkeypatch.setattr(one_set, "measure_disturbed", counted)
    assert check(net(mode="forward_backward"), HONEST["eager"], seeds=4).ok
    assert len(made) == 1  # of the last set, whose mutants tell what the gates can see
    assert not check(
        net(mode="forward_backward"),
        with_linear(lambda layer, x: 1.01 * F.linear(x, layer.weight, layer.bias)),
        seeds=4,
    ).ok
    assert len(made) == 2
    assert check(net(mode="forward_backward"), HONEST["eager"], seeds=1, power=False).ok
    assert len(made) == 2  # nothing asks what the gates can see, as after timing


@dataclass
class Parts(Mlp):
    """In float64 it computes something else."""

    def model(self):
        return nn.Sequential(super().model(), WidthFactor())


class WidthFactor(nn.Module):
    def forward(self, x):
        return x * (1.003 if x.element_size() == 4 else 1.0)


def test_a_set_without_noisy_runs_does_not_hide_that_the_baseline_parts_from_float64(check):
    """Its error widens limits, so that what is off passes. Only noisy runs tell that rounding is no cause."""

    def off(inner, program, batch):
        return {name: value * 1.002 for name, value in inner(program, batch).items()}

    found = check(Parts("forward", dim=32, layers=2, batch_size=16), with_step(off), seeds=2)
    assert found.ok
    assert found.unseen
    assert found.parts_in


def test_forward_only_needs_no_noisy_steps_unless_outputs_are_few(net):
    many = Judge(mlp("forward"), CPU, torch.float32, 0, REASSOCIATES)
    few = Judge(mlp("forward", dim=2, batch_size=2), CPU, torch.float32, 0, REASSOCIATES)
    for judge, steps in ((many, 0), (few, 6)):
        judge.draw(0, 1)
        info = judge.info()
        assert (info.reference, info.steps, info.noisy_steps) == ("fp64 on cpu", 1, steps)
        assert (info.unit, info.unit_used, info.reassociated_runs) == (2**-24, 2**-24, 4)
        assert (info.anew, info.others_learn, info.in_turns) == (True, False, False)


@pytest.mark.parametrize("mode", ["forward", "forward_backward"])
def test_parameters_that_a_step_changes_without_an_optimizer_are_compared(check, net, mode):
    class Moving(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.table = nn.Linear(192, 10), nn.Parameter(torch.randn(4, 192))

        def forward(self, x):
            x = x.flatten(1)
            y = self.linear(x + self.table.mean(0).detach())
            with torch.no_grad():
                self.table.lerp_(x[:4], 0.1)
            return y

    def otherwise(inner, program, batch):
        outputs = inner(program, batch)
        with torch.no_grad():
            program.model.table.mul_(1.01)
        return outputs

    assert check(net(mode=mode, make=Moving)).ok
    verification = check(net(mode=mode, make=Moving), with_step(otherwise))
    assert verification.worst.tensor == "param/table"
    assert verification.worst.gate == "G1"
