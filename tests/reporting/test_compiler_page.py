"""The report's section on compilers, its sentences, and the page that puts the stages side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from optexp.comparison.compiler_evidence import name_breaks
from optexp.records import filenames
from optexp.records.compiler import (
    CompiledGraph,
    CompilerEvidence,
    CudaGraphSkip,
    GraphBreak,
    KernelResources,
    Recompile,
)
from optexp.records.profile import ArmProfile, ProfileRecord
from optexp.reporting import compiler_page, report
from optexp.reporting.compiler_section import compiler_section, totals
from optexp.reporting.compiler_words import problems, recompiled
from optexp.result import Engagement, Result, Verdict

FILES = {"captured": "compiler/candidate/0_0-forward/captured.py"}
GRAPH = CompiledGraph("0/0", "forward", "forward (net.py:9)", 4, 15, 6, 4, 1, 1, 4 << 20, 3 << 20, 1 << 20, files=FILES)
FOUND = CompilerEvidence(
    graphs=[GRAPH, CompiledGraph("0/1", "backward", cached=True)],
    breaks=[
        GraphBreak("net.py:11", "Tensor.item()", 8, True, "scale = x.max().item()"),
        GraphBreak("net.py:20", "call of print", resumed=False),
    ],
    recompiles=[
        Recompile("forward (net.py:9)", "value of self.calls", "net.py:14", 7, ["self.calls == 0"], limited=True),
        Recompile("loss (net.py:40)", "size of x", times=1, guards=["tensor 'x' size mismatch"]),
    ],
    skips=[CudaGraphSkip("skipping cudagraphs due to mutated inputs", 2)],
    kernels=[
        KernelResources(
            "triton_poi_0", "Inductor", "66×1×1", "128×1×1", 2.0, 40, 0, 2048, 0.5, "registers", 8, 0.0625,
            {"sass": "code/candidate/triton_poi_0-4w.sass"},
        )
    ],
    log="compiler/candidate/structured_log",
)  # fmt: skip


@pytest.fixture
def result() -> Result:
    arms = {"baseline": ArmProfile(metrics={"ops": 478.0}), "candidate": ArmProfile({"ops": 358.0}, compiler=FOUND)}
    profile = ProfileRecord(**arms)  # type: ignore[arg-type]
    return Result(Verdict.FASTER, "FASTER", "net", ["fusion"], "cpu", 0, profile=profile)


def test_the_section_names_breaks_recompilations_and_resources(result: Result) -> None:
    page = report.render(result)
    for said in (
        "graph break at net.py:11 (Tensor.item()), in each of 8 graphs: scale = x.max().item()",
        "function not compiled for a graph break at net.py:20 that cannot be resumed (call of print)",
        "forward (net.py:9) compiled anew 7 times, for each value of self.calls (net.py:14)",
        "limit is reached, and it runs uncompiled since",
        "2 graphs: skipping cudagraphs due to mutated inputs",
        "tlparse compiler/candidate/structured_log/*.log",
        'href="code/candidate/triton_poi_0-4w.sass"',
        'href="compiler.html"',
        "<td>478</td>",
    ):
        assert said in page, said
    assert "Compiler" not in report.render(replace(result, profile=ProfileRecord()))


def test_sums_leave_out_what_one_graph_does_not_tell() -> None:
    assert totals([GRAPH, GRAPH])["operators captured"] == 8
    assert totals(FOUND.graphs)["operators captured"] is None
    assert compiler_section(Result(Verdict.ERROR, "", "net", [], "cpu", 0)) is None


def test_the_record_keeps_it_and_old_records_have_none(result: Result, tmp_path: Path) -> None:
    result.write(tmp_path / "result.json")
    read = Result.read(tmp_path / "result.json").profile
    assert read.candidate.compiler == FOUND
    assert read.baseline.compiler is None
    assert read.untimed().candidate.compiler == FOUND


def test_the_page_puts_stages_side_by_side(result: Result, tmp_path: Path) -> None:
    file = tmp_path / FILES["captured"]
    file.parent.mkdir(parents=True)
    file.write_text('def forward(self, x: "f32[4]"):\n    return x < 1\n')
    compiler_page.write(result, tmp_path)
    page = (tmp_path / filenames.COMPILER_PAGE).read_text()
    assert "return x &lt; 1" in page
    assert all(title in page for title in compiler_page.TITLES.values())
    assert "not in the log: the code came from a cache that holds none" in page
    assert "http" not in page.replace("http-equiv", "")  # nothing of the network
    assert page.count(" checked") >= 1  # a narrow screen begins with a stage that has a text


def test_no_page_where_nothing_was_compiled(tmp_path: Path) -> None:
    compiler_page.write(Result(Verdict.SAME, "", "net", [], "cpu", 0), tmp_path)
    assert not (tmp_path / filenames.COMPILER_PAGE).exists()


def test_a_note_names_what_no_evidence_names(result: Result) -> None:
    assert len(list(problems(FOUND))) == 4  # one recompilation is no problem
    result.evidence = [Engagement("fusion", True, "2 graphs compiled, 1 graph break: net.py:11 (Tensor.item())")]
    name_breaks(result)
    assert [note.partition(" for ")[0] for note in result.notes][:1] == [
        "candidate: torch.compile: function not compiled"
    ]
    assert not any("net.py:11" in note for note in result.notes)
    assert any("limit is reached" in note for note in result.notes)


def test_a_function_whose_limit_was_reached_before_is_not_compiled_anew() -> None:
    again = Recompile("step (net.py:9)", "object args[0] (SGD)", times=0, limited=True)
    assert (
        recompiled(again) == "step (net.py:9) not compiled for another object args[0] (SGD): torch's limit is reached"
    )
