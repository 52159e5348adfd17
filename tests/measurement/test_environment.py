"""Where a result was obtained is told in full."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from optexp.measurement import environment


def test_flags_threads_and_cores_are_recorded() -> None:
    found = environment.describe(torch.device("cpu"))
    assert found["affinity"] == sorted(os.sched_getaffinity(0))
    assert found["threads"] == torch.get_num_threads()
    assert set(found["cudnn"]) == {"benchmark", "deterministic", "allow_tf32"}


def test_flags_that_torch_cannot_sum_up_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mixed:
        benchmark, deterministic = True, False

        @property
        def allow_tf32(self) -> bool:
            raise RuntimeError

    monkeypatch.setattr(torch.backends, "cudnn", Mixed())
    said = {"benchmark": True, "deterministic": False, "allow_tf32": "differs by operation"}
    assert environment.describe(torch.device("cpu"))["cudnn"] == said


def test_the_commit_of_a_checkout_is_recorded_wherever_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout, elsewhere = tmp_path / "checkout", tmp_path / "elsewhere"
    for folder in (checkout, elsewhere):
        folder.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=checkout, check=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *author, "commit", "-q", "--allow-empty", "-m", "x"], cwd=checkout, check=True)
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(environment, "CHECKOUT", checkout)
    found = environment.describe(torch.device("cpu"))
    assert len(found["optexp_git"]["commit"]) == 40
    assert found["git"] is None
    monkeypatch.setattr(environment, "CHECKOUT", elsewhere)  # an installed package
    assert environment.describe(torch.device("cpu"))["optexp_git"] is None
