"""GEMMs of float32 for forward and backward: of matrices that lie or stand, whatever the tiles, summed in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from optexp.kernelkit import gemm
from optexp.kernelkit.gemm import FLOAT32_TILINGS, TALL, Tiling, float32_tilings, multiply, multiply_by_tiles
from optexp.kernelkit.kernel import kernels

SMALL = Tiling(32, 32, 16, 4, 3)  # quick in the interpreter; the real ones are tested where they run
SMALL_CONFIGS = [SMALL, *(SMALL._replace(resident=0, parts=parts) for parts in (1, 2, 8))]
GPU_CONFIGS = [*FLOAT32_TILINGS, *(TALL._replace(parts=parts) for parts in (2, 4, 8))]
CONFIGS = [
    *(pytest.param("cpu", tiling) for tiling in SMALL_CONFIGS),
    *(pytest.param("cuda", tiling, marks=pytest.mark.gpu) for tiling in GPU_CONFIGS),
]
every_config = pytest.mark.parametrize(("device", "tiling"), CONFIGS)
everywhere = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])

UNIT = 8 * torch.finfo(torch.float32).eps  # which sums are as exact as, too


def padded(matrix: Tensor) -> Tensor:
    """Rows that begin 16 bytes behind the end of the last."""
    return torch.cat([matrix, torch.full_like(matrix[:, :4], torch.nan)], dim=1)[:, : matrix.shape[1]]


def standing(matrix: Tensor) -> Tensor:
    return matrix.T.contiguous().T


def standing_padded(matrix: Tensor) -> Tensor:
    return padded(matrix.T).T


def misaligned(matrix: Tensor) -> Tensor:
    buffer = torch.full((matrix.numel() + 1,), torch.nan, device=matrix.device)
    return buffer[1:].view(matrix.shape).copy_(matrix)


def strided(matrix: Tensor) -> Tensor:
    return torch.stack([matrix, torch.full_like(matrix, torch.nan)], dim=-1)[..., 0]


LAYOUTS = [padded, standing, standing_padded]


@pytest.fixture
def normal():
    torch.manual_seed(0)

    def normal(device: str, *shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    return normal


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch):
    """What is called by `multiply` takes this tiling and no other config. Returns the keys of races, as they come."""

    def only(tiling: Tiling) -> list[Any]:
        keys: list[Any] = []

        def this(what: str, key: Any, configs: list[Any], run: Any, device: torch.device) -> Tiling:
            assert set(FLOAT32_TILINGS) < set(configs), "tiles were not offered"
            keys.append(key)
            return tiling

        monkeypatch.setattr(gemm, "fastest", this)
        return keys

    return only


@pytest.mark.slow
@pytest.mark.parametrize("of_w", [*LAYOUTS, misaligned, strided])
@pytest.mark.parametrize("of_x", LAYOUTS)
@every_config
def test_every_way(
    tiling: Tiling, device: str, of_x: Callable[[Tensor], Tensor], of_w: Callable[[Tensor], Tensor], normal
) -> None:
    """More tiles than one each way, with tails; then more rows of tiles than are walked together, of one step."""
    for m, n, k in ((2 * tiling.m + 12, 2 * tiling.n + 8, 2 * tiling.k + 8), (10 * tiling.m, 8, 8)):
        x, w, bias = normal(device, m, k), normal(device, n, k) / k**0.5, normal(device, n)
        laid_x, laid_w = of_x(x), of_w(w)
        assert float32_tilings(laid_x, laid_w)
        for b in (bias, None):
            y = multiply_by_tiles(tiling, laid_x, laid_w, b)
            golden = F.linear(x.double(), w.double(), None if b is None else b.double())
            torch.testing.assert_close(y.double(), golden, rtol=UNIT, atol=UNIT)
            assert y.is_contiguous()  # as torch.compile is told


@every_config
def test_what_is_not_finite_stays_in_its_row(tiling: Tiling, device: str, normal) -> None:
    """Also of rows beyond the last, which are zeros, times infinity: of a part they lie before the next."""
    m, n, k = 2 * tiling.m + 12, 2 * tiling.n + 8, 2 * tiling.k + 8
    x, w = normal(device, m, k), normal(device, n, k)
    x[3, 5], x[7, 1], w[5, 7] = torch.inf, torch.nan, -torch.inf
    golden = F.linear(x, w)
    for laid_x in (x, standing(x)):
        y = multiply_by_tiles(tiling, laid_x, w)
        assert torch.equal(y.isfinite(), golden.isfinite())
        apart = ~golden.isfinite()
        torch.testing.assert_close(y[apart], golden[apart], rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("tiling", GPU_CONFIGS)
@pytest.mark.parametrize("change", [Tensor.clone, Tensor.abs], ids=["both signs", "one sign"])
@pytest.mark.parametrize("layout", [Tensor.contiguous, standing])
@pytest.mark.parametrize(("m", "k", "n"), [(300, 1024, 520), (64, 4100, 132), (1024, 8192, 1024)])
def test_nearly_as_exact_as_float32(
    tiling: Tiling,
    change: Callable[[Tensor], Tensor],
    layout: Callable[[Tensor], Tensor],
    m: int,
    k: int,
    n: int,
    normal,
) -> None:
    """As linear_gelu's is; and every run gives the same bits."""
    x, w = (layout(change(normal("cuda", *shape))) for shape in ((m, k), (n, k)))
    y = multiply_by_tiles(tiling, x, w)
    golden = F.linear(x.double(), w.double())
    ours, theirs = ((result.double() - golden).square().mean().sqrt() for result in (y, F.linear(x, w)))
    assert ours <= 3 * theirs
    assert all(torch.equal(multiply_by_tiles(tiling, x, w), y) for _ in range(20))


