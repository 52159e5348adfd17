"""Files that decide verdicts: what is looked at, what is told, and what that costs."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy
import pytest
import scipy.special
import torch

from optexp.comparison import edits
from optexp.comparison.edits import Files


def test_nothing_is_told_of_files_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Files.now()
    assert before.edits() == ""
    for module in (torch, torch.functional, numpy, scipy.special):
        assert module.__file__ in before.libraries
    assert any("libtorch" in path for path in before.libraries)
    monkeypatch.delitem(sys.modules, "scipy.special")
    assert before.edits() == ""  # what was looked at first is looked at again


def test_a_look_takes_little() -> None:
    """Of a comparison, which looks two or three times: in a process of its own it was 11 ms."""
    begin = time.process_time()
    Files.now().edits()
    assert time.process_time() - begin < 0.2


@pytest.mark.parametrize("how", ["written", "removed", "added"])
def test_whatever_happens_to_a_file_is_told(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edits.site, "getsitepackages", lambda: [str(tmp_path)])  # type: ignore[attr-defined]
    file = tmp_path / "sitecustomize.py"
    if how != "added":
        file.write_text("import os\n")
    before = Files.now()
    if how == "removed":
        file.unlink()
    else:
        file.write_text("import sys\n")
        os.utime(file, ns=(1, 1))
    assert before.edits() == f"{file} changed while optexp ran, which every new process of Python runs"
