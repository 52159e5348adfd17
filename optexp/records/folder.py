"""The folder of a record: it belongs to one run, and a disk may refuse it."""

from __future__ import annotations

import errno
import os
import shutil
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from optexp.errors import ConfigError
from optexp.support.units import byte_size

LEAST_BYTES = 8 * 2**20
ADVICE = "name another folder, as in hydra.run.dir=/tmp/run"
REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST}


def claim(wanted: Path) -> Path:
    """Make a new folder and return it: `wanted`, or where that exists `wanted-2`, `wanted-3`, ...

    No other process can get the same one.

    Raises:
        ConfigError: no folder can be made there, or its disk is full.
    """
    require_room(wanted)
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


def require_room(folder: Path) -> None:
    """Raises ConfigError where a folder, which need not exist, cannot be written, or its disk lacks room."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
    reason = full(there) if os.access(there, os.W_OK) else f"{there.absolute()} is not writable"
    if reason is not None:
        raise ConfigError(f"cannot write {folder}: {reason}; {ADVICE}")


def full(folder: Path) -> str | None:
    """How much is free on the disk of a folder, in words, where that is too little for a record; else None.

    A file system that tells no size, as /proc, may take files or refuse them: the first file shows it.
    """
    usage = shutil.disk_usage(folder)
    if usage.free >= LEAST_BYTES or not usage.total:
        return None
    return f"its disk has {byte_size(usage.free)} left, and a record takes some MiB"


def refusal(error: BaseException) -> str | None:
    """A sentence where a disk or its permissions refused a file; None for an error of another kind."""
    if not isinstance(error, OSError) or error.errno not in REFUSED:
        return None
    if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT):  # no file's, as of a connection
        return None
    return _sentence(Path(os.fsdecode(error.filename)) if error.filename else None, error)


def _sentence(path: Path | None, error: OSError) -> str:
    return f"cannot write {path or 'a file'}: {error.strerror or error}; {ADVICE}"


class NotDrawn(UserWarning):
    """A page or a picture of a record could not be made: an error of optexp's own."""


@contextmanager
def drawing(what: str, notes: list[str]) -> Iterator[None]:
    """Make a page or a picture of a record: an error in it costs the page, not the verdict. Warns, and adds a note."""
    try:
        yield
    except OSError:  # of the disk: see `tolerating`
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        note = f"{what} could not be made: {type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
        warnings.warn(note, NotDrawn, stacklevel=2)
        notes.append(note)


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
