"""Contracts between packages hold, and can be broken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTRACTS = """
[importlinter]
root_package = {package}

[importlinter:contract:layers]
name = layers
type = layers
containers = {package}
layers =
    high
    low
"""


def linted(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "import sys; from importlinter.cli import lint_imports_command as c; sys.exit(c())",
    ]
    paths = {"PYTHONPATH": str(folder), "PATH": "", "HOME": str(folder)}
    return subprocess.run(
        [*command, "--no-cache", *options], cwd=folder, env=paths, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("low", "kept"), [("", True), ("from layered import high\n", False)])
def test_an_upward_import_breaks_a_contract(low: str, kept: bool, tmp_path: Path) -> None:
    package = tmp_path / "layered"
    package.mkdir()
    for name, text in (("__init__", ""), ("high", "from layered import low\n"), ("low", low)):
        (package / f"{name}.py").write_text(text if name != "high" or kept else "")
    (tmp_path / ".importlinter").write_text(CONTRACTS.format(package="layered"))
    done = linted(tmp_path)
    assert (done.returncode == 0) is kept, done.stdout + done.stderr
    assert ("Contracts: 1 kept, 0 broken." in done.stdout) is kept


def test_the_contracts_of_this_package_hold() -> None:
    done = linted(ROOT)
    assert done.returncode == 0, done.stdout
    assert " 0 broken." in done.stdout
