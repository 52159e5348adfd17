"""What is launched again is launched as the first time, whatever else was launched meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from optexp.kernelkit import launching
from optexp.kernelkit.launching import launch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@triton.jit
def scaled(x_ptr, bias_ptr, y_ptr, size, scale, BLOCK: tl.constexpr, NEGATIVE: tl.constexpr):  # noqa: N803
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < size).to(tl.float64)
    if bias_ptr is not None:
        x += tl.load(bias_ptr)
    x *= scale
    tl.store(y_ptr + offsets, -x if NEGATIVE else x, mask=offsets < size)


@pytest.fixture(autouse=True)
def _nothing_is_ready() -> Iterator[None]:
    launching._ready.clear()
    yield
    launching._ready.clear()


def compute(x: Tensor, bias: Tensor | None, scale: float, negative: bool = False) -> Tensor:
    y = torch.full_like(x, torch.nan)
    programs = triton.cdiv(x.numel(), 128)
    launch(scaled, programs, x, bias, y, x.numel(), scale=scale, BLOCK=128, NEGATIVE=negative)
    return y


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_calls_of_all_kinds_take_turns(device: str) -> None:
    some = torch.randn(4097, device=device)
    bias = torch.ones(1, device=device)
    inputs = [some[:size] for size in (1, 15, 16, 17, 2048, 4096)]
    inputs += [some[1:17], some[4:20], some[1:2]]  # the address is no longer one of 16 bytes, and is one again
    inputs += [some.to(dtype)[:96] for dtype in (torch.float64, torch.float16)]
    for _ in range(3):
        for x in inputs:
            for scale in (2.0, 1.0, 0.0, -0.0):
                for negative in (False, True):
                    for extra in (None, bias):
                        expected = (x if extra is None else x + extra.to(x.dtype)) * scale
                        y = compute(x, extra, scale, negative)
                        torch.testing.assert_close(y, -expected if negative else expected)
                        if not negative:  # which Triton makes by subtraction from zero
                            assert torch.equal(y.signbit(), expected.signbit())


class Compiled(CompiledKernel):
    """What Triton would return, without a GPU: keeps what it is launched with."""

    function, packed_metadata, module = "function", "metadata", None

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    @property
    def run(self) -> Callable[..., None]:
        return lambda *args: self.launches.append(args)


class Kernel:
    """In the place of a jitted function."""

    fn = None
    arg_names = ("x_ptr", "bias_ptr", "size", "scale", "BLOCK", "PDL")
    __name__ = "kernel"

    def __init__(self) -> None:
        self.compiled, self.asked = Compiled(), 0
        self.constants: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int]) -> Callable[..., Compiled]:
        def compile(*args: Any, **constants: Any) -> Compiled:
            self.asked += 1
            self.constants = constants
            return self.compiled

        return compile


@pytest.mark.parametrize("profiled", [False, True])
def test_without_asking_triton_arguments_come_as_its_launcher_wants_them(
    profiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in JITFunction.run: grid, stream, function, metadata, that of the launch, two hooks, then all parameters."""
    monkeypatch.setattr(launching, "_current_device", lambda: None)  # as a CPU's tensors say
    monkeypatch.setattr(launching, "current_stream", lambda device: 7)
    kernel, x, other = Kernel(), torch.randn(64), torch.randn(64)
    launch(kernel, 3, x, None, 64, scale=0.0, BLOCK=128, num_warps=4)
    assert (kernel.asked, kernel.compiled.launches) == (1, [])
    with torch.profiler.profile() if profiled else nullcontext() as seen:
        launch(kernel, 5, other, None, 64, scale=-0.0, BLOCK=128, num_warps=4)
    (launched,) = kernel.compiled.launches
    assert launched[:9] == (5, 1, 1, 7, "function", "metadata", None, None, None)
    assert launched[9] is other
    assert launched[10:12] == (None, 64)
    assert math.copysign(1, launched[12]) == -1  # this call's, though 0.0 and -0.0 are equal
    assert len(launched) == 9 + len(kernel.arg_names)
    assert kernel.asked == 1
    if profiled:
        assert "optexp.kernel" in {event.name for event in seen.events()}
    launch(kernel, 3, x, None, 64, scale=0.0, BLOCK=128, num_warps=8)
    assert kernel.asked == 2


