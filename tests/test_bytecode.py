"""Bytecode of torch where Python may not write it beside torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from optexp.support import bytecode
from optexp.support.cache import kept

TELL = """
import os, sys
from optexp.support import bytecode
bytecode.keep()
import torch
print(sys.pycache_prefix, os.environ.get("PYTHONPYCACHEPREFIX"), os.environ.get("PYTHONDONTWRITEBYTECODE"))
"""


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    """A package of that name without bytecode."""
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text("")
    return tmp_path / "site" / "torch"


def told(folder: Path, **more: str) -> list[str]:
    """Settings of a process that imports the small torch, and whose caches lie in this folder."""
    paths = f"{folder / 'site'}{os.pathsep}{Path(__file__).parents[1]}"
    environment = {"PYTHONPATH": paths, "XDG_CACHE_HOME": str(folder), **more}
    command = [sys.executable, "-S", "-c", TELL]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()


def test_it_is_kept_where_a_container_forbids_it(torch: Path, tmp_path: Path) -> None:
    place = tmp_path / "optexp" / "bytecode"
    assert told(tmp_path, PYTHONDONTWRITEBYTECODE="1") == [str(place), str(place), "None"]
    assert not (torch / "__pycache__").exists()
    assert list(place.rglob("torch/__init__*.pyc"))


def test_it_lies_beside_torch_where_it_may(torch: Path, tmp_path: Path) -> None:
    assert told(tmp_path) == ["None", "None", "None"]
    assert list((torch / "__pycache__").glob("*.pyc"))
    assert told(tmp_path, PYTHONDONTWRITEBYTECODE="1") == ["None", "None", "1"]  # it has some


def test_a_place_that_was_chosen_is_left(torch: Path, tmp_path: Path) -> None:
    own = str(tmp_path / "own")
    assert told(tmp_path, PYTHONDONTWRITEBYTECODE="1", PYTHONPYCACHEPREFIX=own) == [own, own, "1"]


def test_workers_of_a_program_that_imports_optexp_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytecode, "_missing", lambda: True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    found = bytecode.environment({"PYTHONDONTWRITEBYTECODE": "1", "HOME": "/home"})
    assert found == {"HOME": "/home", "PYTHONPYCACHEPREFIX": str(kept("bytecode"))}


def test_a_command_keeps_it_before_it_imports_torch() -> None:
    """The command line and the package of the other commands do so when they start."""
    code = "import sys, optexp.support.bytecode as b; b.keep = lambda: sys.exit(7 if 'torch' not in sys.modules else 8)"
    for module in ("optexp.__main__ as m; m.command()", "optexp.commands"):
        ended = subprocess.run([sys.executable, "-c", f"{code}; import {module}"], cwd=Path(__file__).parents[1])
        assert ended.returncode == 7, module
