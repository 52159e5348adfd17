"""Figures of the README and of the result pages follow, and a changed one is noticed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from optexp.commands import audit, audit_pages


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of the pages, to change."""
    results = audit_pages.ROOT / "experiments" / "results"
    ignored = shutil.ignore_patterns("plots")
    shutil.copytree(results, tmp_path / "experiments" / "results", ignore=ignored)
    shutil.copy(audit_pages.ROOT / "README.md", tmp_path)
    return tmp_path


def test_what_is_published_follows(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main(["--pages"]) == 0, capsys.readouterr().out
    assert "pages have no record in experiments/results/data: " in capsys.readouterr().out


CHANGES = {  # page: what stands there, what is written instead, and the sentence
    "README.md": ("at least 4.11×", "at least 4.21×", "at least is 4.21×, and 4.11× follows"),
    "main_job.md": ("| 557 µs | 128 µs |", "| 557 µs | 118 µs |", "the candidate's time is 128 µs, and 118 µs follows"),
    "verdicts.md": ("| b, H100 | 150 |", "| b, H100 | 151 |", "b, H100: decided is 151, and 150 follows"),
    "bounds.md": ("| 9.48× | 9.02× |", "| 9.48× | 9.12× |", "`mlp` `cuda_graph`: measured is 9.12×, and 9.02× follows"),
    "kernelbench_level1.md": (
        "| 0 to 0.5 GiB | 31 |",
        "| 0 to 0.5 GiB | 32 |",
        "0 to 0.5 GiB: files is 32, and 31 follows",
    ),
    "kernelbench.md": ("| 57.3 | 10 |", "| 57.3 | 11 |", "GELU: arms is 11, and 10 follows"),
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
    problems = [problem for page in audit_pages.audit(root) for problem in page.problems]
    assert any(sentence in problem for problem in problems), problems


def test_every_file_of_records_is_read() -> None:
    data = audit_pages.ROOT / "experiments" / "results" / "data"
    assert {path.name for path in data.iterdir()} == {name for name, _ in audit_pages.DERIVED.values()}
