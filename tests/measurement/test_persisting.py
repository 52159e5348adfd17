"""Nothing survives a flush in a part of the L2 cache that a program has set aside."""

from __future__ import annotations

import ctypes

import pytest
import torch

from optexp.measurement import persisting
from optexp.workers.arm import Arm
from optexp.workers.spec import Spec
from optexp.workloads.gelu import Gelu


def test_without_a_gpu_there_is_nothing_to_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persisting, "_function", lambda name: None)
    persisting.give_up()
    assert persisting.set_aside() == 0


def test_what_the_driver_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[int]]] = []

    def function(name: str):  # type: ignore[no-untyped-def]
        return lambda *arguments: asked.append((name, [argument.value for argument in arguments])) or 0

    monkeypatch.setattr(persisting, "_function", function)
    persisting.give_up()
    assert asked == [("cuCtxResetPersistingL2Cache", []), ("cuCtxSetLimit", [6, 0])]


@pytest.mark.gpu
def test_a_flush_gives_up_what_was_set_aside() -> None:
    arm = Arm()
    arm.setup(Spec(Gelu(size=64), (), "cuda:0", "float32", 0).pack())
    torch.cuda.synchronize()
    driver = ctypes.CDLL("libcuda.so.1")
    code = driver.cuCtxSetLimit(ctypes.c_uint(persisting.PERSISTING_L2_CACHE_SIZE), ctypes.c_size_t(2**20))
    if code or not persisting.set_aside():
        pytest.skip("this device sets nothing aside")
    arm.flush()
    assert persisting.set_aside() == 0
