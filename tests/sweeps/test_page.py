"""The page of a sweep or a study: its verdict, its picture, its tables, on a phone as well."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from optexp.reporting import logged, wording
from optexp.reporting.ranking import RankedRow
from optexp.result import Result, Speedup, Verdict
from optexp.sweeps import page
from optexp.sweeps.curves import scaling
from optexp.sweeps.study import completed, points
from tests.reporting.test_report import Outline
from tests.sweeps.recorded import recorded, study

FASTER = Result.read(Path(__file__).parents[1] / "results" / "faster.json")


def job(workload: str, strategy: str, verdict: Verdict = Verdict.FASTER, low: float = 2.0, **config: object) -> Result:
    speedup = Speedup(1.2 * low, low, 1.5 * low, 0.99, 5) if verdict.measured else None
    return replace(
        FASTER, verdict=verdict, headline=f"{verdict}: because", workload=workload, strategy=[strategy],
        speedup=speedup,
        config={f"workload.{key}": value for key, value in config.items()},
    )  # fmt: skip


def placed(*results: Result) -> list[page.Job]:
    """Jobs without a page of their own."""
    named = enumerate(results)
    return [page.Job(Path(str(number)), result, RankedRow.of(result, result.workload)) for number, result in named]


def swept(folder: Path) -> dict[Path, Result]:
    """Jobs as a sweep leaves them."""
    results = [
        job("mlp", "fusion", low=1.5), job("mlp", "amp", Verdict.INCONCLUSIVE, 0.9),
        job("gelu", "fusion", low=3.0), job("gelu", "amp", Verdict.NOT_EQUIVALENT),
    ]  # fmt: skip
    jobs = {folder / str(number): result for number, result in enumerate(results)}
    for number, place in enumerate(jobs):
        (place / ".hydra").mkdir(parents=True)
        (place / "report.html").touch()
        OmegaConf.save([f"workload={number}", "++study.step='plain'"], place / ".hydra" / "overrides.yaml")
    return jobs


def answered(name: str, folder: Path) -> None:
    """The page of a study from its recorded results."""
    jobs = recorded(name)
    asked = completed(study(name), jobs)
    found = points(asked, jobs)
    told = page.Answer.of(asked, found)
    page.write(name, {folder / str(n): result for n, (result, _) in enumerate(jobs)}, folder, told)


def test_a_sweep_has_verdict_picture_map_and_commands(tmp_path: Path) -> None:
    page.write("the sweep", dict(reversed(swept(tmp_path).items())), tmp_path)  # the best job ran last
    html = (tmp_path / "report.html").read_text()
    outline = Outline(html)
    text = re.sub(r"\s+", " ", outline.text)
    for part in (
        "Fastest: gelu · fusion, at least 3.00×", "2 FASTER, 1 INCONCLUSIVE, 1 NOT_EQUIVALENT",
        "undecided, 0.900 to 1.35", "✗ gelu · amp: because", "python -m optexp workload=2", "≥ 1.50×",
    ):  # fmt: skip
        assert part in text, part
    assert "study.step" not in text
    assert {address for address in outline.loads if address[0] != "#"} == {
        *(f"{n}/report.html" for n in range(4)), "table.csv", "table.md",
    }  # fmt: skip
    assert not re.search(r"url\(http|@import|<script", html)
    assert html.count('stroke-width="2"') == 1  # the hollow dot


def test_tables_are_for_other_programs_and_for_people(tmp_path: Path) -> None:
    page.write("the sweep", swept(tmp_path), tmp_path)
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert [float(row["speedup_low"]) for row in rows if row["speedup_low"]] == [1.5, 0.9, 3.0]
    assert float(rows[0]["step_us"]) == FASTER.candidate.step_us
    assert rows[3]["step_us"] == rows[3]["speedup"] == ""  # of a result that is wrong
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert "| 2 | gelu | fusion | FASTER | 3.00 |" in lines[2]


def test_a_slower_stack_has_the_figures_of_its_headline() -> None:
    slow = job("mlp", "amp", Verdict.SLOWER, low=0.5)
    slow = replace(slow, speedup=replace(slow.speedup, low=0.5, estimate=0.8, high=0.9))  # type: ignore[type-var]
    row = RankedRow.of(slow, "mlp")
    assert (row.at_least, row.estimate, row.interval) == (
        "1.11× slower", "1.25× slower", "1.25× slower (1.11 to 2.00)",
    )  # fmt: skip
    assert row.at_least in wording.headline(slow, "float32", "baseline", None)
    assert page._cells(row)[4:7] == ["1.11 slower", "1.25 slower", "2.00 slower"]
    assert logged.brief(slow).startswith("**SLOWER at least 1.11×**")


def test_a_sentence_stands_below_its_row_where_nothing_cuts_it() -> None:
    said = "other programs used the cores for half of the time"
    found = page.Table.of(["job", "note", "why"], [["0", said, ""], ["1", "", said]])
    assert found.heads == ["job"]
    assert found.rows == [(["0"], [said]), (["1"], [f"why: {said}"])]


def test_no_map_where_one_thing_varies() -> None:
    jobs = placed(job("mlp", "fusion"), job("mlp", "amp"))
    assert page.page("one workload", jobs).heat is None
    assert page.page("one job", jobs[:1]).heat is None


def test_the_map_shows_the_best_of_jobs_with_the_same_names() -> None:
    """As the picture in MLflow does: presets are in no name."""
    ranked = [
        job("mlp", "fusion", low=3.0),
        job("gelu", "amp", low=2.0),
        job("mlp", "fusion", Verdict.INCONCLUSIVE, 0.9),
    ]
    found = page.page("two presets", placed(*ranked)).heat
    assert found is not None
    assert found.ratio("mlp", "fusion") == "≥ 3.00×"


def test_profiles_propose_what_to_try() -> None:
    profile = replace(FASTER.profile, suggestion="strategy=fusion: small kernels")
    results = [replace(job(name, "x"), verdict=Verdict.PROFILED, profile=profile) for name in ("mlp", "gelu")]
    assert page.suggestions(placed(*results)) == [("mlp, gelu: strategy=fusion: small kernels", "")]


def test_a_sweep_over_a_number_is_a_curve() -> None:
    sizes = [job("mlp", "fusion", dim=size) for size in (64, 256, 1024)]
    found = scaling(sizes)
    assert found is not None
    assert (found.x, found.by, found.log) == (["workload.dim"], ["arm"], "x")
    assert scaling(sizes[:2]) is None
    assert scaling([job("mlp", "fusion", style=style) for style in "abc"]) is None


def test_a_study_shows_its_picture_in_the_readers_colours(tmp_path: Path) -> None:
    answered("matmul_scaling", tmp_path)
    html = (tmp_path / "report.html").read_text()
    assert html.count('<div class="panel"><svg') == 2
    assert not re.search(r"#000000|#ffffff", html.partition("<header>")[2])
    text = Outline(html.replace("xlink:href", "data-href")).text
    assert "From which size on does a matrix product" in text
    assert "longest kernel:" in text
    assert next(csv.reader((tmp_path / "table.csv").open()))[:2] == ["workload.size", "dtype"]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no browser")
def test_pages_fit_a_phone(tmp_path: Path) -> None:
    """Nothing lies beyond the edge of a sweep's and of a study's page."""
    page.write("the sweep", swept(tmp_path), tmp_path)
    (tmp_path / "study").mkdir()
    answered("gelu_five_ways", tmp_path / "study")
    frames = "".join(
        f'<iframe src="{name}" style="width:390px;height:3000px"></iframe>'
        for name in ("report.html", "study/report.html")
    )
    script = """<script>onload = () => {
      const pages = [...document.querySelectorAll("iframe")].map(frame => frame.contentDocument.documentElement);
      document.title = "beyond: " + pages.map(page => Math.max(0, page.scrollWidth - page.clientWidth)).join(" ");
    }</script>"""
    (tmp_path / "frame.html").write_text(frames + script)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    command = ["chromium", *options, str(tmp_path / "frame.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "<title>beyond: 0 0</title>" in done.stdout, done.stdout[:300]


@pytest.mark.parametrize(
    ("verdicts", "claim"),
    [
        (
            [Verdict.INCONCLUSIVE, Verdict.UNSUPPORTED, Verdict.INCONCLUSIVE],
            "is decided: 2 INCONCLUSIVE, 1 UNSUPPORTED",
        ),
        ([Verdict.INCONCLUSIVE, Verdict.SAME], "is shown to be faster"),
        ([Verdict.PROFILED], "was timed: 1 PROFILED"),
    ],
)
def test_a_page_claims_no_more_than_was_decided(verdicts: list[Verdict], claim: str) -> None:
    jobs = placed(*(job("mlp", f"s{number}", verdict) for number, verdict in enumerate(verdicts)))
    found = page.page("a sweep", jobs)
    assert found.claim == f"Nothing {claim}"
    open_questions = [text for text, _ in found.to_do[1] if text.startswith("Build nothing on this: ")]
    assert len(open_questions) == (Verdict.INCONCLUSIVE in verdicts)  # once for all jobs
