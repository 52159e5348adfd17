"""Patterns are found however they are spelled, and only where replacing them changes nothing but the time."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

import optexp.kernelkit.kernel
from optexp.kernelkit.kernel import for_graphs, kernels
from optexp.kernelkit.recording import rehearsals
from optexp.transforms.rewriting import Rewriter, backend

ROOT = math.sqrt(2 / math.pi)
BIAS = torch.linspace(-1, 1, 6)

TANH_FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "library": lambda x: F.gelu(x, approximate="tanh"),
    "module": nn.GELU("tanh"),
    "power": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
    "operator": lambda x: x * 0.5 * (torch.tanh(ROOT * (x + 0.044715 * x**3)) + 1),
    "products": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * x * x * x))),
    "factored": lambda x: x / 2 * (1 + (0.7978845608028654 * x * (1 + 0.044715 * x * x)).tanh()),
    "sigmoid": lambda x: x * torch.sigmoid(2 * ROOT * (x + 0.044715 * x * x * x)),
    "digits cut off": lambda x: 0.5 * x * (1.0 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x))),
}
EXACT_FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "library": F.gelu,
    "erf": lambda x: 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "method": lambda x: x.mul(0.5).mul((x * 0.7071067811865476).erf().add(1)),
}


def rewritten(function: Callable[..., Any], *args: Tensor) -> tuple[Any, Rewriter]:
    """What the function computes with our kernels put in, and what the rewriter did."""
    rewriter = Rewriter(list(kernels().values()))
    return torch.compile(function, backend=backend(rewriter), fullgraph=True)(*args), rewriter


def assert_same(function: Callable[..., Any], *args: Tensor, **replaced: int) -> Rewriter:
    """Values and gradients stay the same, and exactly this was replaced."""
    leaves = [arg.clone().requires_grad_() for arg in args]
    ours, rewriter = rewritten(function, *leaves)
    ours.sum().backward()
    plain = [arg.clone().requires_grad_() for arg in args]
    theirs = function(*plain)
    theirs.sum().backward()
    torch.testing.assert_close(ours, theirs)
    for mine, other in zip(leaves, plain, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    assert rewriter.replaced == replaced
    return rewriter


@pytest.fixture
def x(interpreted: None) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("form", TANH_FORMS)
def test_gelu_by_tanh(form: str, x: Tensor) -> None:
    assert_same(TANH_FORMS[form], x, gelu=1)


@pytest.mark.parametrize("form", EXACT_FORMS)
def test_exact_gelu(form: str, x: Tensor) -> None:
    assert_same(EXACT_FORMS[form], x, gelu=1)


@pytest.mark.parametrize("form", ["library", "power"])
def test_gelu_of_a_sum_whichever_operand_is_the_bias(form: str, x: Tensor) -> None:
    assert_same(lambda x, bias: TANH_FORMS[form](x + bias), x, BIAS, bias_gelu=1)
    assert_same(lambda x, bias: TANH_FORMS[form](bias + x), x, BIAS, bias_gelu=1)
    assert_same(lambda x, y: TANH_FORMS[form](x + y), x, x.flip(0), gelu=1)


@pytest.mark.parametrize(
    "chain",
    [
        lambda x, bias: (torch.relu(x) + bias) * 1.5,
        lambda x, bias: 1.5 * (bias + F.relu(x)),
        lambda x, bias: torch.mul(x.relu().add(bias), 1.5),
        lambda x, bias: (nn.ReLU()(x) + bias) / 0.5,
    ],
)
def test_relu_bias_scale(chain: Callable[..., Tensor], x: Tensor) -> None:
    assert_same(chain, x, BIAS, relu_bias_scale=1)


@pytest.mark.parametrize(
    "norm",
    [
        lambda x, row: F.layer_norm(x, (6,), row, row),
        lambda x, row: torch.layer_norm(x, (6,), row, row),
        lambda x, row: torch.layer_norm(x, (6,), row, row, 1e-5, False),
        lambda x, row: torch.layer_norm(x, [6], weight=row, bias=row, cudnn_enable=True),
    ],
)
def test_layernorm(norm: Callable[..., Tensor], x: Tensor) -> None:
    assert_same(lambda x, row: norm(x, row) * x, x, BIAS, layernorm=1)


@pytest.mark.parametrize("dropout", [F.dropout, torch.dropout])
def test_relu_bias_dropout(dropout: Callable[..., Tensor], x: Tensor) -> None:
    assert_same(lambda x, bias: dropout(torch.relu(x) + bias, 0.0, True), x, BIAS, relu_bias_dropout=1)


@pytest.mark.parametrize("softmax", [lambda x: F.softmax(x, dim=-1), lambda x: x.softmax(1), nn.Softmax(-1)])
def test_softmax_along_the_last_dimension(softmax: Callable[[Tensor], Tensor], x: Tensor) -> None:
    assert_same(lambda x: softmax(x) * x, x, softmax=1)


def shared(x: Tensor) -> Tensor:
    inner = 1 + torch.tanh(ROOT * (x + 0.044715 * x**3))
    return 0.5 * x * inner + inner


def overwritten(x: Tensor, bias: Tensor) -> Tensor:
    z = x * 1
    total = torch.relu(z) + bias
    z.add_(1)
    return total * 1.5 + z


def in_place(x: Tensor, bias: Tensor) -> Tensor:
    return (F.relu(x * 1, inplace=True) + bias) * 1.5


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        pytest.param(shared, 1, id="an inner value is read elsewhere"),
        pytest.param(overwritten, 2, id="memory is written in between"),
        pytest.param(in_place, 2, id="the operation is in place"),
        pytest.param(lambda x: x * torch.sigmoid(1.702 * x), 1, id="an approximation of GELU"),
        pytest.param(lambda x: torch.softmax(x, 0), 1, id="another dimension"),
        pytest.param(lambda x: torch.softmax(x.sum(), -1), 1, id="a single number"),
        pytest.param(lambda x, bias: (torch.relu(x) + bias) * bias, 2, id="a scale for each column"),
        pytest.param(lambda x: x + x.flip(0), 1, id="too small"),
        pytest.param(lambda x: torch.relu(x) * 2, 1, id="half a pattern"),
        pytest.param(lambda x, bias: (x.clamp(min=0) + bias) * 1.5, 2, id="another gradient at 0 than a ReLU"),
    ],
)
def test_what_must_stay(function: Callable[..., Tensor], arguments: int, x: Tensor) -> None:
    assert_same(function, *(x, BIAS)[:arguments])


def test_what_backward_would_read_is_written_to(x: Tensor) -> None:
    """bias_gelu keeps its input, F.gelu the sum."""

    def function(x: Tensor, bias: Tensor) -> Tensor:
        x = x * 2
        x += F.gelu(x + bias)
        return x

    assert any("is written to later" in why for why in assert_same(function, x, BIAS, gelu=1).refused)


def test_a_result_is_written_to(x: Tensor) -> None:
    assert_same(lambda x, bias: F.gelu(x + bias).add_(x), x, BIAS, bias_gelu=1)


def test_refusals_have_reasons(x: Tensor) -> None:
    _, rewriter = rewritten(lambda x: torch.softmax(x, 0) + x, x)
    assert set(rewriter.refused) == {"softmax: it would not pay", "add: it would not pay"}


def test_what_would_pay_in_a_graph_says_so(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optexp.kernelkit.kernel, "is_small", lambda x, operations=1: not rehearsals)
    _, rewriter = rewritten(lambda x: torch.softmax(x, -1), x)
    assert set(rewriter.refused) == {"softmax: its launches would not pay: add cuda_graph"}


def test_how_many_there_are_may_depend_on_data(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        optexp.kernelkit.kernel, "is_small", lambda x, ops=1: not is_compiling() and bool(x.numel() * ops < 4)
    )
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        y, rewriter = rewritten(lambda x: torch.softmax(torch.masked_select(x, x > 0), -1), x)
    torch.testing.assert_close(y, torch.softmax(x[x > 0], -1))
    assert set(rewriter.refused) == {"softmax: its size depends on data"}


def test_inside_an_autocast_region(x: Tensor) -> None:
    layer = nn.Linear(6, 6)

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.softmax(layer(x), -1)

    ours, rewriter = rewritten(function, x)
    assert ours.dtype is function(x).dtype
    assert rewriter.replaced == {"softmax": 1}


def test_no_pattern_moves_past_the_end_of_a_region(x: Tensor) -> None:
    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            bias = torch.relu(x) + BIAS
        return bias * 1.5 + x

    assert_same(function, x)


def test_changing_shapes_are_rewritten_too(x: Tensor) -> None:
    rewriter = Rewriter(list(kernels().values()))
    compiled = torch.compile(TANH_FORMS["factored"], backend=backend(rewriter), dynamic=True)
    for rows in (2, 3, 4):
        torch.testing.assert_close(compiled(x[:rows]), F.gelu(x[:rows], approximate="tanh"))
    assert rewriter.replaced == {"gelu": 1}


def test_what_a_graph_records_is_called_and_compiled_as_before(x: Tensor) -> None:
    gelu = partial(for_graphs(kernels()["gelu"]).function, approximate="tanh")
    for function in (gelu, torch.compile(lambda x: gelu(x), backend="eager", fullgraph=True)):
        torch.testing.assert_close(function(x), F.gelu(x, approximate="tanh"))


def test_what_is_too_small_for_a_launch_of_ours_stays_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(
        "optexp.kernelkit.kernel.current_stream", lambda device: 0
    )  # without a GPU there is none to ask
    with FakeTensorMode():
        small, large = (torch.empty(rows, 1024, device="cuda") for rows in (1, 16384))
        leaves = [torch.empty(rows, 1024, device="cuda", requires_grad=True) for rows in (16384, 32768)]
    for name, args in (
        ("gelu", ("tanh",)),
        ("softmax", (-1, None)),
        ("layernorm", ((1024,), None, None, 1e-5)),
        ("relu_bias_scale", (None, 1.5)),
        ("relu_bias_dropout", (None, 0.1, True)),
        ("bias_gelu", (None, "tanh")),
    ):
        assert not kernels()[name].worthwhile(small, *args)
        assert kernels()[name].worthwhile(large, *args)
        assert for_graphs(kernels()[name]).worthwhile(small, *args)  # there, launches cost the host nothing
        assert not kernels()[name].worthwhile(small, *args)
        assert kernels()[name].worthwhile(leaves[1], *args)
    assert not kernels()["gelu"].worthwhile(leaves[0], "tanh")  # Python would take longer, in both passes
    with FakeTensorMode():
        weight = torch.empty(1024, 1024, device="cuda")
        learned = torch.empty(1024, 1024, device="cuda", requires_grad=True)
    linear_gelu = kernels()["linear_gelu"].worthwhile
    assert not linear_gelu(small, weight, None, "none")
    assert not linear_gelu(small, weight, None, "tanh")
    with FakeTensorMode():
        half = {"device": "cuda", "dtype": torch.bfloat16}
        halves = torch.empty(1, 1024, **half), torch.empty(1024, 1024, **half)
        learned_half = torch.empty(1024, 1024, requires_grad=True, **half)
    assert linear_gelu(*halves, None, "tanh")  # by the library's coarse epilogue, which keeps nothing for backward
    assert not linear_gelu(*halves, None, "none")
    assert not linear_gelu(halves[0], learned_half, None, "tanh")
    assert not linear_gelu(small, learned, None, "tanh")
    assert linear_gelu(large, learned, None, "none")
