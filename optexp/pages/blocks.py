"""Blocks of a page: the text between `<!-- NAME -->` and `<!-- /NAME -->`, which a record's rule prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from optexp.pages.record import Record, block_of

INDEX = "index.md"  # of the folder that pages are in
MARK = re.compile(r"<!-- (\w+) -->\n(.*?)\n?<!-- /\1 -->", re.DOTALL)


def blocks(page: str) -> dict[str, str]:
    """The text of each block by its name, without blank lines at its ends."""
    return {name: text.strip("\n") for name, text in MARK.findall(page)}


def prose(page: str) -> str:
    """The page without its blocks."""
    return MARK.sub("", page)


def put(page: str, name: str, text: str) -> str:
    """The page with another text in a block; a block that is new comes at its end."""
    gap = "\n" if text.startswith("```") else "\n\n"  # a table needs a blank line after a comment
    block = f"<!-- {name} -->{gap}{text.strip()}{gap}<!-- /{name} -->"
    pattern = re.compile(rf"<!-- {name} -->\n.*?<!-- /{name} -->", re.DOTALL)
    if pattern.search(page):
        return pattern.sub(lambda _: block, page)
    return f"{page.rstrip()}\n\n{block}\n"


def path_of(page: str, results: Path) -> Path:
    """The file of a page: one in the folder of results, or the README of the repository."""
    return results.parents[1] / "README.md" if page == "README" else results / f"{page}.md"


def records(results: Path, page: str) -> Iterator[tuple[str, Path]]:
    """Name of the block and file of each record of a page."""
    for path in sorted((results / "data").glob("*.json")):
        named, block = block_of(path)
        if named == page:
            yield block, path


def write(record: Path, results: Path) -> Path:
    """Print a record into its page, which may be new; returns the page."""
    name, block = block_of(record)
    path = path_of(name, results)
    page = path.read_text() if path.exists() else f"# {name}\n"
    path.write_text(put(page, block, Record.read(record).text()))
    return path


def keep(record: Record, name: str, folder: Path) -> Path:
    """Write a record as NAME.json; in the folder `data` beside pages, print it into its page, too.

    Raises:
        ValueError: The record is too large.
    """
    path = folder / f"{name}.json"
    record.write(path)
    if (folder.parent / INDEX).is_file():
        write(path, folder.parent)
    return path
