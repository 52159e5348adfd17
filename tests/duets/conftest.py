"""A tiny repository: three commits of a program whose step gets slower, and then computes something else."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = """\
import time

import torch
from part import FACTOR, WAIT_S
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        time.sleep(WAIT_S)
        return FACTOR * self.layer(x)


def get_inputs():
    return (torch.randn(8, 16),)
"""
PARTS = {"first": (0.001, 1.0), "slower": (0.02, 1.0), "other results": (0.001, 1.1)}


def git(folder: Path, *words: str) -> str:
    named = ["git", "-c", "user.name=tests", "-c", "user.email=tests@localhost", "-c", "init.defaultBranch=main"]
    return subprocess.run([*named, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the program, which lies below the repository's top; the working folder."""
    folder = tmp_path / "theirs" / "program"
    folder.mkdir(parents=True)
    git(folder.parent, "init", "-q")
    (folder / "net.py").write_text(PROGRAM)
    for subject, (wait_s, factor) in PARTS.items():
        (folder / "part.py").write_text(f"WAIT_S, FACTOR = {wait_s}, {factor}\n")
        git(folder, "add", ".")
        git(folder, "commit", "-qm", subject)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Those that a command sets are its own."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
