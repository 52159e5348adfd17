"""In the reference, a request for float32 means float64."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch.ao import quantization
from torch.nn.attention.flex_attention import flex_attention

from optexp.support.float64 import InFloat64, is_wide

REQUESTS = {
    "to": lambda x: x.to(torch.float32),
    "to_device_dtype": lambda x: x.to("cpu", torch.bfloat16),
    "float": lambda x: x.float(),
    "half": lambda x: x.half(),
    "type": lambda x: x.type(torch.float32),
    "type_name": lambda x: x.type("torch.FloatTensor"),
    "softmax": lambda x: torch.nn.functional.softmax(x, -1, dtype=torch.float32),
    "sum": lambda x: x.sum(dtype=torch.float32),
    "factory": lambda x: torch.ones(2, dtype=torch.float32) @ x,
    "default": lambda x: torch.eye(2) @ x,
    "autocast": lambda x: torch.autocast("cpu", torch.bfloat16)(torch.mm)(x, x),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_are_redirected(name):
    with InFloat64():
        assert REQUESTS[name](torch.full((2, 2), 1 / 3, dtype=torch.float64)).dtype is torch.float64


def test_integers_and_bits_stay_what_they_are_and_the_mode_ends():
    with InFloat64():
        assert torch.ones(2).to(torch.int32).dtype is torch.int32
        assert torch.zeros(2, dtype=torch.int32).view(torch.float32).dtype is torch.float32
    assert torch.ones(2, dtype=torch.float64).float().dtype is torch.float32
    assert torch.get_default_dtype() is torch.float32


FIRST_STEP_OF_A_PROCESS = """
import torch
from optexp.support.float64 import InFloat64

with InFloat64(torch.float32):
    model = torch.nn.Linear(2, 2)
    model(torch.ones(2)).sum().backward()
    torch.optim.Adam(model.parameters()).step()
scale = type("Scale", (), {"factor": 2})()  # Dynamo compares such constants
torch.compile(lambda x, scale: x * scale.factor, backend="eager")(torch.ones(2), scale)
"""


def test_the_compiler_works_after_an_optimizer_whose_first_step_imported_it() -> None:
    assert subprocess.run([sys.executable, "-c", FIRST_STEP_OF_A_PROCESS], check=False).returncode == 0


def test_a_dtype_is_that_of_the_arms() -> None:
    x, z = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.complex128)
    with InFloat64(torch.float32):
        assert (x.dtype, z.dtype, x.int().dtype) == (torch.float32, torch.complex64, torch.int32)
        assert is_wide(x.to(x.dtype))
        assert is_wide(torch.zeros(2, dtype=x.dtype))
        assert is_wide(x.view(x.dtype))
    with InFloat64():
        assert x.dtype is torch.float64


def test_code_that_is_compiled_runs_as_python() -> None:
    whole = torch.compile(lambda x: x.float() + 1, backend="eager", fullgraph=True)
    x = torch.full((2,), 1 / 3, dtype=torch.float64)
    with InFloat64(torch.float32):
        assert torch.equal(whole(x), x + 1)


def test_values_are_those_of_float64():
    x = torch.tensor(1 / 3, dtype=torch.float64)
    with InFloat64():
        assert x.float().double() == x


def _dynamic() -> torch.nn.Module:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.out = torch.nn.LSTM(4, 8), torch.nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.rows(x)[1][0])

    layers = {torch.nn.LSTM, torch.nn.Linear}
    return quantization.quantize_dynamic(Net().eval(), layers, dtype=torch.qint8)


def _static() -> torch.nn.Module:
    ends = quantization.QuantStub(), quantization.DeQuantStub()
    net = torch.nn.Sequential(ends[0], torch.nn.Linear(4, 3), torch.nn.ReLU(), ends[1])
    net.qconfig = quantization.get_default_qconfig("x86")
    quantization.prepare(net.eval(), inplace=True)(torch.randn(64, 4))
    return quantization.convert(net)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [_dynamic, _static])
def test_quantized_models_run_in_float64(make: Callable[[], torch.nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(2, 5, 4)
    expected = model(x)
    with InFloat64(torch.float32):
        found = copy.deepcopy(model).to(torch.float64)(x.to(torch.float64))
    assert found.dtype is torch.float64
    assert torch.allclose(found.float(), expected, atol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("by_channel", [True, False])
def test_quantization_while_training_runs_in_float64(fused: bool, by_channel: bool) -> None:
    quantizer = quantization.FusedMovingAvgObsFakeQuantize if fused else quantization.FakeQuantize
    observer = quantization.MovingAverageMinMaxObserver
    if by_channel:
        observer = quantization.MovingAveragePerChannelMinMaxObserver
    scheme = torch.per_channel_symmetric if by_channel else torch.per_tensor_affine
    made = quantizer(observer, quant_min=-128, quant_max=127, dtype=torch.qint8, qscheme=scheme)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    expected = copy.deepcopy(made)(x)
    with InFloat64():
        found = made.to(torch.float64)(x.to(torch.float64).requires_grad_())
    assert found.dtype is torch.float64
    assert found.requires_grad
    off = (found - expected).abs()
    assert off.max() <= 1.01 * made.scale.max()  # a number between two steps may go to either
    assert (off < 1e-6).sum() >= 10
    assert made.scale.dtype is torch.float64


def test_what_torch_compiles_runs_eagerly_and_in_float64() -> None:
    attention, x = torch.compile(flex_attention), torch.randn(1, 1, 16, 8, dtype=torch.float64)
    with InFloat64():
        assert attention(x, x, x).dtype is torch.float64  # which has no code for float64 on a CPU
        found = torch.cond(x.sum() < 1e9, lambda x: x.float().exp(), lambda x: x, (x.requires_grad_(),))
    assert found.dtype is torch.float64
    assert found.requires_grad


@pytest.mark.parametrize(
    ("a", "b", "ends"),
    [((12, 8), (3, 8, 4), [4, 4, 8]), ((4, 16), (16, 8), [4, 12, 16]), ((2, 4, 8), (8, 12), [8, 12]),
     ((2, 4, 8), (2, 8, 4), None)],
    ids=["rows", "what is summed over", "columns", "batches"],
)  # fmt: skip
def test_products_of_groups_have_float64(a: tuple[int, ...], b: tuple[int, ...], ends: list[int] | None) -> None:
    """As the experts of a mixture compute them."""
    offs = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    left, right = torch.randn(a), torch.randn(b)
    with InFloat64():
        found = torch.nn.functional.grouped_mm(left.double(), right.double(), offs=offs)
    expected = torch.nn.functional.grouped_mm(left, right, offs=offs)
    assert found.dtype is torch.float64
    rows = len(expected) if len(a) == 3 or len(b) == 2 or ends is None else ends[-1]  # others have no values
    torch.testing.assert_close(found[:rows].float(), expected[:rows])
