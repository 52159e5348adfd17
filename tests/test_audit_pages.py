"""Figures of the README and of the result pages follow, and a changed one is noticed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from optexp.commands import audit, audit_pages
from optexp.pages import jobs
from optexp.pages.blocks import keep
from optexp.pages.record import Record, block_of
from tests.test_audit import faster, written

RESULTS = audit_pages.ROOT / "experiments" / "results"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of the pages, to change."""
    shutil.copytree(RESULTS, tmp_path / "experiments" / "results", ignore=shutil.ignore_patterns("plots"))
    shutil.copy(audit_pages.ROOT / "README.md", tmp_path)
    return tmp_path


def problems(root: Path) -> list[str]:
    return [problem for page in audit_pages.audit(root) for problem in page.problems]


def test_what_is_published_follows(capsys: pytest.CaptureFixture[str]) -> None:
    """Pages without a record are listed."""
    assert audit.main(["--pages"]) == 0, capsys.readouterr().out
    told = capsys.readouterr().out
    assert " figures derived from data/change_points.equal.json, " in told
    without = [path.name for path in RESULTS.glob("*.md") if path.stem != "index" and not records_of(path.stem)]
    assert [name for name in without if f"{name}: not derived: no record" not in told] == []


def records_of(page: str) -> list[Path]:
    return [path for path in (RESULTS / "data").iterdir() if block_of(path)[0] == page]


CHANGES = {  # page: what stands there, what is written instead, and the sentence
    "README.md": ("at least 4.11×", "at least 4.21×", "at least is 4.21×, and 4.11× follows"),
    "verdicts.md": ("| b, cpu | 112 |", "| b, cpu | 113 |", "measured: | b, cpu | 113 | "),
    "bounds.md": ("| 9.48× | 9.02× |", "| 9.48× | 9.12× |", "| FASTER | 9.48× | 9.02× | 0.95 | follows"),
    "change_points.md": ("97 % of those of 7 %", "93 % of those of 7 %", "93 of 'It finds every step"),
    "search.md": ("| 8 of 16 |", "| 7 of 16 |", "| 8 of 16 |"),
    "graph_by_kernel_count.md": ("3.98× (3.92 to 4.05)", "3.98× (0.92 to 4.05)", "FASTER, and another follows"),
    "index.md": ("66 of 66 goals", "6666 of 66 goals", "kernels.md has no 6666"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_figure_is_noticed(name: str, root: Path) -> None:
    before, after, sentence = CHANGES[name]
    path = next(path for path in (root / name, root / "experiments" / "results" / name) if path.is_file())
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    assert any(sentence in problem for problem in problems(root)), problems(root)


def test_every_record_is_one_of_a_page_and_small() -> None:
    for path in (RESULTS / "data").iterdir():
        assert (RESULTS / f"{block_of(path)[0]}.md").is_file() or block_of(path)[0] == "README"
        assert path.stat().st_size <= 100_000
        assert Record.read(path).text()


# --- a page of comparisons ---------------------------------------------------------------------------------------


@pytest.fixture
def published(root: Path, tmp_path: Path) -> Path:
    """The data folder after a comparison was put into the page of stacks."""
    (tmp_path / "job").mkdir()
    written(faster(), tmp_path / "job")
    data = root / "experiments" / "results" / "data"
    keep(Record("comparisons", "A machine.", [jobs.row(tmp_path / "job", "workload=mlp strategy=amp")]), "stacks", data)
    return data


def test_a_page_is_what_its_record_prints(published: Path, root: Path) -> None:
    text = (published.parent / "stacks.md").read_text()
    assert "<!-- measured -->\n\n**Machine.** A machine.\n\n| command | verdict |" in text
    assert "| `workload=mlp strategy=amp` | FASTER | " in text
    assert not [problem for problem in problems(root) if "workload=mlp" in problem]
    (page,) = (page for page in audit_pages.audit(root) if page.name == "stacks.md")
    assert str(page).endswith(" figures derived from data/stacks.json")


def edit(change: Callable[[dict[str, object]], object], path: Path) -> None:
    record = json.loads(path.read_text())
    row = dict(zip(record["columns"], record["rows"][0], strict=True))
    change(row)
    record["rows"] = [[row[key] for key in record["columns"]]]
    path.write_text(json.dumps(record))


def test_a_record_whose_speedup_does_not_follow_from_its_pairs_is_noticed(published: Path, root: Path) -> None:
    edit(lambda row: row["speedup"].update(low=3.0), published / "stacks.json")  # type: ignore[attr-defined]
    found = problems(root)
    assert any("the pairs give" in problem for problem in found)
    assert any("stands there" in problem for problem in found)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("nowhere.json", '{"rule": "bounds", "rows": []}', "it is the record of no page"),
        ("clock.json", "[]", "data/clock.json cannot be printed"),
        ("clock.json", '{"rule": "none_such", "rows": []}', "data/clock.json cannot be printed"),
        ("clock.none.json", '{"rule": "clocks", "rows": []}', "there is no block none"),
    ],
)
def test_a_record_without_a_place_or_a_rule_is_noticed(name: str, content: str, sentence: str, root: Path) -> None:
    (root / "experiments" / "results" / "data" / name).write_text(content)
    assert any(sentence in problem for problem in problems(root)), problems(root)


def test_the_readme_is_what_the_terminal_shows_of_its_record(root: Path, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    written(faster(), tmp_path / "job")
    record = Record("terminal", "", [jobs.whole(tmp_path / "job")], {"typed": "workload=mlp strategy=amp"})
    keep(record, "README", root / "experiments" / "results" / "data")
    text = (root / "README.md").read_text()
    assert "<!-- measured -->\n```console\n$ python -m optexp workload=mlp strategy=amp\nmlp · amp  FASTER" in text
    assert not [problem for problem in problems(root) if problem.startswith("measured: ")]
    assert "mlp · cuda_graph" not in text  # the result that stood there before
    changed = re.sub(r"(mlp · amp  FASTER, at least )[\d.]+", r"\g<1>7.77", text)
    (root / "README.md").write_text(changed)
    assert any("at least 7.77" in problem and "stands there" in problem for problem in problems(root))
