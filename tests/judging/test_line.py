"""Lines, their published schema, and the file that a later run goes on from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from optexp.errors import ConfigError
from optexp.judging import line as lines
from optexp.judging.job import Job, Settings
from optexp.judging.line import Bound, Interval, Line, decoded, encoded
from optexp.judging.store import Store
from optexp.records.verdict import Verdict

LINE = Line(
    "k1",
    "files",
    "level1/1_sum",
    "1_sum",
    Verdict.FASTER,
    "at least 1.2×",
    axes={"M": 3},
    speedup=Interval(1.3, 1.2, None, 0.99, 5),
    bound=Bound(1.0, 2.0),
)


def test_the_published_schema_is_the_one_in_use() -> None:
    assert lines.SCHEMA_FILE.read_text() == lines.written_schema()


def test_lines_follow_the_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")
    published = json.loads(lines.SCHEMA_FILE.read_text())
    failed = lines.failed(Job("k2", "files", "p", "c"), Settings(), "no verdict within 5 s: the job was ended", 5.0)
    for line in (LINE, failed):
        jsonschema.validate(json.loads(encoded(line)), published)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(encoded(LINE)) | {"verdict": "FAST"}, published)


def test_a_line_is_read_as_it_was_written() -> None:
    assert decoded(encoded(LINE)) == LINE
    assert b"\n" not in encoded(replace(LINE, reason="two\nlines"))


def test_a_later_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "lines" / "found.jsonl"
    store = Store.open(path)
    store.add(LINE)
    store.add(replace(LINE, key="k2", verdict=Verdict.ERROR))
    path.write_bytes(path.read_bytes() + b'{"key": "k3", "sui')  # killed meanwhile
    store = Store.open(path)
    assert store.lines.keys() == {"k1", "k2"}
    assert [store.has(key, {Verdict.ERROR}) for key in ("k1", "k2", "k3")] == [True, False, False]
    store.add(replace(LINE, key="k2"))
    assert Store.open(path).lines["k2"].verdict is Verdict.FASTER
    assert len(path.read_text().splitlines()) == 3


def test_another_file_is_not_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"other.jsonl:1 is no line of optexp.judge"):
        Store.open(path)


@pytest.mark.parametrize("content", ["notes without an end", "{}\nnotes", '{}\n{"key": "k'])
def test_another_file_is_left_as_it_is(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(ConfigError, match="line of optexp"):
        Store.open(path)
    assert path.read_text() == content
