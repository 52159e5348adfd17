"""A version runs the files of its commit, with the interpreter of its environment, and nothing of another version."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from optexp.duets.repository import Repository
from optexp.duets.versions import Version, _own, home, labels, python_of
from optexp.errors import ConfigError, Distrusted
from optexp.workers.arm_program import process_files
from optexp.workers.home import Home, Homes
from optexp.workers.pool import ArmPool
from tests.duets.conftest import git


def test_commits_by_name_and_between_two(repository: Path) -> None:
    found = Repository.here()
    first, last = found.commit("HEAD~2"), found.commit("main")
    assert first.subject == "first"
    assert [commit.subject for commit in found.between(first, last)] == ["slower", "other results"]
    with pytest.raises(ConfigError, match="no ancestor"):
        found.between(last, first)
    with pytest.raises(ConfigError, match="nowhere: there is no such commit"):
        found.commit("nowhere")


def test_outside_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ConfigError, match="not a git repository"):
        Repository.here()


def test_a_commit_has_a_folder_of_its_own_for_a_while(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = repository.parent / "library"
    library.mkdir()
    git(repository, "add", ".")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(library), "/elsewhere"]))
    found = Repository.here()
    with home(Version(found.commit("HEAD~1")), found) as base, home(Version(), found) as head:
        assert base.folder.name == "program"
        assert "0.02" in (base.folder / "part.py").read_text()
        assert {str(base.folder), str(base.folder.parent / "library"), "/elsewhere"} <= {*base.path}
        assert not {str(repository), str(library)} & {*base.path}
        assert base.elsewhere == repository.parent
        assert (head.folder, head.elsewhere, head.interpreter) == (repository, None, sys.executable)
        assert {str(repository), str(library)} <= {*head.path}
    assert not base.folder.exists()
    assert git(repository, "worktree", "list").count("\n") == 0


def test_a_folder_that_the_commit_has_not(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = repository.parent / "later"
    later.mkdir()
    monkeypatch.chdir(later)
    found = Repository.here()
    with pytest.raises(ConfigError, match="has no folder later"), home(Version(found.commit("HEAD")), found):
        pass
    assert git(repository, "worktree", "list").count("\n") == 0


def test_the_python_of_an_environment(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no Python"):
        python_of(str(tmp_path))
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'msgspec'\" >&2\nexit 1\n")
    python.chmod(0o755)
    assert python_of(str(tmp_path)) == python_of(str(python)) == str(python)
    with (
        pytest.raises(ConfigError, match="No module named 'msgspec'; install"),
        home(Version(None, str(tmp_path)), None),
    ):
        pass


def test_two_environments_are_named_with_their_torch(tmp_path: Path) -> None:
    ours, theirs = Home(tmp_path, ()), Home(tmp_path, (), torch="2.11.0")
    base, head = Version(None, "../old"), Version()
    named = labels(base, head, Homes(theirs, ours))
    assert named.base == "working tree under ../old (torch 2.11.0)"
    assert named.head == f"working tree (torch {torch.__version__})"
    assert labels(head, head, Homes(ours, ours)).head == "working tree"


def test_another_environment_gets_an_installed_optexp_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "optexp"
    package.mkdir(parents=True)
    (package.parent / "other.py").touch()
    monkeypatch.setattr("optexp.__file__", str(package / "__init__.py"))
    with ExitStack() as held:
        (entry,) = _own(held, elsewhere=True)
        assert [path.name for path in Path(entry).iterdir()] == ["optexp"]
        assert (Path(entry) / "optexp").resolve() == package
        assert _own(held, elsewhere=False) == []  # this Python finds it as it always does
    assert not Path(entry).exists()
    assert package.is_dir()


def test_code_of_the_other_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, file in {
        "theirs": "theirs.py",
        "library": "venv/lib/site-packages/library.py",
        "optexp.own": "own.py",
    }.items():
        module = ModuleType(name)
        module.__file__ = str(tmp_path / file)
        monkeypatch.setitem(sys.modules, name, module)
    assert process_files(tmp_path) == [str(tmp_path / "theirs.py")]
    assert process_files(tmp_path / "other") == []
    arm = SimpleNamespace(call=lambda method, folder: process_files(Path(folder)))
    base, head = Home(tmp_path / "tree", (), elsewhere=tmp_path), Home(tmp_path, ())
    pool = ArmPool("cpu", True, tmp_path, 1.0, homes=Homes(base, head))
    pool.check_home("candidate", arm)
    with pytest.raises(Distrusted, match=r"the again runs the working tree's .*theirs\.py"):
        pool.check_home("again", arm)
