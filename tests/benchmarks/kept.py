"""Rows of a benchmark in a JSON file that is complete after each row, and that several runs may share."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from optexp.pages.record import Record
from optexp.result import Result


class Row(Protocol):
    """A dataclass of JSON's own types, with a key of its own."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def key(self) -> Hashable: ...


T = TypeVar("T", bound=Row)


@dataclass(frozen=True)
class Kept(Generic[T]):
    """path: of a JSON list, which may begin as a copy of a page's record;  kind: of the rows"""

    path: Path
    kind: type[T]

    def rows(self) -> dict[Hashable, T]:
        """By key; none where there is no file yet."""
        held = json.loads(self.path.read_text()) if self.path.exists() else []
        found = held if isinstance(held, list) else Record.read(self.path).rows
        rows = [self.kind(**facts) for facts in found]
        return {row.key: row for row in rows}

    def add(self, row: T) -> None:
        """Put a row in, in the place of one with its key."""
        with self.alone():
            self.write([*({**self.rows(), row.key: row}).values()])

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other run reads or writes the file meanwhile."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def write(self, rows: Iterable[T]) -> None:
        """Write all rows; a run that is ended meanwhile leaves the file as it was."""
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        partial.replace(self.path)


def keep_if_beyond(result: Result, folder: Path, place: Path) -> None:
    """Copy the folder of a comparison that measured more than its strategy's bound allows: its trace shows why."""
    found = result.profile.prediction
    if found is not None and found.refuted:
        shutil.copytree(folder, place, dirs_exist_ok=True)
