"""Result lines in a file, so that a later run judges only the missing jobs. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import msgspec

from optexp.errors import ConfigError
from optexp.judging.line import Line, decoded, encoded
from optexp.records.verdict import Verdict

START = b'{"key":'  # beginning of every line


@dataclass
class Store:
    """The last line of each key. Several threads may add lines. Without a path nothing is written."""

    path: Path | None
    lines: dict[str, Line] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    @classmethod
    def open(cls, path: Path | None) -> Store:
        """The lines of a file. An unfinished last line of a killed run is cut off, if all other lines are valid.

        Raises:
            ConfigError: the file holds something else.
        """
        if path is None or not path.exists():
            return cls(path)
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        unfinished = content[len(whole) :]
        if not START.startswith(unfinished[: len(START)]):
            raise ConfigError(f"{path} ends in something else than a line of optexp.judge")
        lines: dict[str, Line] = {}
        for number, text in enumerate(whole.splitlines(), 1):
            try:
                line = decoded(text)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path}:{number} is no line of optexp.judge: {error}") from None
            lines[line.key] = line
        if unfinished:
            os.truncate(path, len(whole))
        return cls(path, lines)

    def add(self, line: Line) -> None:
        """Keep a line, and append it to the file."""
        with self.lock:
            self.lines[line.key] = line
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("ab") as file:
                    file.write(encoded(line) + b"\n")

    def has(self, key: str, again: Collection[Verdict] = ()) -> bool:
        """Whether a job has a line whose verdict is not among those to judge again."""
        line = self.lines.get(key)
        return line is not None and line.verdict not in again
