"""The folded GEMM of our own: as accurate as the norm and the GEMM one after the other, whatever the mean."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from optexp.equivalence.gates import Limits, Yardstick, measure
from optexp.equivalence.tensor_math import error, name_of, rms
from optexp.kernelkit.elementwise import FEW
from optexp.kernelkit.gemm import TILINGS, Tiling, library_configs
from optexp.kernels import layernorm, layernorm_linear
from optexp.kernels._layernorm_linear_folded import by_tiles, layernorm_linear_forward
from optexp.support.tolerances import TOLERANCES
from tests.kernels.golden import exact

SMALL = Tiling(32, 32, 16, 4, 3)  # quick in the interpreter; the real ones are tested where they run
EVERY = [
    *(pytest.param("cpu", SMALL, dtype) for dtype in (torch.bfloat16, torch.float16)),
    *(pytest.param("cuda", tiling, torch.bfloat16, marks=pytest.mark.gpu) for tiling in TILINGS),
    pytest.param("cuda", TILINGS[1], torch.float16, marks=pytest.mark.gpu),
]
MEDIUM = [pytest.param("cpu", SMALL), pytest.param("cuda", TILINGS[1], marks=pytest.mark.gpu)]


def compare(tiling: Tiling, x: Tensor, *parameters: Tensor | None, eps: float = 1e-5) -> None:
    gamma, beta, weight, bias = parameters
    golden = exact(x.double(), *(None if p is None else p.double() for p in parameters), eps)  # type: ignore[call-arg]
    baseline = F.linear(F.layer_norm(x, x.shape[-1:], gamma, beta, eps), weight, bias)
    y = by_tiles(tiling, x, gamma, beta, weight, bias, eps)
    finite = golden.isfinite()
    torch.testing.assert_close(y[~finite].double(), golden[~finite], equal_nan=True)
    assert y[finite].isfinite().all()
    if not finite.any():
        return
    golden, baseline, y = golden[finite], baseline[finite], y[finite]
    scale = rms(golden)
    theirs, ours = error(baseline, golden, scale), error(y, golden, scale)
    yardstick = Yardstick(theirs.rms, theirs.peak)
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
def test_a_small_mean_beside_a_large_one(tiling: Tiling, device: str, normal) -> None:
    """Such a row is centred because of its neighbour, and rounding then brings its mean back."""
    m, n, k = tiling.m, tiling.n, 1032
    x, weight = normal(device, torch.bfloat16, m, k), normal(device, torch.bfloat16, n, k).abs() / 12
    x[3] += 100
    compare(tiling, x, None, None, weight, None)


@pytest.mark.parametrize(("device", "tiling"), MEDIUM)
def test_rows_without_any_spread(tiling: Tiling, device: str, normal) -> None:
    m, n, k = sizes(tiling)
    x = normal(device, torch.bfloat16, m, k)
    x[7], x[8] = 3.0, 0.0
    compare(tiling, x, None, None, normal(device, torch.bfloat16, n, k) / 12, None)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "tiling"), MEDIUM)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_infinite_weights(dtype: torch.dtype, tiling: Tiling, device: str, normal) -> None:
    """They take their signs from normalised rows, whatever beta is and the mean: there no infinities cancel."""
    m, n, k = sizes(tiling)
    x, gamma, beta = normal(device, dtype, m, k), normal(device, dtype, k), normal(device, dtype, k)
    weight, bias = normal(device, dtype, n, k) / 12, normal(device, dtype, n)
    weight[3, 5], weight[4, k - 1] = torch.inf, -torch.inf
    weight[5, 6], weight[5, 7] = torch.inf, -torch.inf  # which cancel in some rows
    weight[tiling.n - 1, 8] = torch.nan
    x[2:4] = torch.tensor([1.0, -1.0] * (k // 2))
    x[2:4, 4:6] = 0.0  # which is the mean
    compare(tiling, x, gamma, beta, weight, bias)
    compare(tiling, x, gamma, torch.zeros_like(beta), weight, bias)
    compare(tiling, x, None, None, weight, None)
    gamma[5], beta[5:7] = 0.0, 0.0
    x[6, 3], x[7, 3], x[8:12] = torch.nan, torch.inf, x[8:12] + 100  # a large mean, too
    compare(tiling, x, gamma, beta, weight, bias)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "tiling"), MEDIUM)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_infinite_parameters_of_the_norm(value: float, tiling: Tiling, device: str, normal) -> None:
    """And bias: that of its column alone."""
    m, n, k = sizes(tiling)
    x, plain = normal(device, torch.bfloat16, m, k), normal(device, torch.bfloat16, k)
    weight, bias = normal(device, torch.bfloat16, n, k) / 12, normal(device, torch.bfloat16, n)
    weight[2, 5], weight[3, 5] = 0.0, torch.inf
    broken = plain.clone()
    broken[5], bias[7] = value, value
    compare(tiling, x, broken, plain, weight, bias)
    compare(tiling, x, plain, broken, weight, bias)
    compare(tiling, x, broken, broken, weight, bias)
    weight[3, 5] = 0.0
    compare(tiling, x, plain, plain, weight, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("tiling", TILINGS)
def test_every_run_gives_the_same_bits(tiling: Tiling, normal) -> None:
    """What is loaded for a later step must not arrive where an earlier one still reads: that shows now and then."""
    x, weight = normal("cuda", torch.bfloat16, 4096, 1032), normal("cuda", torch.bfloat16, 1032, 1032) / 32
    runs = (by_tiles(tiling, x, None, None, weight, None, 1e-5) for _ in range(100))
    first = next(runs)
    assert sum(not torch.equal(run, first) for run in runs) == 0
    compare(tiling, x, None, None, weight, None)


@pytest.mark.gpu
def test_a_buffer_for_each_stage(normal) -> None:
    """Of x as of w: with one less, what is loaded overwrites what the GEMM still reads."""
    x, weight = normal("cuda", torch.bfloat16, 128, 64), normal("cuda", torch.bfloat16, 64, 64)
    for tiling in TILINGS:
        by_tiles(tiling, x, None, None, weight, None, 1e-5)
    variants = [one for cached, *_ in layernorm_linear_forward.device_caches.values() for one in cached.values()]
    assert len(variants) >= len({tiling[:5] for tiling in TILINGS})
    for variant in variants:
        buffers = re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", variant.asm["ttgir"])
        assert [int(count) for count in buffers] == 2 * [variant.metadata.num_stages]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=name_of)
@pytest.mark.parametrize(("rows", "outputs"), [(1, 8), (21, 70), (130, 16), (FEW, 40)])
def test_gradients_of_few_rows_come_out_of_one_launch(
    rows: int, outputs: int, dtype: torch.dtype, device: str, normal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from launches of their own, but for the order of sums; it is the first config, the one a graph takes."""
    offered, columns = [], 72
    dy, x, dz = (normal(device, dtype, rows, width) for width in (columns, columns, outputs))
    _, mean, scale = layernorm.forward_of_rows(x, None, None, columns, 1e-5, dtype)
    for weight in (None, normal(device, dtype, columns)):
        found = []
        for config in ("together", "apart"):
            monkeypatch.setattr(
                layernorm_linear,
                "fastest",
                lambda what, key, configs, *_, config=config: offered.append(configs) or config,
            )
            found.append(layernorm_linear.all_gradients(dy, x, weight, mean, scale, columns, dtype, dz))
        torch.testing.assert_close(*found)
        torch.testing.assert_close(found[0][3], dz.double().sum(0).to(dtype))
    assert {configs[0] for configs in offered} == {"together"}


