"""Places are named so that a reader finds them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from optexp.profiling.places import Places
from optexp.trace import Trace, record_once
from optexp.workers.module_marks import marked


def test_a_module_whose_name_is_a_number_is_called_a_module(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU()), torch.randn(64, 64)
    with marked(model):
        record_once(lambda: model(x), tmp_path / "trace.json.gz", torch.device("cpu"))
    places = Places(Trace.read(tmp_path / "trace.json.gz"))
    assert places.of("activation") == ["module 1"]
    assert places.of("matrix products") == ["module 0"]