def test_where_kernels_can_be_launched_with_pdl_one_may_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """It triggers dependents all the same; its cached launch differs from the one with PDL."""
    possible = {False: {"PDL": True, "launch_pdl": True}, True: {"PDL": True, "launch_pdl": False}}
    monkeypatch.setattr(launching, "_pdl", lambda device, without: possible[without])
    monkeypatch.setattr(launching, "_current_device", lambda: None)
    monkeypatch.setattr(launching, "current_stream", lambda device: 7)
    kernel, x = Kernel(), torch.randn(64)
    for how, pdl in (({}, True), ({"without_pdl": True}, False)):
        launch(kernel, 3, x, None, 64, scale=0.0, BLOCK=128, **how)
        assert kernel.constants == {"scale": 0.0, "BLOCK": 128, "PDL": True, "launch_pdl": pdl}
        launch(kernel, 3, x, None, 64, scale=0.0, BLOCK=128, **how)
        assert len(kernel.compiled.launches[-1]) == 9 + len(kernel.arg_names)
    assert (kernel.asked, len(kernel.compiled.launches)) == (2, 2)


@pytest.mark.gpu
def test_what_was_launched_before_is_launched_without_asking_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1000, device="cuda")
    compute(x, None, 2.0)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(scaled, "run", refuse)
    assert torch.equal(compute(x.neg(), None, 2.0), x * -2)
    with pytest.raises(AssertionError, match="asked"):
        compute(x[1:], None, 2.0)
    with torch.profiler.profile() as seen:
        compute(x, None, 2.0)
    assert "optexp.scaled" in {event.name for event in seen.events()}


@pytest.mark.gpu
def test_it_is_launched_on_the_current_stream() -> None:
    x = torch.randn(1000, device="cuda")
    compute(x, None, 2.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = compute(x, None, 2.0)
    x.fill_(3)
    graph.replay()
    assert torch.equal(y, x * 2)


def test_hooks_of_all_kinds_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Triton's own a list, or what somebody has put in its place."""
    assert not launching._is_hooked()
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patched:
            patched.setattr(triton.knobs.runtime, name, None)
            assert not launching._is_hooked()
            patched.setattr(triton.knobs.runtime, name, print)
            assert launching._is_hooked()


@pytest.mark.gpu
def test_a_hook_of_triton_sees_every_launch() -> None:
    x, seen = torch.randn(1000, device="cuda"), list[str]()
    compute(x, None, 2.0)

    def see(metadata: triton.compiler.LazyDict) -> None:
        seen.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(see)
    try:
        compute(x, None, 2.0)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(see)
    assert seen == ["scaled"]


def test_what_triton_compiles_apart_is_kept_apart() -> None:
    x = torch.empty(64)
    calls = [
        (x, 3),
        (x, 4),
        (x, 3.0),
        (x, True),
        (x, 1),
        (x, None),
        (x, x),
        (x[1:], 3),
        (x.double(), 3),
        (x.int(), 3),
    ]
    keys = [launching._key(scaled, args, {"BLOCK": 128}) for args in calls]
    keys += [
        launching._key(scaled, (x, 3), constants) for constants in ({"BLOCK": 1}, {"BLOCK": True}, {"ROWS": 128}, {})
    ]
    assert len(set(map(repr, keys))) == len(keys) == len(set(keys))
    assert launching._key(scaled, (x[4:], 3), {"BLOCK": 128}) == keys[0]
    assert launching._key(scaled, (TensorDescriptor.from_tensor(x.view(8, 8), [8, 8]), 3), {}) is None


@pytest.mark.gpu
def test_what_is_remembered_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "MOST", 2)
    x = torch.randn(1000, device="cuda")
    for size in (10, 20, 30, 10):
        assert torch.equal(compute(x[:size], None, 2.0), x[:size] * 2)
        assert 1 <= len(launching._ready) <= 2
