"""The GEMM of our own, whatever its tiles: on a GPU the fastest config is chosen, and need not be ours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from optexp.kernelkit.gemm import FLOAT32_TILINGS, TILINGS, Tiling, takes, tilings
from optexp.kernels.linear_gelu import by_chunks, by_tiles, chunks, linear_gelu

SMALL = Tiling(32, 32, 16, 4, 3)  # quick in the interpreter; the real ones are tested where they run
EVERY = [
    *(pytest.param("cpu", SMALL, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
    *(pytest.param("cuda", tiling, torch.bfloat16, marks=pytest.mark.gpu) for tiling in TILINGS),
    pytest.param("cuda", TILINGS[2], torch.float16, marks=pytest.mark.gpu),
    *(pytest.param("cuda", tiling, torch.float32, marks=pytest.mark.gpu) for tiling in FLOAT32_TILINGS),
]


@pytest.mark.parametrize(("device", "tiling", "dtype"), EVERY)
def test_every_tiling(tiling: Tiling, dtype: torch.dtype, device: str) -> None:
    """More tiles than one each way, with tails; then more rows of tiles than are walked together."""
    generator = torch.Generator(device).manual_seed(0)
    for m, n, k in ((2 * tiling.m + 12, 2 * tiling.n + 8, 2 * tiling.k + 8), (10 * tiling.m, 8, 8)):
        x, w = (torch.randn(*shape, generator=generator, device=device).to(dtype) for shape in ((m, k), (n, k)))
        w /= k**0.5
        bias = torch.randn(n, generator=generator, device=device).to(dtype)
        assert tilings(x, w)
        y, z = by_tiles(tiling, x, w, bias, "tanh", save=True)
        golden = F.linear(x.double(), w.double(), bias.double())
        unit = torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 1)  # which sums are as exact as, too
        torch.testing.assert_close(z.double(), golden, rtol=unit, atol=unit)
        torch.testing.assert_close(y.double(), F.gelu(golden, approximate="tanh"), rtol=unit, atol=unit)
        alone, nothing = by_tiles(tiling, x, w, bias, "tanh", save=False)
        assert torch.equal(alone, y)
        assert nothing.numel() == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("form", ["none", "tanh"])
@pytest.mark.parametrize("biased", [True, False])
def test_some_rows_after_the_other(device: str, form: str, biased: bool) -> None:
    x, w, bias = (torch.randn(*shape, device=device) for shape in ((37, 24), (40, 24), (40,)))
    y = by_chunks(16, x, w, bias if biased else None, form)
    expected = F.gelu(F.linear(x.double(), w.double(), bias.double() if biased else None), approximate=form)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


def test_chunks_stay_in_the_cache() -> None:
    assert chunks(4096, 4096 * 4) == [1024, 2048]
    assert chunks(1024, 4096 * 4) == []
    assert chunks(2**20, 2**24) == []  # rows that are too long
    assert chunks(5, 0) == []


@pytest.mark.usefixtures("interpreted")
def test_what_it_does_not_take() -> None:
    x, w = torch.zeros(16, 64, dtype=torch.bfloat16), torch.zeros(32, 64, dtype=torch.bfloat16)
    assert takes(x, w)
    assert not takes(x.float(), w.float())
    assert tilings(x.float(), w.float()) == FLOAT32_TILINGS
    assert tilings(x.float()[:, :60], w.float()[:, :60]) == FLOAT32_TILINGS
    assert tilings(x.float(), w.float()[:30]) == []
    assert tilings(x.float()[:, 1:61], w.float()[:, :60]) == []
    assert tilings(x.double(), w.double()) == []
    assert not takes(x, w.half())
    assert not takes(x[:0], w)
    assert not takes(x, w[:30])
    assert not takes(x.flatten()[1:-63].view(15, 64), w)
    assert not takes(x[:1].expand(16, 64), w)
    assert not takes(x, w[:1].expand(32, 64))
    assert not takes(x[:, :60], torch.zeros(32, 60, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("tiling", FLOAT32_TILINGS)
@pytest.mark.parametrize("change", [torch.Tensor.clone, torch.Tensor.abs], ids=["both signs", "one sign"])
@pytest.mark.parametrize(("m", "k", "n"), [(300, 1024, 520), (64, 4100, 132), (2048, 60, 2052)])
def test_three_gemms_of_tf32_are_nearly_as_exact_as_one_of_float32(
    tiling: Tiling, change: Callable[[torch.Tensor], torch.Tensor], m: int, k: int, n: int
) -> None:
    """Whatever the sums' signs; tensor cores cut off what they add to, which shows where all have the same.

    Of few rows cuBLAS shares out the sums over columns, which makes them twice as exact; of many it is the less exact.
    """
    x, w = (change(torch.randn(*shape, device="cuda")) for shape in ((m, k), (n, k)))
    z = by_tiles(tiling, x, w, None, "none", save=True)[1]
    golden = F.linear(x.double(), w.double())
    ours, theirs = ((result.double() - golden).square().mean().sqrt() for result in (z, F.linear(x, w)))
    assert ours <= 3 * theirs
    assert all(torch.equal(by_tiles(tiling, x, w, None, "none", save=True)[1], z) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.parametrize("tiling", FLOAT32_TILINGS)
def test_what_is_not_finite_in_float32(tiling: Tiling) -> None:
    """Of infinity TF32 leaves what is not a number, and of most numbers of few bits nothing: neither may show."""
    x, w = torch.randn(300, 96, device="cuda"), torch.randn(520, 96, device="cuda")
    x[3, 5], x[7, 1], x[9, 2], x[11, 5], x[11, 7] = torch.inf, torch.nan, -torch.inf, torch.inf, torch.inf
    w[5, 7], w[3, 5], w[4, 5], w[6, 5] = torch.inf, 1.0, 0.0, -0.5
    z = by_tiles(tiling, x, w, None, "none", save=True)[1]
    golden = F.linear(x, w)
    finite = golden.isfinite()
    torch.testing.assert_close(z[~finite], golden[~finite], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(z.isfinite(), finite)


@pytest.mark.gpu
@pytest.mark.parametrize("tiling", FLOAT32_TILINGS)
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_small_and_large_numbers_in_float32(tiling: Tiling, size: float) -> None:
    """What TF32 leaves of small ones is smaller still, and is lost only below 5e-35, where it is not normal."""
    x, w = torch.randn(130, 96, device="cuda") * size, torch.randn(132, 96, device="cuda")
    z = by_tiles(tiling, x, w, None, "none", save=True)[1]
    golden = F.linear(x.double(), w.double())
    assert (z.double() - golden).square().mean().sqrt() <= 2 * (F.linear(x, w).double() - golden).square().mean().sqrt()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_a_gradient_the_first_config_launches_what_the_gemm_does(dtype: torch.dtype) -> None:
    """It is what a graph captures of calls that were torch's before, as small ones are, so that nothing was raced."""
    x, w, bias = (torch.randn(*shape, device="cuda", dtype=dtype) for shape in ((12, 64), (32, 64), (32,)))
    w /= 8
    y, launches = _traced(lambda: linear_gelu(x, w, bias, "tanh"))
    assert launches <= _traced(lambda: F.linear(x, w, bias))[1]
    golden = F.gelu(F.linear(x.double(), w.double(), bias.double()), approximate="tanh")
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), golden, rtol=4 * unit, atol=4 * unit)


def _traced(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, int]:
    """What it returns, and how many kernels it runs."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        result = call()
        torch.cuda.synchronize()
    return result, sum(event.device_type is torch.autograd.DeviceType.CUDA for event in profile.events())  # type: ignore[attr-defined]