@pytest.mark.usefixtures("interpreted")
def test_what_tiles_are_not_offered_for() -> None:
    x, w = torch.zeros(16, 64), torch.zeros(32, 64)
    assert float32_tilings(x, w) == FLOAT32_TILINGS
    assert float32_tilings(x[:, :63], torch.zeros(32, 64)[:, :63]) == FLOAT32_TILINGS
    assert float32_tilings(x[:15], w) == FLOAT32_TILINGS
    assert float32_tilings(standing(x[:15]), w) == []  # whose columns begin anywhere
    assert float32_tilings(x[:, :63], standing(w[:, :63])) == []  # and so would rows of a copy
    assert float32_tilings(misaligned(x), w) == []
    assert float32_tilings(strided(x), w) == []
    assert float32_tilings(x[:1].expand(16, 64), w) == []
    assert float32_tilings(x[:, :1].expand(16, 64), w) == []
    assert float32_tilings(x, w[:1].expand(32, 64)) == FLOAT32_TILINGS  # which is copied
    assert float32_tilings(x, w[:30]) == []
    for a, b in ((x[:0], w), (x, w[:0]), (x[:, :0], w[:, :0])):
        assert float32_tilings(a, b) == []
    for dtype in (torch.float64, torch.bfloat16):
        assert float32_tilings(x.to(dtype), w.to(dtype)) == []


@pytest.mark.usefixtures("interpreted")
def test_sums_are_shared_out_where_tiles_are_few_and_sums_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "multiprocessors", lambda device: 132)

    def parts(m: int, k: int, n: int) -> list[int]:
        configs = float32_tilings(torch.empty(m, k), torch.empty(n, k))
        return [tiling.parts for tiling in configs if tiling.parts > 1]

    assert parts(128, 1024, 1024) == [2, 4, 8]
    assert parts(128, 512, 1024) == [2, 4]
    assert parts(1024, 16384, 1024) == [2, 4]
    assert parts(4096, 1024, 4096) == []
    assert parts(128, 252, 64) == []


@pytest.mark.parametrize(("m", "n", "k"), [(0, 8, 8), (8, 0, 8), (8, 8, 0), (7, 11, 13), (1, 4, 4)])
@everywhere
def test_any_size(device: str, m: int, n: int, k: int, normal) -> None:
    x, w, bias = normal(device, m, k), normal(device, n, k), normal(device, n)
    for laid_x, laid_w in ((x, w), (standing(x), standing(w))):
        for b in (bias, None):
            torch.testing.assert_close(multiply(laid_x, laid_w, b), F.linear(x, w, b))


GRADIENTS = {
    "linear_gelu": lambda x, gamma, beta, weight, bias: (x, weight, bias, "tanh"),
    "layernorm_linear": lambda x, gamma, beta, weight, bias: (x, (x.shape[-1],), gamma, beta, weight, bias),
}


@pytest.mark.parametrize("name", GRADIENTS)
@every_config
def test_gradients_by_every_way(tiling: Tiling, device: str, name: str, normal, only) -> None:
    """And the forward GEMM that layernorm_linear has it make."""
    kernel, order = kernels()[name], GRADIENTS[name]
    rows, features, outputs = tiling.m + 12, tiling.n + 8, 2 * tiling.k + 8
    shapes = ((2, rows, features), (features,), (features,), (outputs, features), (outputs,))
    args = [normal(device, *shape) for shape in shapes]
    args[3] /= features**0.5
    dy = normal(device, 2, rows, outputs)

    def gradients(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [arg.to(dtype).detach().requires_grad_() for arg in args]
        y = function(*order(*leaves))
        y.backward(dy.to(dtype))
        return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    golden = gradients(kernel.reference, torch.float64)
    keys = only(tiling)
    ours = gradients(kernel.function, torch.float32)
    assert len(keys) == {"linear_gelu": 2, "layernorm_linear": 3}[name]
    for mine, right in zip(ours, golden, strict=True):
        unit = 2 * UNIT * float(right.abs().max())  # of several sums, one after the other
        torch.testing.assert_close(mine.double(), right, rtol=UNIT, atol=unit)


@pytest.mark.parametrize("name", GRADIENTS)
@everywhere
def test_only_gradients_that_are_wanted_are_computed(device: str, name: str, normal, only) -> None:
    shapes = ((44, 40), (40,), (40,), (32, 40), (32,))
    x, *parameters = (normal(device, *shape) for shape in shapes)
    keys = only(TALL if device == "cuda" else SMALL)
    y = kernels()[name].function(*GRADIENTS[name](x.requires_grad_(), *parameters))
    before = len(keys)
    y.backward(normal(device, 44, 32))
    assert len(keys) - before == 1


@everywhere
def test_what_a_race_depends_on(device: str, normal, only) -> None:
    """Among it whether TF32 is allowed, with which the library's GEMM takes a third of the time."""
    keys = only(SMALL if device == "cpu" else TALL)
    x, w = normal(device, 64, 64), normal(device, 64, 64)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "ieee"
        for operands in ((x, w), (standing(x), w), (x, standing(w)), (x, w, w[0]), (x[:8], w), (x, w[:8])):
            multiply(*operands)
        matmul.fp32_precision = "tf32"
        multiply(x, w)
    finally:
        matmul.fp32_precision = before
    assert len(set(keys)) == len(keys) == 7


@everywhere
def test_a_gemm_is_lowered_where_autocast_is_on(device: str, normal, only) -> None:
    """Every config, as around a backward pass; a compiled one was told a dtype."""
    only(SMALL if device == "cpu" else TALL)
    x, w = normal(device, 64, 64), normal(device, 64, 64)
    with torch.autocast(device, torch.bfloat16):
        y = multiply(x, w)
    assert torch.equal(y, F.linear(x.bfloat16(), w.bfloat16()))
