"""The record of a block: what a benchmark measured, as rows of JSON, and the name of the rule that prints them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

LIMIT_BYTES = 100_000  # of a record: it is read in a diff
MEASURED = "measured"  # the block of a page that has one

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """Measured rows of one block.

    rule:    name of a file in `optexp/pages/rules/`; its `text(rows, **options)` prints the block
    machine: device, driver and versions; empty where the rows name theirs
    rows:    all with the same keys; values are JSON's
    options: arguments of the rule that are no rows
    """

    rule: str
    machine: str
    rows: Sequence[Row]
    options: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The block, as the rule prints it."""
        printed: str = import_module(f"optexp.pages.rules.{self.rule}").text(self.rows, **self.options)
        return "\n\n".join(
            part.strip("\n") for part in (f"**Machine.** {self.machine}" * bool(self.machine), printed) if part
        )

    def write(self, path: Path) -> None:
        """Write the record with a line for each row; what all rows share is written once.

        Raises:
            ValueError: It has more than LIMIT_BYTES, or the rows differ in their keys.
        """
        shared, columns, cells = _packed(self.rows)
        head = {
            "rule": self.rule,
            "machine": self.machine,
            "options": self.options,
            "shared": shared,
            "columns": columns,
        }
        lines = [f"{json.dumps(key)}: {_json(value)}" for key, value in head.items() if value]
        body = ",\n".join(map(_json, cells))
        content = "{\n" + ",\n".join([*lines, f'"rows": [\n{body}\n]']) + "\n}\n"
        if len(content.encode()) > LIMIT_BYTES:
            raise ValueError(f"{path.name} would have {len(content.encode()):,} bytes; {LIMIT_BYTES:,} are the limit")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    @classmethod
    def read(cls, path: Path) -> Record:
        """Raises:
        OSError, ValueError, KeyError, TypeError: The file is no record.
        """
        held = json.loads(path.read_text())
        shared, columns = held.get("shared", {}), held.get("columns", [])
        rows = [_unpacked(shared, dict(zip(columns, cells, strict=True))) for cells in held["rows"]]
        return cls(held["rule"], held.get("machine", ""), rows, held.get("options", {}))


def block_of(path: Path) -> tuple[str, str]:
    """Page and block of a record, by its file's name: `gates.cpu.json` is the block `cpu` of the page `gates`."""
    page, _, block = path.name.removesuffix(".json").partition(".")
    return page, block or MEASURED


# --- rows in a file ----------------------------------------------------------------------------------------------


def _packed(rows: Sequence[Row]) -> tuple[dict[str, Any], list[str], list[list[Any]]]:
    """Values that all rows share, also inside their dictionaries; names of the others, and these values by row."""
    keys = list(rows[0]) if rows else []
    if any(set(row) != set(keys) for row in rows):
        raise ValueError("the rows of a record have different keys")
    if len(rows) < 2:
        return {}, keys, [[row[key] for key in keys] for row in rows]
    shared = _common(rows)
    inner = {key: [row[key] for row in rows if isinstance(row[key], dict)] for key in keys if key not in shared}
    parts = {key: common for key, found in inner.items() if len(found) > 1 and (common := _common(found))}
    columns = [key for key in keys if key not in shared]
    cells = [[_without(row[key], parts.get(key, {})) for key in columns] for row in rows]
    return {**shared, **parts}, columns, cells


def _common(rows: Sequence[Row]) -> dict[str, Any]:
    first, *others = rows
    return {key: value for key, value in first.items() if all(key in row and row[key] == value for row in others)}


def _without(value: Any, shared: Row) -> Any:
    return {key: part for key, part in value.items() if key not in shared} if isinstance(value, dict) else value


def _unpacked(shared: Row, own: Row) -> dict[str, Any]:
    """Own keys first: the order in which they are written again."""
    whole = {key: {**value, **shared.get(key, {})} if isinstance(value, dict) else value for key, value in own.items()}
    return {**whole, **{key: value for key, value in shared.items() if key not in own}}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
