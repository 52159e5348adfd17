"""Texts of the user's files as this process has run them, so that all arms can be seen to have run the same.

A file can change while a comparison runs, by its author or by a candidate: then what was verified is not what is timed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

from optexp.user_code.bound_names import INSTALLED

_OURS = (*INSTALLED, str(Path(__file__).resolve().parent.parent))

run: dict[str, str] = {}  # digests by path


def note(path: Path | str, text: bytes) -> None:
    """This process runs, or follows, the text of a file of the user's. Another text of the same file is another one."""
    place, found = str(Path(path).resolve()), digest(text)
    run[place] = found if run.get(place, found) == found else digest(f"{run[place]} {found}".encode())


def digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def note_imports() -> None:
    """Note what ordinary imports run from here on, too.

    Bytecode beside a file could be that of another text: the user's files are compiled anew.
    """
    usual: Callable[[SourceFileLoader, str], CodeType | None] = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
        if str(loader.path).startswith(_OURS):
            return usual(loader, fullname)
        return from_source(loader)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]


def from_source(loader: SourceFileLoader) -> CodeType:
    """The code of a file, which is noted."""
    text = loader.get_data(loader.path)
    note(loader.path, text)
    code: CodeType = loader.source_to_code(text, loader.path)
    return code
