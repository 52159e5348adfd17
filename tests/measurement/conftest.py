"""A card to order, where there is none."""

from __future__ import annotations

import sys

import pytest
import torch

from optexp.measurement.gpu import Gpu
from tests.measurement.nvml import Nvml


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    """What `import pynvml` gives."""
    module = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "_get_nvml_device_index", lambda device: 0)
    return module


@pytest.fixture
def gpu(nvml: Nvml) -> Gpu:
    card = Gpu.open(torch.device("cuda:0"))
    assert card is not None
    return card
