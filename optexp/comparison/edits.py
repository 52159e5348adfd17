"""Files that decide a verdict and must not change while a comparison runs: this package's own, those of the libraries
that it computes with, and those that Python runs by itself when a process starts."""

from __future__ import annotations

import hashlib
import os
import site
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

LIBRARIES = ("torch", "numpy", "scipy", "triton")
AT_START = ("sitecustomize.py", "usercustomize.py")  # beside *.pth of a site's folders

Stamps = Mapping[str, tuple[int, int]]  # by path: time of the last change in ns, and size


@dataclass(frozen=True)
class Files:
    """How they are now.

    own:       digests of this package's sources, by their paths in it
    libraries: of the modules that this process has imported, and the libraries that torch loads
    at_start:  what site folders hold for processes to come
    """

    own: Mapping[str, str]
    libraries: Stamps
    at_start: Stamps

    @classmethod
    def now(cls, libraries: Iterable[str] | None = None) -> Files:
        """Read them all; of libraries the given paths or, without any, those of what is imported now."""
        paths = library_files() if libraries is None else libraries
        return cls(own_files(), stamps(paths), stamps(start_files()))

    def edits(self) -> str:
        """Changes since then, in words; empty where there are none."""
        now = Files.now(self.libraries)
        if own := differing(self.own, now.own):
            return f"{', '.join(own[:3])} of optexp changed while it ran"
        if theirs := differing(self.libraries, now.libraries):
            return f"{', '.join(theirs[:3])} changed while optexp ran, which computes with it"
        if started := differing(self.at_start, now.at_start):
            return f"{', '.join(started[:3])} changed while optexp ran, which every new process of Python runs"
        return ""


def own_files() -> dict[str, str]:
    """A digest of each source file of this package."""
    folder = Path(__file__).parent.parent
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*.py")
    }


def library_files() -> Iterator[str]:
    """Of a thousand modules or so, and of the compiled libraries of torch."""
    for name, module in sys.modules.copy().items():
        path = getattr(module, "__file__", None)
        if name.partition(".")[0] in LIBRARIES and isinstance(path, str) and os.path.isabs(path):
            yield path
    yield from files_in(str(Path(torch.__file__).parent / "lib"), lambda name: ".so" in name)


def start_files() -> Iterator[str]:
    """In site folders, and where else Python looks for the modules that it imports when it starts."""
    sites = {*site.getsitepackages(), site.getusersitepackages()}
    for folder in sites | set(sys.path):
        yield from files_in(folder or ".", lambda name: name in AT_START)
    for folder in sites:
        yield from files_in(folder, lambda name: name.endswith(".pth"))


def files_in(folder: str, wanted: Callable[[str], bool]) -> list[str]:
    """Paths by name; none where there is no such folder."""
    with suppress(OSError):
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if wanted(name)]
    return []


def stamps(paths: Iterable[str]) -> Stamps:
    """Of the files that are there."""
    found = {}
    for path in paths:
        with suppress(OSError):
            status = os.stat(path)
            found[path] = status.st_mtime_ns, status.st_size
    return found


def differing(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Names of what changed, came or went."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
