"""Sections and terminal tables of ranges, Nsight runs and trace files; the button that opens a trace in Perfetto."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from optexp.records.nsight import Advice, ToolKernel, ToolRow, ToolRun, ToolTable
from optexp.records.profile import ArmProfile, OperatorEntry
from optexp.records.ranges import Cycle, LineEntry, RangeEntry, Ranges, TraceFile
from optexp.reporting import range_tables, report
from optexp.reporting.tables import spaced
from optexp.result import Result

PROFILED = Path(__file__).parents[1] / "results" / "profiled.json"
FOUND = Ranges(
    region="attention",
    phases=[RangeEntry("forward", 1, 0.4, 0.5, 3, 40.0, 50.0, 0.0, 0.0)],
    regions=[RangeEntry("attention", 12, 0.25, 0.33, 7, 20.0, 30.0, 10.0, 15.0)],
    lines=[LineEntry("aten::linear", "/home/me/net.py:12", 4, 0.5, 0.6, 30.0, 40.0)],
    origins={"aten::addmm": "/home/me/net.py:12"},
    cycles=[Cycle("traces/baseline.json.gz", 5, True, 123.0), Cycle("traces/baseline_cycle2.json.gz", 5, False, 150.0)],
    files=[
        TraceFile("traces/baseline.json.gz", "steady steps"),
        TraceFile("flamegraphs/a.svg", "picture", trace=False),
    ],
)
NCU = ToolRun(
    "ncu",
    "ncu --set basic python",
    report="nsight/baseline.ncu-rep",
    kernels=[ToolKernel("gemm", 2, "16×1×1", "128×1×1", 12.0, 55.5, 20.0, 33.3, 50.0, 168)],
    advice=[Advice("gemm", "Occupancy", "Fewer registers help.", 15.0)],
)
NSYS = ToolRun(
    "nsys", "nsys profile python", tables=[ToolTable("Kernels", [ToolRow("burn", 5, 0.91, 28918.0, 5780.0)])]
)


def result(ranges: Ranges | None = FOUND, tool: ToolRun | None = None) -> Result:
    found = Result.read(PROFILED)
    rows = [OperatorEntry("aten::addmm", "matrix", 1.0, host_self_us=3.0, host_share=1.0)]
    found.profile = replace(found.profile, baseline=ArmProfile(operators=rows, ranges=ranges), tool=tool)
    return found


def test_a_line_is_named_by_its_file_and_its_folder_only_where_that_says_more() -> None:
    lines = ["/home/me/profile/net.py:12", "/home/me/profile/net.py:13", "/home/me/profile/other.py:1"]
    assert [range_tables.file_of(line, lines) for line in lines] == ["net.py:12", "net.py:13", "other.py:1"]
    assert range_tables.file_of(lines[0], [*lines, "/home/me/second/net.py:12"]) == "profile/net.py:12"


def test_everything_that_was_found_stands_in_the_page() -> None:
    page = report.render(result(tool=NCU))
    for text in (
        "forward", "attention", "me/net.py:12", "called from", "shown here", "flamegraphs/a.svg", "55.5 %",
        "Fewer registers help.", "nsight/baseline.ncu-rep", "Nsight Compute",
        "are of the region <b>attention</b> alone",
    ):  # fmt: skip
        assert text in page, text
    assert page.count("open in Perfetto</button>") == 1  # of the one Chrome trace
    page = report.render(result(tool=NSYS))
    assert "Nsight Systems" in page
    assert "burn" in page


def test_a_reason_stands_with_the_command_and_nothing_is_shown_without_a_tool() -> None:
    page = report.render(result(tool=ToolRun("ncu", "ncu --set basic python", "Nsight Compute did not run: because.")))
    assert "did not run: because." in page
    assert "ncu --set basic python" in page
    plain = report.render(result(Ranges()))
    assert "Nsight" not in plain
    assert "Perfetto" not in plain
    assert "Phases, regions" not in plain
    assert "called from" not in plain
    report.render(result(None))


def test_withheld_times_leave_shares_and_counts() -> None:
    page = report.render(result(FOUND.untimed()))
    assert "attention" in page
    assert "µs" not in page.partition("Phases, regions and lines")[2].partition("</section>")[0]


@pytest.mark.parametrize("found", [FOUND, FOUND.untimed(), None])
def test_tables_on_a_terminal(found: Ranges | None) -> None:
    console = Console(width=120, record=True)
    console.print(*spaced(list(range_tables.of_ranges(found, 5))))
    text = console.export_text()
    assert ("attention" in text) == (found is not None)
    assert ("45 µs" in text) == (found is FOUND)  # of both passes


# --- in a browser ------------------------------------------------------------------------------------------------

BROWSER = pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no browser")
CHECK = """<script>
  const said = [];
  window.onerror = message => { said.push(message); };
  window.onunhandledrejection = event => said.push(event.reason);
  const sent = [];
  const tab = {postMessage: (message, origin) => {
    sent.push([message, origin]);
    if (message === "PING") window.dispatchEvent(new MessageEvent("message", {source: window, data: "PONG"}));
  }};
  onload = async () => {
    const buttons = [...document.querySelectorAll("button.perfetto")];
    const shown = buttons.filter(button => !button.hidden);
    Object.assign(window, {postMessage: tab.postMessage});
    window.open = () => window;
    for (const button of shown) button.click();
    await new Promise(done => setTimeout(done, 800));
    const trace = sent.find(([message]) => message.perfetto);
    const got = trace ? [trace[0].perfetto.buffer.byteLength, trace[0].perfetto.fileName, trace[1]].join(" ") : "";
    document.title = [buttons.length, shown.length, got, said.join(";")].join("|");
  };
</script>"""


def title(address: str) -> str:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000", "--dump-dom"]
    done = subprocess.run([*command, address], capture_output=True, text=True, timeout=90, check=False)
    return done.stdout.partition("<title>")[2].partition("</title>")[0]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "baseline.json.gz").write_bytes(b"x" * 1234)
    (tmp_path / "report.html").write_text(report.render(result()).replace("</head>", f"{CHECK}</head>"))
    return tmp_path


@pytest.fixture
def served(page: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(page))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/report.html"
        server.shutdown()


@BROWSER
def test_from_a_server_the_button_sends_the_trace_once_the_viewer_listens(served: str) -> None:
    assert title(served) == "1|1|1234 baseline.json.gz https://ui.perfetto.dev|"


@BROWSER
def test_from_a_disk_the_sentence_stands_alone(page: Path) -> None:
    assert title(f"file://{page / 'report.html'}") == "1|0||"
