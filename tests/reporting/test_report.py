"""The report is one file, complete for every verdict, and draws what was measured."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import subprocess
from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from jinja2 import meta, nodes

from optexp.records.difference import Change, Difference
from optexp.records.measurement import Measurement, ProcessRatio
from optexp.records.prediction import Prediction
from optexp.records.verification import Distribution, Element, Finding, GateResult, MutantCount, Recheck, Trajectory
from optexp.reporting import front, plots, report, sections
from optexp.reporting.wording import GATES
from optexp.result import Result, Verdict

RESULTS = {path.stem.upper(): Result.read(path) for path in (Path(__file__).parents[1] / "results").glob("*.json")}
VOID = {"meta", "link", "br", "img", "wbr"}


class Outline(HTMLParser):
    """Text of a page, the addresses that it would load, and whether its tags are balanced."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.loads, self.open = "", list[str](), list[str]()
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attributes if name in ("src", "href", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("verdict", Verdict)
def test_every_verdict_has_a_page_that_asks_nothing_of_the_network(verdict: Verdict) -> None:
    page = report.render(RESULTS[verdict])
    outline = Outline(page)
    assert "".join(front.parts(RESULTS[verdict].headline)) in outline.text
    assert outline.loads == []
    assert not re.search(r"url\(|@import|<script", page)
    assert ("of the speedup" in outline.text) == bool(verdict.measured and RESULTS[verdict].measurement.pairs)


@pytest.mark.parametrize("verdict", [Verdict.INVALID, Verdict.NOT_EQUIVALENT, Verdict.UNVERIFIED])
def test_no_speedup_is_shown_where_there_is_none(verdict: Verdict) -> None:
    text = Outline(report.render(RESULTS[verdict])).text
    for trace in ("time/step", "faster", "paid back", "are saved"):
        assert trace not in text


def test_the_page_holds_what_the_verdict_rests_on() -> None:
    text = Outline(report.render(RESULTS[Verdict.FASTER], "python -m optexp workload=mlp")).text
    for part in (
        "5.92× faster",  # the key table
        "grad/layers.0.weight",  # the worst tensor
        "one graph launch a step",  # evidence
        "dispatch 71% → 0%",  # breakdown of both arms
        "aten::addmm",
        "47 launches became 1",
        "rank correlation",  # a watchdog
        "measurement 31 s",
        "NVIDIA H200",
        "workload.dim: 256",
        "python -m optexp workload=mlp",
    ):
        assert part in re.sub(r"\s+", " ", text)


def test_what_users_wrote_is_escaped() -> None:
    page = report.render(replace(RESULTS[Verdict.ERROR], headline="ERROR: <script>alert(1)</script>"))
    assert "<script>" not in page


def test_the_strip_places_means_and_interval_on_one_scale() -> None:
    result = RESULTS[Verdict.FASTER]
    strip = plots.strip(result)
    assert strip is not None
    assert result.speedup is not None
    means = [row.mean for row in strip.rows]
    ratios = [math.exp(process.log_ratio) for process in result.measurement.processes]
    assert sorted(means) == [mean for _, mean in sorted(zip(ratios, means, strict=True))]
    assert 0 < strip.low < strip.estimate < strip.high < strip.width
    assert strip.one is None  # far from 1: the scale is spent on what was measured
    ticks = [(at, float(label.rstrip("×"))) for at, label in strip.ticks]
    (left, low), (right, high) = ticks[0], ticks[-1]
    at = left + (result.speedup.estimate - low) * (right - left) / (high - low)
    assert strip.estimate == pytest.approx(at, abs=0.5)


def test_identical_ratios_still_have_a_scale() -> None:
    result = RESULTS[Verdict.FASTER]
    assert result.speedup is not None
    same = replace(result.speedup, estimate=2.0, low=2.0, high=2.0)
    measurement = Measurement(processes=[ProcessRatio(math.log(2), 1)], pairs=[[(2.0, 1.0)]])
    strip = plots.strip(replace(result, speedup=same, measurement=measurement))
    assert strip is not None
    assert len(strip.ticks) >= 2


def test_the_command_is_the_jobs_own_overrides(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- workload=mlp\n- strategy=[amp,fusion]\n")
    report.write(RESULTS[Verdict.FASTER], tmp_path / "report.html")
    text = Outline((tmp_path / "report.html").read_text()).text
    assert "python -m optexp workload=mlp 'strategy=[amp,fusion]'" in text


def test_the_command_of_a_script_can_be_pasted(tmp_path: Path) -> None:
    typed = ["workload=script", "workload.path='dir/train.py'", "workload.arguments=['--width=3']", "strategy=amp"]
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text(json.dumps(typed))
    config = {"workload.path": "dir/train.py", "workload.arguments": ["--name", "it's a", "--width=3"]}
    command = report.command(replace(RESULTS["FASTER"], config=config), tmp_path)
    assert shlex.split(command) == [
        "python", "-m", "optexp.run", "strategy=amp", "dir/train.py", "--", "--name", "it's a", "--width=3",
    ]  # fmt: skip


def test_operators_that_changed_are_shown_whole() -> None:
    shapes = "float32[256, 1024], float32[1024, 4096], float32[4096]"
    change = Change("aten::addmm", shapes, "blocks.0.mlp", 1, 2, "ampere_sgemm_128x64_tn", "cutlass_80", 10.0, 5.0)
    result = RESULTS["FASTER"]
    profile = replace(result.profile, difference=Difference(changes=[change]))
    why = report.render(replace(result, profile=profile)).partition("<h2>Why</h2>")[2].partition("</section>")[0]
    for part in (shapes, "module blocks.0.mlp", "ampere_sgemm_128x64_tn → cutlass_80"):
        assert f">{part}</span>" in why
    assert 'class="name"' not in why


def test_what_was_checked_after_timing_is_a_sentence_and_set_up_stands_once() -> None:
    result = RESULTS[Verdict.FASTER]
    assert result.equivalence is not None
    checked = Recheck(1, True, 65, [65, 112, 65], 23, 0.00075)
    page = report.render(replace(result, equivalence=replace(result.equivalence, recheck=checked)))
    assert (
        "process 1: fresh inputs pass; the results of 3 timed blocks are held against 23 repeated steps; those after 65"
        " timed steps are judged by the gates; a fault in a quarter of the steps is missed with probability 0.00075"
    ) in page
    assert "<td>set-up</td>" not in page
    assert '<p class="soft" style="margin: 10px 0 0">set-up ' in page


def test_what_verification_found_is_shown_by_tensor() -> None:
    result = RESULTS[Verdict.FASTER]
    element = Element([3, 4], 1.2345678, 1.23456785, 1.2345679)
    row = Finding("output", "G2", True, error_ratio=1.25, used=0.5, family="offset", seed=3, element=element)
    shares = [0.5] + [0.0] * 40 + [0.3, 0.2] + [0.0] * 38
    assert result.equivalence is not None
    equivalence = replace(
        result.equivalence,
        tensors={"output": row, "loss": replace(row, used=math.inf, ok=False, element=None)},
        mutants={"stale": MutantCount(3, 2, ["output"])},
        visible={"output": (1e-6, 3e-6)},
        distribution=Distribution(shares, shares, "output"),
        trajectory=Trajectory(32, 7, 0.25),
        gates={"G2": GateResult(True, 1.25), "another": GateResult(False)},
    )
    page = report.render(replace(result, equivalence=equivalence))
    text = re.sub(r"\s+", " ", Outline(page).text)
    for part in (
        "[3, 4]", "1.2345678", "1.2345679", "1.23456785", "offset, seed 3, step 0", "50%", "∞",
        "2 of 3", "visible from 1e-06", "baseline: 50% exactly", "1e-8", "25% of what one rounding",
        GATES["G2"], "another",
    ):  # fmt: skip
        assert part in text, part
    assert page.count("<polyline") == 2
    errors = plots.errors(replace(result, equivalence=equivalence))
    assert errors is not None
    xs = [float(point.split(",")[0]) for point in errors.lines["baseline"].split()]
    assert xs == sorted(xs)
    assert plots.errors(result) is None
    scalar = Distribution([0.0] * 40 + [1.0] + [0.0] * 40, [1.0] + [0.0] * 80, "loss")
    assert plots.errors(replace(result, equivalence=replace(equivalence, distribution=scalar))) is None
    lower = report.render(replace(result, equivalence=replace(equivalence, contract="PRECISION(bfloat16)")))
    shown = re.sub(r"<[^>]*>|\s+", " ", lower.partition("Is it still right?")[2])
    assert "plain bfloat16 autocast: 50% exactly" in shown
    for part in ("over that of plain bfloat16 autocast", "mutant of plain bfloat16 autocast"):
        assert part in shown, part
    assert "<th>plain bfloat16 autocast</th><th>fp64</th>" in lower


def test_a_section_is_a_function_and_the_template_of_its_name() -> None:
    folder = Path(sections.__file__).parent / "templates" / "sections"
    assert {file.name.removesuffix(".html.j2") for file in folder.iterdir()} == {*sections.SECTIONS}
    shown = [name for name, section in sections.SECTIONS.items() if section(sections.Page(RESULTS["FASTER"], "x"))]
    assert {"figures", "certainty", "equivalence", "same_again"} <= {*shown}


@pytest.mark.parametrize("name", sections.SECTIONS)
def test_a_template_knows_its_section_alone(name: str) -> None:
    source, *_ = report.templates().loader.get_source(report.templates(), f"sections/{name}.html.j2")
    tree = report.templates().parse(source)
    own = {macro.name for macro in tree.find_all(nodes.Macro)}
    own |= {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
    assert meta.find_undeclared_variables(tree) - own == {"section"}
    kinds = [kind for kind in get_args(get_type_hints(sections.SECTIONS[name])["return"]) if is_dataclass(kind)]
    read = {node.attr for node in tree.find_all(nodes.Getattr) if getattr(node.node, "name", "") == "section"}
    assert read <= {field.name for kind in kinds for field in fields(kind)}


def predicted() -> Result:
    """A program that was profiled alone, with what strategies can gain."""
    text = "products as they are, one kernel between two of them, and launches that the host needs"
    row = Prediction("strategy=fusion strategy.fusion.mode=max-autotune-no-cudagraphs", 12345.0, 98765.0, text)
    result = replace(RESULTS["PROFILED"])
    result.profile = replace(result.profile, predictions=[row, replace(row, strategy="strategy=compiled_optimizer")])
    return result


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no browser")
@pytest.mark.parametrize("result", [RESULTS["FASTER"], predicted()], ids=["compared", "profiled"])
def test_a_page_fits_a_phone(result: Result, tmp_path: Path) -> None:
    """No word of a table is broken into letters, nothing lies beyond the edge, and what is wide scrolls alone."""
    report.write(result, tmp_path / "page.html")
    script = """<script>onload = () => {
      const page = document.querySelector("iframe").contentDocument;
      const cells = [...page.querySelectorAll("td:first-child")];
      const narrow = cells.filter(cell => cell.innerText.length > 8 && cell.clientWidth < 60).length;
      page.querySelectorAll("details").forEach(part => part.open = true);
      const scrolled = [...page.querySelectorAll("section")].filter(part => part.scrollWidth > part.clientWidth).length;
      const beyond = Math.max(0, page.documentElement.scrollWidth - 390);
      document.title = `${narrow} narrow, ${beyond} beyond, ${scrolled} sections scrolled`;
      document.body.append(document.title);
    }</script>"""
    frame = '<iframe src="page.html" style="width:390px;height:4000px;border:0"></iframe>'
    (tmp_path / "frame.html").write_text(frame + script)
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--dump-dom",
    ]
    done = subprocess.run([*command, str(tmp_path / "frame.html")], capture_output=True, text=True, timeout=60)
    assert "<title>0 narrow, 0 beyond, 0 sections scrolled</title>" in done.stdout, done.stdout[-300:]
