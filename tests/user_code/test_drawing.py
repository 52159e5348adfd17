"""Large inputs are drawn where they are needed, by the user's own code."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from optexp.user_code import drawing as module
from optexp.user_code.drawing import drawing, on, outline

META = torch.device("meta")  # a device that is not the CPU, and is everywhere


def plain(sizes: Mapping[str, int], device: torch.device) -> Any:
    return [torch.rand(64, 64) * 2 - 1, torch.randint(0, 2, (64,)).float()]


def needs_values(sizes: Mapping[str, int], device: torch.device) -> Any:
    x = torch.rand(64, 64)
    assert x.min() >= 0
    return [x]


def of_the_host(sizes: Mapping[str, int], device: torch.device) -> Any:
    return [torch.rand(64, 64) + torch.ones(64, 64, device="cpu")]


def test_the_size_is_known_without_drawing() -> None:
    assert outline(plain, {}) == 4 * (64 * 64 + 64)
    assert outline(needs_values, {}) == 0


def test_small_inputs_and_those_of_a_cpu_are_drawn_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawing(plain, {}, META) is plain
    monkeypatch.setattr(module, "LARGE", 1000)
    assert drawing(plain, {}, torch.device("cpu")) is plain


def test_large_ones_are_drawn_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE", 1000)
    drawn = drawing(plain, {}, META)({}, META)
    assert [tensor.device.type for tensor in drawn] == ["meta", "meta"]


@pytest.mark.parametrize("inputs", [needs_values, of_the_host])
def test_unless_the_code_does_not_run_there(inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE", -1)
    assert drawing(inputs, {}, META) is inputs


def test_values_follow_the_seed_alone() -> None:
    drawn = []
    for asked in (False, True):
        torch.manual_seed(0)
        if asked:
            outline(plain, {})
        torch.manual_seed(1)
        drawn.append(on(torch.device("cpu"), plain, {}, torch.device("cpu")))
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))
