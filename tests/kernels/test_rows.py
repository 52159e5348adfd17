"""Every config of whole rows gives the same: tiles of one row or several, one tile a program or a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from optexp.kernelkit import rows
from optexp.kernelkit.elementwise import FEW
from optexp.kernelkit.rows import Launch, tiles
from optexp.kernels import _layernorm_gradients, layernorm, softmax

COLUMNS = (700, 5000, 16_000)  # a tile holds several rows; one; one that only many threads hold
AGAIN = [*softmax._read_again(16_384), *softmax._half_held(16_384)]  # rows of which a part is read more than once
ON_A_GPU = [
    pytest.param(c, how, "cuda", marks=pytest.mark.gpu)
    for c in COLUMNS
    for how in (*tiles(1 << (c - 1).bit_length()), *(AGAIN if c > 8192 else ()))
]
INTERPRETED = [
    pytest.param(70, how, "cpu") for how in (Launch(4, 4), Launch(1, 4), Launch(2, 4, 3, 3), Launch(2, 4, 0, 0))
]


def run_softmax(x: Tensor) -> Tensor:
    return softmax.softmax(x)


def run_layernorm(x: Tensor) -> Tensor:
    return layernorm.layernorm(x, x.shape[-1:])


@pytest.mark.parametrize(("columns", "how", "device"), [*INTERPRETED, *ON_A_GPU])
@pytest.mark.parametrize("run", [run_softmax, run_layernorm])
def test_every_way(
    run: Callable[[Tensor], Tensor], columns: int, how: Launch, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def this_way(what: str, key: Any, candidates: Any, work: Callable[[Launch], None], on: torch.device) -> Launch:
        return how

    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(301 if device == "cuda" else 9, columns, generator=generator, device=device)
    leaf = x.to(torch.bfloat16 if device == "cuda" else torch.float32).requires_grad_()
    dy = torch.randn(x.shape, generator=generator, device=device)
    monkeypatch.setattr(rows, "fastest", this_way)
    y = run(leaf)
    (dx,) = torch.autograd.grad(y, leaf, dy.to(y.dtype))
    wide = leaf.detach().double().requires_grad_()
    golden = torch.softmax(wide, -1) if run is run_softmax else torch.nn.functional.layer_norm(wide, (columns,))
    (golden_dx,) = torch.autograd.grad(golden, wide, dy.double())
    unit = torch.finfo(leaf.dtype).eps
    for ours, theirs in ((y, golden), (dx, golden_dx)):
        torch.testing.assert_close(ours.double(), theirs, rtol=2 * unit, atol=2 * unit * theirs.abs().max().item())


@pytest.mark.parametrize("config", ["ours", "library"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_both_configs_of_long_rows(device: str, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = []
    monkeypatch.setattr(softmax, "fastest", lambda what, key, configs, run, on: offered.append(configs) or config)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        x, dy = (torch.randn(3, rows.LONGEST + 9, device=device) for _ in range(2))
        leaf = x.requires_grad_()
        y = softmax.softmax(leaf, -1, dtype)
        (dx,) = torch.autograd.grad(y, leaf, dy.to(dtype))
        golden = torch.softmax(leaf.double(), -1)
        (golden_dx,) = torch.autograd.grad(golden, leaf, dy.double())
        unit = (1 if config == "ours" else 4) * torch.finfo(dtype).eps  # torch's sums depend on the processor
        assert (y.dtype, dx.dtype) == (dtype, x.dtype)
        for ours, theirs in ((y, golden), (dx, golden_dx.double())):
            torch.testing.assert_close(ours.double(), theirs, rtol=2 * unit, atol=2 * unit * theirs.abs().max().item())
    assert offered == 4 * [["ours", "library"]]


def configs_back(columns: int) -> list[Launch | str]:
    return ["few rows", *_layernorm_gradients._configs(1 << (columns - 1).bit_length())]


@pytest.mark.parametrize(
    ("columns", "how", "device"),
    [
        *((70, how, "cpu") for how in configs_back(70)),
        *(pytest.param(c, how, "cuda", marks=pytest.mark.gpu) for c in COLUMNS for how in configs_back(c)),
    ],
)
def test_every_config_back_through_a_norm(
    columns: int, how: Launch | str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_layernorm_gradients, "fastest", lambda what, key, configs, run, on: how)
    torch.manual_seed(0)
    x, dy = (torch.randn(601 if device == "cuda" else 21, columns, device=device) for _ in range(2))
    weight, bias = (torch.randn(columns, device=device) for _ in range(2))
    found = []
    for dtype, norm in ((torch.float32, layernorm.layernorm), (torch.float64, torch.nn.functional.layer_norm)):
        leaves = [t.to(dtype).requires_grad_() for t in (x, weight, bias)]
        y = norm(leaves[0], (columns,), *leaves[1:])
        try:
            found.append(torch.autograd.grad(y, leaves, dy.to(dtype)))
        except OutOfResources:
            pytest.skip("needs more than a multiprocessor has, and so is never chosen")
    for ours, golden in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), golden, rtol=1e-5, atol=1e-5 * golden.abs().max().item())


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("rows", [1, 21, FEW, FEW + 1])
def test_few_rows_take_another_config_back(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one launch, which is the first config, for that is what a graph captures."""
    offered = []
    monkeypatch.setattr(
        _layernorm_gradients, "fastest", lambda what, key, configs, run, on: offered.append(configs[0]) or configs[0]
    )
    x = torch.randn(rows, 5, requires_grad=True)
    layernorm.layernorm(x, (5,)).sum().backward()
    assert (offered == ["few rows"]) == (rows <= FEW)
