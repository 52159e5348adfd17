"""What a kernel needs of a card: a least capability, or one architecture alone."""

from __future__ import annotations

import pytest
import torch

from optexp.kernelkit.capability import WGMMA, Capability
from optexp.kernelkit.extension import Source, source_files
from optexp.kernelkit.kernel import kernels

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("card", "at_least", "exactly"), [((8, 0), False, False), ((9, 0), True, True), ((10, 0), True, False)]
)
def test_a_card_has_it_or_not(
    card: tuple[int, int], at_least: bool, exactly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card)
    assert Capability((9, 0)).met_by(CUDA) == at_least
    assert WGMMA.met_by(CUDA) == exactly


def test_a_source_is_compiled_for_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert Source("one", needs=WGMMA).targets(CUDA) == ["9.0a"]
    assert Source("other", needs=Capability((7, 0))).targets(CUDA) == Source("third").targets(CUDA) == ["8.6"]


def test_every_source_belongs_to_a_kernel() -> None:
    declared = {source.name for kernel in kernels().values() for source in kernel.sources}
    assert declared == {path.stem for path in source_files("add")[0].parent.glob("*.cu")}
