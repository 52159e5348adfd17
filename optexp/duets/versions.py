"""Versions of the user's code: a commit or the working tree, under this Python environment or another one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import optexp
from optexp.duets.repository import Commit, Repository
from optexp.duets.workloads import Labels
from optexp.errors import ConfigError
from optexp.support.nvml_count import SETTING
from optexp.workers.home import Home, Homes

WORKING_TREE = "working tree"
NEEDED = "import torch, optexp.workers.arm, optexp.workers.reference; print(torch.__version__)"


@dataclass(frozen=True)
class Version:
    """commit: None for the working tree;  environment: folder of a virtual environment, or its Python; "" for this"""

    commit: Commit | None = None
    environment: str = ""

    @property
    def label(self) -> str:
        """The version's name in a verdict."""
        code = self.commit.short if self.commit else WORKING_TREE
        return f"{code} under {self.environment}" if self.environment else code


def labels(base: Version, head: Version, homes: Homes) -> Labels:
    """Names of both versions, with their versions of torch if the environments differ."""
    if not homes.baseline.torch:
        return Labels(base.label, head.label)
    ours = metadata.version("torch")
    return Labels(f"{base.label} (torch {homes.baseline.torch})", f"{head.label} (torch {ours})")


@contextmanager
def home(version: Version, repository: Repository | None) -> Iterator[Home]:
    """Folder, import path and interpreter of the version's workers; a commit's folder is removed afterwards.

    Args:
        repository: Repository of the working folder; None where the folder lies in no repository.

    Raises:
        ConfigError: The environment has no Python, or misses packages that workers need.
    """
    here = Path.cwd().resolve()
    python_path = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    imported = [here, *(Path(entry).resolve() for entry in python_path)]
    folder, elsewhere = here, None
    with ExitStack() as held:
        if version.commit is not None and repository is not None:
            root = repository.root.resolve()
            tree = held.enter_context(repository.checked_out(version.commit))
            imported = [_moved(entry, root, tree) for entry in imported]
            folder, elsewhere = _moved(here, root, tree), root
            if not folder.is_dir():
                raise ConfigError(f"{version.label} has no folder {here.relative_to(root)}: start where both have one")
        path = (*_own(held, bool(version.environment)), *map(str, dict.fromkeys(imported)))
        if version.environment:
            place = Home(folder, path, python_of(version.environment), elsewhere)
            yield replace(place, torch=torch_version(place, version.environment))
        else:
            yield Home(folder, path, sys.executable, elsewhere)


def _moved(entry: Path, root: Path, tree: Path) -> Path:
    """The folder of `tree` that corresponds to `entry` in `root`; a folder outside `root` itself."""
    return tree / entry.relative_to(root) if entry.is_relative_to(root) else entry


def _own(held: ExitStack, elsewhere: bool) -> list[str]:
    """Entries of the import path for this optexp alone, without other packages of its environment."""
    package = Path(optexp.__file__).resolve().parent
    if package.parent.name not in ("site-packages", "dist-packages"):
        return [str(package.parent)]
    if not elsewhere:
        return []
    link = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="optexp-own-"))) / package.name
    link.symlink_to(package)
    return [str(link.parent)]


def python_of(environment: str) -> str:
    """The interpreter of an environment.

    Raises:
        ConfigError: There is none.
    """
    path = Path(environment).expanduser()
    interpreters = [path] if path.is_file() else [path / "bin" / "python", path / "python"]
    for interpreter in interpreters:
        if os.access(interpreter, os.X_OK) and interpreter.is_file():
            return str(interpreter.absolute())  # unresolved: the link tells Python which environment it is
    raise ConfigError(f"--base-env {environment}: there is no Python; name a virtual environment, or its bin/python")


def torch_version(place: Home, environment: str) -> str:
    """The version of torch in an environment.

    Raises:
        ConfigError: Its Python cannot run workers.
    """
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(place.path), **SETTING}
    asked = [place.interpreter, "-P", "-c", NEEDED]
    done = subprocess.run(asked, env=variables, cwd=place.folder, capture_output=True, text=True, check=False)
    if done.returncode:
        message = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ConfigError(f"--base-env {environment}: {message}; install what optexp needs there: pip install optexp")
    return done.stdout.split()[-1]
