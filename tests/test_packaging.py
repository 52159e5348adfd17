"""The package works as a wheel and as an editable install, from any folder, and its parts have the right names."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OUTER = ("conf", "experiments", "kernels", "strategies")
SOURCES = [path for folder in ("optexp", "tests", *OUTER) for path in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize("folder", OUTER)
def test_outer_folders_are_no_packages_of_their_own(folder: str) -> None:
    assert (ROOT / folder).is_dir()
    assert not list((ROOT / folder).rglob("__init__.py"))


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_outer_folders_are_only_imported_below_optexp() -> None:
    assert [path for path in SOURCES if imported(path) & set(OUTER)] == []


def test_every_folder_with_modules_is_packaged() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    inner = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "optexp").rglob("*.py")}
    assert listed == inner | {f"optexp.{folder}" for folder in OUTER}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_installed(kind: str, tmp_path: Path) -> None:
    """In an environment of its own, which sees this one's dependencies but not this checkout."""
    source = tmp_path / "source"
    for name in ("optexp", *OUTER):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    python = tmp_path / "venv" / "bin" / "python"
    execute(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"))
    site = Path(execute(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-build-isolation"]
    execute(*install, *(["--editable"] if kind == "editable" else []), str(source))

    files = [path.relative_to(source) for folder in OUTER for path in (source / folder).rglob("*.*") if path.is_file()]
    assert files
    if kind == "wheel":
        shutil.rmtree(source)
        assert not [file for file in files if not (site / "optexp" / file).is_file()]
        assert not [folder for folder in OUTER if (site / folder).exists()]

    empty = tmp_path / "empty"
    empty.mkdir()
    names = "import optexp, optexp.strategies, optexp.kernels, optexp.conf, optexp.experiments; print(optexp.__file__)"
    assert execute(str(python), "-c", names, cwd=empty).startswith(str(site if kind == "wheel" else source))
    shown = execute(str(python), "-m", "optexp", "--help", cwd=empty)
    assert "mlp_stacks" in shown
    shown = execute(str(python.parent / "optexp"), "--cfg", "job", "strategy=amp+cuda_graph", cwd=empty)
    assert "optexp.strategies.cuda_graph.CudaGraph" in shown
    assert not list(empty.iterdir())


def execute(*command: str, cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