@pytest.mark.usefixtures("interpreted")
def test_gradients_of_many_rows_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = []
    monkeypatch.setattr(
        layernorm_linear, "fastest", lambda what, key, configs, *_: offered.append(configs) or configs[0]
    )
    x, weight, bias = torch.randn(FEW + 1, 5, requires_grad=True), torch.randn(3, 5), torch.randn(3, requires_grad=True)
    layernorm_linear.layernorm_linear(x, 5, None, None, weight, bias).sum().backward()
    assert offered[-1] == ["apart"]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_only_bfloat16_is_folded(dtype: torch.dtype, normal, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16 a product of gamma and w could overflow, or vanish, where the norm's result times w does not."""
    offered: list[Tiling | str] = []
    monkeypatch.setattr(
        layernorm_linear, "fastest", lambda what, key, configs, *_: offered.extend(configs) or configs[0]
    )
    x, weight = normal("cpu", dtype, 40, 64), normal("cpu", dtype, 32, 64)
    layernorm_linear.layernorm_linear(x, (64,), weight[0], weight[1], weight)
    assert (set(TILINGS) < set(offered)) == (dtype == torch.bfloat16)


@pytest.mark.usefixtures("interpreted")
def test_a_bias_apart_is_float32_s_alone() -> None:
    """Where autocast makes the GEMM one of bfloat16, that is not rounded before its bias is added."""
    x, gamma, beta, weight, bias = (torch.randn(*shape) for shape in ((37, 72), (72,), (72,), (88, 72), (88,)))
    normal = layernorm.normalised_rows(x, gamma, beta, 72, 1e-5, torch.bfloat16)[0]
    with torch.autocast("cpu", torch.bfloat16):
        ours = layernorm_linear.layernorm_linear(x, 72, gamma, beta, weight, bias)
    assert torch.equal(ours, F.linear(normal, weight.bfloat16(), bias.bfloat16()))
    assert library_configs(37, weight, bias)[0] == "apart"
