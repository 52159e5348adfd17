"""Workloads of one operation: right values, right gradients of inputs and parameters, sizes by device."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optexp.program import Program, gradients
from optexp.workloads.add import Add
from optexp.workloads.cdist import Cdist
from optexp.workloads.elementwise import Elementwise
from optexp.workloads.gelu import Gelu
from optexp.workloads.layernorm_linear import LayerNormLinear
from optexp.workloads.linear_gelu import LinearGelu
from optexp.workloads.matmul import Matmul
from optexp.workloads.operation import Operation
from optexp.workloads.softmax import Softmax

Expected = Callable[..., Tensor]  # of the inputs, then the parameters in their order


def affine_norm(x: Tensor, gain: Tensor, shift: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    normalised = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    return (normalised * gain + shift) @ weight.T + bias


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


CASES: dict[str, tuple[Operation, Expected]] = {
    "add": (Add(size=33), lambda a, b: a + b),
    "cdist": (Cdist(points=5, dim=3), lambda a, b: (a[:, None] - b[None]).square().sum(-1).sqrt()),
    "dropout-off": (
        Elementwise(variant="relu_bias_dropout", rows=4, columns=3, p=0.0),
        lambda x, bias: x.clamp(min=0) + bias,
    ),
    "gelu": (Gelu(size=5), tanh_gelu),
    "gelu-functional": (Gelu(size=5, variant="functional"), tanh_gelu),
    "gelu-of-sum": (Gelu(size=5, add=True), lambda a, b: tanh_gelu(a + b)),
    "layernorm_linear": (LayerNormLinear(rows=4, features=6, out=3), affine_norm),
    "linear_gelu": (LinearGelu(rows=4, features=6, out=3), lambda x, w, b: tanh_gelu(x @ w.T + b)),
    "matmul": (Matmul(size=5), lambda a, b: (a[:, :, None] * b[None]).sum(1)),
    "relu_bias_scale": (
        Elementwise(rows=4, columns=3, scale=3.0),
        lambda x, bias: (x.clamp(min=0) + bias) * 3.0,
    ),
    "softmax": (Softmax(rows=4, columns=7), lambda x: x.exp() / x.exp().sum(1, keepdim=True)),
    "softmax-of-sum": (Softmax(rows=4, columns=7, add=True), lambda a, b: (a + b).exp() / (a + b).exp().sum(1, True)),
}


def build(workload: Operation, mode: str) -> tuple[Program, tuple[Tensor, ...]]:
    """In float64, as the reference runs it; and a batch."""
    workload.mode = mode
    program = workload.build(torch.device("cpu"), torch.float64, seed=0)
    batch = workload.batch(torch.Generator().manual_seed(1))
    return program, tuple(tensor.double() for tensor in batch)


@pytest.mark.parametrize("name", CASES)
def test_forward_is_the_definition(name: str):
    workload, expected = CASES[name]
    program, inputs = build(workload, "forward")
    output = program.step(program, inputs)["output"]
    torch.testing.assert_close(output, expected(*inputs, *program.model.parameters()).detach())
    assert output.shape == workload.output_shape


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_definition(name: str):
    workload, expected = CASES[name]
    program, (*inputs, arriving) = build(workload, "forward_backward")
    kept = [tensor.clone() for tensor in inputs]
    outputs = program.step(program, (*inputs, arriving))
    leaves = [tensor.clone().requires_grad_() for tensor in (*inputs, *program.model.parameters())]
    wanted = torch.autograd.grad(expected(*leaves), leaves, arriving)
    found = [outputs[f"input_grad.{i}"] for i in range(len(inputs))]
    found += [gradients(program)[f"grad/{name}"] for name, _ in program.model.named_parameters()]
    torch.testing.assert_close(found, list(wanted))
    assert all(torch.equal(tensor, before) for tensor, before in zip(inputs, kept, strict=True))
    assert not any(tensor.requires_grad for tensor in inputs)


def test_dropout_keeps_the_share_it_says_and_scales_it():
    workload = Elementwise(variant="relu_bias_dropout", rows=200, columns=100, p=0.25)
    program, (x,) = build(workload, "forward")
    (bias,) = program.model.parameters()
    dropped = program.step(program, (x,))["output"]
    kept = dropped != 0
    assert kept.double().mean().item() == pytest.approx(0.75, abs=0.02)
    torch.testing.assert_close(dropped[kept], ((x.clamp(min=0) + bias) / 0.75).detach()[kept])


@pytest.mark.parametrize(
    ("workload", "cuda"),
    [
        (Add(), (2**26,)),
        (Cdist(), (8192, 8192)),
        (Elementwise(), (16384, 8192)),
        (Gelu(), (16384, 16384)),
        (LayerNormLinear(), (16384, 1024)),
        (LinearGelu(), (4096, 4096)),
        (Matmul(), (4096, 4096)),
        (Softmax(), (16384, 1024)),
    ],
)
def test_sizes_left_open_depend_on_the_device(workload: Operation, cuda: tuple[int, ...]):
    assert workload.resolve("cuda").output_shape == cuda
    small = workload.resolve("cpu").output_shape
    assert torch.Size(small).numel() <= 2**20
    assert type(workload).resolve(workload, "cpu").samples in (small[0], torch.Size(small).numel())


def test_a_size_that_was_given_stays():
    workload = Elementwise(rows=7).resolve("cuda")
    assert (workload.rows, workload.columns) == (7, 8192)


def test_no_model_hides_a_constant_that_could_be_left_out():
    """Parameters that are zeros or ones would let a candidate drop them and pass."""
    for workload, _ in CASES.values():
        program, _ = build(workload, "forward")
        for parameter in program.model.parameters():
            assert not torch.equal(parameter, torch.zeros_like(parameter))
            assert not torch.equal(parameter, nn.init.ones_(torch.empty_like(parameter)))
