"""Places are named so that a reader finds them."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn

from optexp.profiling.accounts import PYTHON
from optexp.profiling.breakdown import breakdown
from optexp.profiling.places import Places
from optexp.profiling.view import View
from optexp.profiling.waste import python
from optexp.trace import LINE, Trace, record_once
from optexp.workers.module_marks import marked


def test_a_module_whose_name_is_a_number_is_called_a_module(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU()), torch.randn(64, 64)
    with marked(model):
        record_once(lambda: model(x), tmp_path / "trace.json.gz", torch.device("cpu"))
    places = Places(Trace.read(tmp_path / "trace.json.gz"))
    assert places.of("activation") == ["module 1"]
    assert places.of("matrix products") == ["module 0"]


class Slow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x + 1


def test_python_is_named_at_lines_that_do_work_themselves(tmp_path: Path) -> None:
    """A line that calls a module cannot be moved: what takes long there is not the line's own."""
    model, x = nn.Sequential(Slow()), torch.randn(64, 64)

    def step(own: bool) -> None:
        with torch.profiler.record_function(f"{LINE}/home/net.py:10"):
            model(x)
        if own:
            with torch.profiler.record_function(f"{LINE}/home/net.py:11"):
                time.sleep(0.01)

    advice = []
    for own in (True, False):
        with marked(model):
            record_once(lambda own=own: step(own), tmp_path / "trace.json.gz", torch.device("cpu"))  # type: ignore[misc]
        trace = Trace.read(tmp_path / "trace.json.gz")
        assert Places(trace).of(PYTHON) == (["net.py:11"] if own else [])
        found = python(View(trace, breakdown(trace), trace))
        assert found is not None
        advice.append(found.try_)
    assert advice == [("Python in net.py:11: move it out of the step, or to a thread of its own",), ()]
