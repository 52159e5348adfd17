"""The folded product of our own: as accurate as the norm and the product one after the other, whatever the mean."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from optexp.equivalence.gates import TOLERANCES, Limits, Yardstick, error, measure, name_of, rms
from optexp.kernels.layernorm_linear import OURS, by_tiles
from optexp.products import Tiling

SMALL = Tiling(32, 32, 16, 4, 3)  # quick in the interpreter; the real ones are tested where they run
EVERY = [
    *(pytest.param("cpu", SMALL, dtype) for dtype in (torch.bfloat16, torch.float16)),
    *(pytest.param("cuda", tiling, torch.bfloat16, marks=pytest.mark.gpu) for tiling in OURS),
    pytest.param("cuda", OURS[1], torch.float16, marks=pytest.mark.gpu),
]
MEDIUM = [pytest.param("cpu", SMALL), pytest.param("cuda", OURS[1], marks=pytest.mark.gpu)]


def compare(tiling: Tiling, x: Tensor, *parameters: Tensor | None, eps: float = 1e-5) -> None:
    gamma, beta, weight, bias = parameters
    wide = [None if p is None else p.double() for p in parameters]

    def reference(x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(F.layer_norm(x, x.shape[-1:], gamma, beta, eps), weight, bias)

    golden, baseline = reference(x.double(), *wide), reference(x, *parameters)
    scale = rms(golden)
    theirs = error(baseline, golden, scale)
    yardstick = Yardstick(theirs.rms, theirs.peak)
    ours = error(by_tiles(tiling, x, gamma, beta, weight, bias, eps), golden, scale)
    finding = measure("output", ours, scale, yardstick, yardstick, Limits(TOLERANCES[name_of(x.dtype)]))
    assert finding.ok, finding.message


@pytest.fixture
def normal():
    torch.manual_seed(0)

    def normal(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    return normal


def sizes(tiling: Tiling) -> tuple[int, int, int]:
    """More tiles than one each way, with tails."""
    return 2 * tiling.m + 12, 2 * tiling.n + 8, 2 * tiling.k + 8


@pytest.mark.parametrize(("device", "tiling", "dtype"), EVERY)
def test_every_tiling(tiling: Tiling, dtype: torch.dtype, device: str, normal) -> None:
    m, n, k = sizes(tiling)
    x, gamma, beta = normal(device, dtype, m, k), normal(device, dtype, k) / 8 + 1, normal(device, dtype, k)
    weight, bias = normal(device, dtype, n, k) / 12, normal(device, dtype, n)
    compare(tiling, x, gamma, beta, weight, bias)
    compare(tiling, x, None, None, weight, None)


@pytest.mark.parametrize(("device", "tiling"), MEDIUM)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("mean", [1.0, 10.0, 15.0, 17.0, 100.0, -1000.0])
def test_a_large_mean(mean: float, dtype: torch.dtype, tiling: Tiling, device: str, normal) -> None:
    """Of some rows, in one of several tiles; gamma is one-sided, so that what does not cancel would show."""
    m, n, k = sizes(tiling)
    x = normal(device, dtype, m, k)
    x[tiling.m + 2 : tiling.m + 12] += mean
    gamma, beta = normal(device, dtype, k).abs() + 1, normal(device, dtype, k)
    weight, bias = normal(device, dtype, n, k).abs() / 12, normal(device, dtype, n)
    compare(tiling, x, gamma, beta, weight, bias)


@pytest.mark.parametrize(("device", "tiling"), MEDIUM)
def test_rows_without_any_spread(tiling: Tiling, device: str, normal) -> None:
    m, n, k = sizes(tiling)
    x = normal(device, torch.bfloat16, m, k)
    x[7], x[8] = 3.0, 0.0
    compare(tiling, x, None, None, normal(device, torch.bfloat16, n, k) / 12, None)
