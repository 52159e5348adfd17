"""Modules compute what torch's do with the same parameters, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optexp.kernelkit.kernel import kernels
from optexp.kernels.add import Add
from optexp.kernels.bias_gelu import BiasGELU
from optexp.kernels.gelu import GELU
from optexp.kernels.layernorm import LayerNorm
from optexp.kernels.layernorm_linear import LayerNormLinear
from optexp.kernels.linear_gelu import LinearGELU
from optexp.kernels.relu import ReLU
from optexp.kernels.relu_bias_dropout import ReLUBiasDropout
from optexp.kernels.relu_bias_scale import ReLUBiasScale
from optexp.kernels.softmax import Softmax

FEATURES = 24
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# Of each kernel its module, and what that is to compute of its inputs and parameters.
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "add": (Add, torch.add),
    "bias_gelu": (lambda: BiasGELU(FEATURES, "tanh"), lambda x, bias: F.gelu(x + bias, approximate="tanh")),
    "gelu": (lambda: GELU("tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "layernorm": (lambda: LayerNorm(FEATURES), lambda x, weight, bias: F.layer_norm(x, (FEATURES,), weight, bias)),
    "layernorm_linear": (
        lambda: LayerNormLinear(nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 16)),
        lambda x, gamma, beta, weight, bias: F.linear(F.layer_norm(x, (FEATURES,), gamma, beta), weight, bias),
    ),
    "linear_gelu": (lambda: LinearGELU(FEATURES, 16), lambda x, weight, bias: F.gelu(F.linear(x, weight, bias))),
    "relu": (ReLU, torch.relu),
    "relu_bias_dropout": (lambda: ReLUBiasDropout(FEATURES).eval(), lambda x, bias: torch.relu(x) + bias),
    "relu_bias_scale": (lambda: ReLUBiasScale(FEATURES, 1.5), lambda x, bias: (torch.relu(x) + bias) * 1.5),
    "softmax": (lambda: Softmax(-1), lambda x: torch.softmax(x, -1)),
}


def test_every_kernel_has_a_module() -> None:
    assert MODULES.keys() == kernels().keys()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_computes_what_torch_does(name: str, device: str) -> None:
    torch.manual_seed(0)
    made, expected = MODULES[name]
    module = made().to(device)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    inputs = [torch.randn(5, FEATURES, device=device, requires_grad=True) for _ in range(2 if name == "add" else 1)]
    leaves = [*inputs, *module.parameters()]
    given = torch.randn_like(y := module(*inputs))
    z = expected(*leaves)
    torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(torch.autograd.grad(y, leaves, given), torch.autograd.grad(z, leaves, given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_drops_in_training_only(device: str) -> None:
    module, x = ReLUBiasDropout(FEATURES, 0.25).to(device), torch.ones(200, FEATURES, device=device)
    y = module(x)
    torch.testing.assert_close(y, torch.where(y > 0, 4 / 3, 0.0))
    assert 0.2 < (y == 0).float().mean() < 0.3
    assert torch.equal(module.eval()(x), x)


@pytest.mark.parametrize("device", DEVICES)
def test_relu_may_write_over_its_input(device: str) -> None:
    x = torch.tensor([-1.0, 2.0], device=device)
    assert ReLU(inplace=True)(x).data_ptr() == x.data_ptr()
    assert x.tolist() == [0.0, 2.0]
