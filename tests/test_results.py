"""Result pages: a study's records become its table, a table becomes a picture, the text around it stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from optexp.config import search_path
from optexp.pages.blocks import keep
from optexp.pages.machine import sentence
from optexp.pages.record import Record
from optexp.result import Result
from optexp.support.units import low_to_high
from tests.benchmarks import results

RECORD = Result.read(Path(__file__).parent / "results" / "faster.json")
ROWS = [{"layers": str(n), "strategy": arm, "time/step": f"{n} ms"} for n in (1, 2) for arm in ("baseline", "fusion")]


def study(folder: Path) -> Path:
    """The folder of a study with one job, as Hydra and the runner leave it."""
    hydra = folder / "0" / ".hydra"
    hydra.mkdir(parents=True)
    OmegaConf.save(search_path.compose(["experiments=elementwise"]), hydra / "config.yaml")
    OmegaConf.save(OmegaConf.create({"hydra": {"runtime": {"choices": {"experiments": "mine"}}}}), hydra / "hydra.yaml")
    environment = {**RECORD.environment, "gpu": "a card", "driver": "580.1", "torch": "2.13.0"}
    replace(RECORD, environment=environment).write(folder / "0" / "result.json")
    return folder


def test_jobs_of_a_study_become_a_record(tmp_path: Path) -> None:
    name, record = results.study(study(tmp_path / "job"))
    assert name == "mine"
    path = keep(record, name, tmp_path / "records")
    machine, _, heads, *rows = Record.read(path).text().splitlines()
    assert "| speedup |" in heads
    assert any("| FASTER |" in row for row in rows)
    assert machine.startswith("**Machine.** a card, 16 cores; driver 580.1")
    assert "torch 2.13.0" in machine
    assert machine.endswith(" `measurement=default`.")


def test_comparisons_become_rows(tmp_path: Path) -> None:
    """Those of a folder; what says only where and how it ran is left out."""
    job = study(tmp_path) / "0"
    typed = ["workload=mlp", "++strategy.fusion.mode=default", "++tracking.enabled=false"]
    OmegaConf.save(OmegaConf.create(typed), job / ".hydra" / "overrides.yaml")
    row = results.compared([tmp_path]).text().splitlines()[-1]
    assert row.startswith("| `workload=mlp strategy.fusion.mode=default` | FASTER | ")
    assert RECORD.speedup
    assert f" {low_to_high(RECORD.speedup.low, RECORD.speedup.high)} |" in row


def test_settings_of_all_comparisons_are_said_once_and_jobs_keep_their_order(tmp_path: Path) -> None:
    for number in (10, 2):
        job = study(tmp_path / str(number)) / "0"
        words = ["measurement.process_s=1", f"workload.dim={number}", "measurement.pairs=30"]
        OmegaConf.save(OmegaConf.create(words), job / ".hydra" / "overrides.yaml")
        (tmp_path / "jobs").mkdir(exist_ok=True)
        job.rename(tmp_path / "jobs" / str(number))
    machine, *_, first, last = results.compared([tmp_path / "jobs"]).text().splitlines()
    assert machine.endswith(" `measurement=default measurement.process_s=1 measurement.pairs=30`.")
    assert (first.split("|")[1], last.split("|")[1]) == (" `workload.dim=2` ", " `workload.dim=10` ")


def test_the_readme_shows_what_the_terminal_shows(tmp_path: Path) -> None:
    job = study(tmp_path) / "0"
    OmegaConf.save(OmegaConf.create(["workload=mlp"]), job / ".hydra" / "overrides.yaml")
    text = results.shown(job).text()
    assert text.startswith("```console\n$ python -m optexp workload=mlp\n")
    assert RECORD.headline.split(",")[0] in text
    assert "  time/step " in text


def test_groups_of_tests_become_rows(tmp_path: Path) -> None:
    (tmp_path / "tests_core.xml").write_text(
        '<testsuites><testsuite><testcase classname="a" name="b" time="1.5"/>'
        '<testcase classname="a" name="c" time="1"><failure/></testcase></testsuite></testsuites>'
    )
    (tmp_path / "tests_core.log").write_text("$ python\n\nexit status 1\n")
    row = results.tested(tmp_path).text().splitlines()[-1]
    assert row.startswith("| core | 1 | 1 | 0 | 2 | exit status 1 | `a.c` |")


def test_a_card_without_a_driver_says_so() -> None:
    assert "driver not recorded" in sentence({"gpu": "a card"})


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no record"):
        results.study(tmp_path)


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("837 µs", 837),
        ("1.14 ms", 1140),
        ("84.2 GFLOP/s", 0.0842),
        ("314 TFLOP/s", 314),
        ("12.1× (11 to 13)", 12.1),
        ("", None),
    ],
)
def test_cells_have_one_unit(cell: str, value: float | None) -> None:
    assert results.number(cell) == (None if value is None else pytest.approx(value))


def test_equal_tables_give_equal_pictures(tmp_path: Path) -> None:
    lines, bars = results.CHARTS["graph_by_kernel_count"], results.CHARTS["mlp_stacks"]
    for chart in (lines, bars):
        for name in ("one", "two"):
            (tmp_path / name).mkdir(exist_ok=True)
            results.draw(chart, ROWS, tmp_path / name / "same.svg")
        assert (tmp_path / "one" / "same.svg").read_bytes() == (tmp_path / "two" / "same.svg").read_bytes()


@pytest.mark.parametrize("name", results.CHARTS)
def test_every_page_with_a_chart_has_its_picture(name: str) -> None:
    page, chart = (results.PAGES / f"{name}.md").read_text(), results.CHARTS[name]
    assert f"(plots/{name}.svg)" in page
    assert (results.PAGES / "plots" / f"{name}.svg").is_file()
    assert {*chart.x, chart.y[0]} <= results.cells(page)[0].keys()
