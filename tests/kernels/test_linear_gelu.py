"""The product of our own, whatever its tiles: on a GPU the fastest way is chosen, and need not be ours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from optexp.kernelkit.products import TILINGS, Tiling, takes
from optexp.kernels.linear_gelu import by_chunks, by_tiles, chunks, linear_gelu

SMALL = Tiling(32, 32, 16, 4, 3)  # quick in the interpreter; the real ones are tested where they run
EVERY = [
    *(pytest.param("cpu", SMALL, dtype) for dtype in (torch.bfloat16, torch.float16)),
    *(pytest.param("cuda", tiling, torch.bfloat16, marks=pytest.mark.gpu) for tiling in TILINGS),
    pytest.param("cuda", TILINGS[2], torch.float16, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("device", "tiling", "dtype"), EVERY)
def test_every_tiling(tiling: Tiling, dtype: torch.dtype, device: str) -> None:
    """More tiles than one each way, with tails; then more rows of tiles than are walked together."""
    generator = torch.Generator(device).manual_seed(0)
    for m, n, k in ((2 * tiling.m + 12, 2 * tiling.n + 8, 2 * tiling.k + 8), (10 * tiling.m, 8, 8)):
        x, w = (torch.randn(*shape, generator=generator, device=device).to(dtype) for shape in ((m, k), (n, k)))
        w /= k**0.5
        bias = torch.randn(n, generator=generator, device=device).to(dtype)
        assert takes(x, w)
        y, z = by_tiles(tiling, x, w, bias, "tanh", keep=True)
        golden = F.linear(x.double(), w.double(), bias.double())
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(z.double(), golden, rtol=unit, atol=unit)
        torch.testing.assert_close(y.double(), F.gelu(golden, approximate="tanh"), rtol=unit, atol=unit)
        alone, nothing = by_tiles(tiling, x, w, bias, "tanh", keep=False)
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


def test_what_it_does_not_take() -> None:
    x, w = torch.zeros(16, 64, dtype=torch.bfloat16), torch.zeros(32, 64, dtype=torch.bfloat16)
    assert takes(x, w)
    assert not takes(x.float(), w.float())
    assert not takes(x, w.half())
    assert not takes(x[:0], w)
    assert not takes(x, w[:30])
    assert not takes(x.flatten()[1:-63].view(15, 64), w)
    assert not takes(x[:1].expand(16, 64), w)
    assert not takes(x, w[:1].expand(32, 64))
    assert not takes(x[:, :60], torch.zeros(32, 60, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_a_gradient_the_first_way_launches_what_the_product_does(dtype: torch.dtype) -> None:
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
    return result, sum(event.device_type is torch.autograd.DeviceType.CUDA for event in profile.events())
