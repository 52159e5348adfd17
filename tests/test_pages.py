"""Records of result pages: rows survive a file, blocks are found and replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.pages import blocks
from optexp.pages.machine import here, of_rows
from optexp.pages.record import Record, block_of

ROWS = [
    {"name": "a", "device": "cpu", "config": {"seed": 0, "size": 1}, "us": 1.5, "note": None},
    {"name": "b", "device": "cpu", "config": {"seed": 0, "size": 2}, "us": 2.5, "note": None},
    {"name": "c", "device": "cpu", "config": None, "us": 0.0, "note": None},
]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_rows_are_the_same_after_a_file(count: int, tmp_path: Path) -> None:
    record = Record("bounds", "A machine.", ROWS[:count], {"table": "x"})
    record.write(tmp_path / "page.json")
    assert Record.read(tmp_path / "page.json") == record
    Record.read(tmp_path / "page.json").write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "page.json").read_text()


def test_what_all_rows_share_is_written_once(tmp_path: Path) -> None:
    Record("bounds", "", ROWS * 30).write(tmp_path / "page.json")
    text = (tmp_path / "page.json").read_text()
    assert text.count('"cpu"') == text.count('"seed"') == 1


@pytest.mark.parametrize("rows", [[{"a": 1}, {"b": 1}], [{"a": "x" * 100_000}]])
def test_rows_of_different_keys_and_large_records_are_refused(rows: list[dict[str, object]], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"different keys|are the limit"):
        Record("bounds", "", rows).write(tmp_path / "page.json")
    assert not (tmp_path / "page.json").exists()


def test_a_file_names_page_and_block() -> None:
    assert block_of(Path("data/gates.json")) == ("gates", "measured")
    assert block_of(Path("data/gates.cpu.json")) == ("gates", "cpu")


def test_the_text_around_a_block_stays() -> None:
    page = "# T\n\nbefore\n\n<!-- measured -->\n\nold\n\n<!-- /measured -->\n\nbetween\n\n<!-- cpu -->\n<!-- /cpu -->\n"
    assert blocks.blocks(page) == {"measured": "old", "cpu": ""}
    assert blocks.put(page, "measured", r"new \1") == page.replace("old", r"new \1")
    assert blocks.blocks(blocks.put(page, "cpu", "x"))["cpu"] == "x"
    assert blocks.put("# T\n", "measured", "x") == "# T\n\n<!-- measured -->\n\nx\n\n<!-- /measured -->\n"


def test_rows_of_another_machine_do_not_get_the_name_of_this_one() -> None:
    assert of_rows(["CPU", "cpu"], "cpu") == here("cpu")
    assert of_rows(["a card", "a card"], "cpu") == "a card; driver and versions not recorded."


def test_a_record_that_is_kept_elsewhere_changes_no_page(tmp_path: Path) -> None:
    rows = [{"workload": "mlp", "strategy": "amp", "verdict": "SAME", "measured": 1.0, "predicted": None}]
    record = Record("bounds", "", rows)
    (tmp_path / "bounds.md").write_text("# Bounds\n")
    blocks.keep(record, "bounds", tmp_path / "data")
    assert (tmp_path / "bounds.md").read_text() == "# Bounds\n"
    (tmp_path / "index.md").write_text("")
    blocks.keep(record, "bounds", tmp_path / "data")
    assert "| `mlp` | `amp` | SAME |" in (tmp_path / "bounds.md").read_text()
