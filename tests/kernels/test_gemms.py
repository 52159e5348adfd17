"""What every kernel must stand, of the tilings: where a shape is small or float32, the library is all that runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from optexp.equivalence.gates import structure
from optexp.kernelkit.gemm import TILINGS, Tiling
from optexp.kernelkit.kernel import Kernel
from optexp.kernels import layernorm_linear, linear_gelu

SMALL = Tiling(32, 32, 16, 4, 3)  # quick in the interpreter
CONFIGS = [pytest.param("cpu", SMALL), *(pytest.param("cuda", t, marks=pytest.mark.gpu) for t in TILINGS)]
every_config = pytest.mark.parametrize(("device", "tiling"), CONFIGS)
every_gemm = pytest.mark.parametrize("module", [linear_gelu, layernorm_linear], ids=lambda m: m.KERNEL.name)


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch):
    """The kernel of a module, which takes this tiling and no other config."""

    def tiled(module: Any, tiling: Tiling) -> Kernel:
        def this(what: str, key: Any, configs: list[Any], run: Any, device: torch.device) -> Tiling:
            assert TILINGS[0] in configs, "tiles were not offered"
            return tiling

        monkeypatch.setattr(module, "fastest", this)
        kernel: Kernel = module.KERNEL
        return kernel

    return tiled


def arguments(kernel: Kernel, device: str, change: Callable[[Tensor], Tensor] = lambda t: t) -> list[Any]:
    generator = torch.Generator(device).manual_seed(0)
    args = kernel.cases[0].arguments(
        lambda *shape: torch.randn(*shape, generator=generator, device=device).to(torch.bfloat16)
    )
    return [change(arg) if isinstance(arg, Tensor) else arg for arg in args]


def assert_close(kernel: Kernel, args: list[Any]) -> None:
    golden = kernel.reference(*(arg.double() if isinstance(arg, Tensor) else arg for arg in args))
    torch.testing.assert_close(kernel.function(*args).double(), golden, rtol=0.02, atol=0.06)


def padded(tensor: Tensor) -> Tensor:
    """Rows that begin 16 bytes behind the end of the last."""
    return torch.cat([tensor, torch.full_like(tensor[..., :8], torch.nan)], dim=-1)[..., : tensor.shape[-1]]


@every_config
@every_gemm
def test_rows_apart(module: Any, tiling: Tiling, device: str, tiled) -> None:
    kernel = tiled(module, tiling)
    assert_close(kernel, arguments(kernel, device, lambda t: padded(t) if t.dim() > 1 else t))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@every_config
@every_gemm
def test_what_is_not_finite(module: Any, tiling: Tiling, device: str, value: float, tiled) -> None:
    """Goes where the reference lets it."""
    kernel = tiled(module, tiling)
    args = arguments(kernel, device)
    args[0][1, 3] = value
    golden = kernel.reference(*(arg.double() if isinstance(arg, Tensor) else arg for arg in args))
    assert structure(kernel.function(*args), golden.bfloat16()) is None


@pytest.mark.gpu
@pytest.mark.parametrize("tiling", TILINGS)
@every_gemm
def test_captured_in_a_graph(module: Any, tiling: Tiling, tiled) -> None:
    kernel = tiled(module, tiling)
    args = arguments(kernel, "cuda")
    kernel.function(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel.function(*args)
    args[0].neg_()
    graph.replay()
    torch.testing.assert_close(captured, kernel.function(*args), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("tiling", [TILINGS[0], TILINGS[-1]])  # one loops over tiles, one has a program for each
@every_gemm
@pytest.mark.usefixtures("much_memory")
def test_more_elements_than_an_int32_counts(module: Any, tiling: Tiling, tiled) -> None:
    kernel = tiled(module, tiling)
    args = kernel.large.arguments(lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16))
    assert args[0].numel() > 2**31
    with torch.no_grad():
        ours, theirs = kernel.function(*args).float(), kernel.reference(*args).float()
    torch.testing.assert_close(ours, theirs, rtol=0.03, atol=0.06)
