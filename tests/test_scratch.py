"""Tensors of a comparison do not outlive it, even if its process is killed."""

from __future__ import annotations

import os
import time
from pathlib import Path

from optexp.support.scratch import YOUNG_S, Scratch, remove_left_behind


def age(path: str | Path) -> None:
    then = time.time() - 2 * YOUNG_S
    os.utime(path, (then, then))


def test_a_folder_ends_with_its_comparison(tmp_path: Path) -> None:
    scratch = Scratch.make(str(tmp_path))
    (Path(scratch.path) / "tensor").write_bytes(b"0")
    scratch.remove()
    scratch.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    alive, killed, young = (Scratch.make(str(tmp_path)) for _ in range(3))
    (tmp_path / "optexp-other").mkdir()
    for path in (alive.path, killed.path, tmp_path / "optexp-other"):
        age(path)
    os.close(killed.lock)  # as the kernel does
    os.close(young.lock)
    remove_left_behind(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {
        Path(alive.path).name,
        Path(young.path).name,
        "optexp-other",
    }
    alive.remove()
