"""Commits of the user's git repository, and a folder for each that holds its files."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from optexp.errors import ConfigError


@dataclass(frozen=True)
class Commit:
    """hash: all 40 digits;  subject: first line of its message"""

    hash: str
    subject: str

    @property
    def short(self) -> str:
        return self.hash[:9]


@dataclass(frozen=True)
class Repository:
    """root: top folder of the working tree"""

    root: Path

    @classmethod
    def here(cls) -> Repository:
        """The repository of the working folder.

        Raises:
            ConfigError: It lies in none.
        """
        return cls(Path(_git(Path.cwd(), "rev-parse", "--show-toplevel")))

    def commit(self, ref: str) -> Commit:
        """The commit that a branch, a tag or a hash names.

        Raises:
            ConfigError: There is no such commit.
        """
        hash_ = _git(self.root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}", asked=ref)
        return Commit(hash_, _git(self.root, "log", "-1", "--format=%s", hash_))

    def between(self, good: Commit, bad: Commit) -> list[Commit]:
        """Commits after `good` up to `bad`, the oldest first; merges are followed along their first parent.

        Raises:
            ConfigError: `good` is no ancestor of `bad`.
        """
        lines = _git(self.root, "log", "--first-parent", "--reverse", "--format=%H %s", f"{good.hash}..{bad.hash}")
        commits = [Commit(line[:40], line[41:]) for line in lines.splitlines()]
        if not commits or _git(self.root, "merge-base", good.hash, bad.hash) != good.hash:
            raise ConfigError(f"{good.short} is no ancestor of {bad.short}: there are no commits between them")
        return commits

    @contextmanager
    def checked_out(self, commit: Commit) -> Iterator[Path]:
        """A new folder with the commit's files, by `git worktree`; it is removed afterwards."""
        with tempfile.TemporaryDirectory(prefix=f"optexp-{commit.short}-") as place:
            folder = Path(place).resolve() / self.root.name
            _git(self.root, "worktree", "add", "--detach", "--quiet", str(folder), commit.hash)
            try:
                yield folder
            finally:
                _git(self.root, "worktree", "remove", "--force", str(folder))


def _git(folder: Path, *words: str, asked: str = "") -> str:
    """The output of a git command.

    Raises:
        ConfigError: git fails, or is not installed.
    """
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError("git is not installed: versions are commits of a git repository") from None
    if done.returncode:
        message = (done.stderr.strip().splitlines() or [f"{asked or ' '.join(words)}: there is no such commit"])[-1]
        raise ConfigError(f"git: {message.removeprefix('fatal: ')}")
    return done.stdout.strip()
