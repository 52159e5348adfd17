"""Locks of a machine: an flock on a file, which the kernel releases when its holder ends."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

# TMPDIR differs from one SLURM job to another on the same machine; this folder does not.
FOLDER = next((Path(folder) for folder in ("/dev/shm", "/tmp") if os.path.isdir(folder)), Path("/tmp"))


def acquire(path: Path, shared: bool = False) -> int | None:
    """A descriptor that holds the lock until it is closed; None while another process holds it.

    shared: holders that ask for the same share it
    """
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _open(path: Path) -> int:
    """The lock file of all users: in a sticky folder Linux lets no user open another user's file for creation."""
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        os.fchmod(descriptor, 0o666)  # whatever the umask
        return descriptor
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)
