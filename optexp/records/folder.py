"""The folder of a record: it belongs to one run, and a disk may refuse it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from optexp.errors import ConfigError

REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST}


def claim(wanted: Path) -> Path:
    """Make a new folder and return it: `wanted`, or where that exists `wanted-2`, `wanted-3`, ...

    No other process can get the same one.

    Raises:
        ConfigError: no folder can be made there.
    """
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(_sentence(wanted, error)) from None
    for number in count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(_sentence(wanted, error)) from None
        return folder
    raise AssertionError("there is always another number")


def refusal(error: BaseException) -> str | None:
    """A sentence where a disk or its permissions refused a file; None for an error of another kind."""
    if not isinstance(error, OSError) or error.errno not in REFUSED or error.filename is None:
        return None
    return _sentence(Path(os.fsdecode(error.filename)), error)


def _sentence(path: Path, error: OSError) -> str:
    return f"cannot write {path}: {error.strerror or error}; name another folder, as in hydra.run.dir=/tmp/run"


@contextmanager
def tolerating(notes: list[str]) -> Iterator[None]:
    """Write files of a record: a disk that refuses them costs them, not the result. Adds a note."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        where = f" {os.fsdecode(error.filename)}" if error.filename else ""
        note = f"not written{where}: {reason}"
        if error.errno not in REFUSED:
            raise
        if note not in notes:
            notes.append(note)
