"""Result pages: records from measurements, pages from records, pictures from the pages' tables.

    python tests/benchmarks/results.py study FOLDER ...      studies (multirun/...), each into the record of its name
    python tests/benchmarks/results.py jobs NAME FOLDER ...  comparisons (outputs/...), a row for each
    python tests/benchmarks/results.py readme FOLDER         the comparison that the README shows
    python tests/benchmarks/results.py judged FILE.jsonl     lines of python -m optexp.judge
    python tests/benchmarks/results.py tests FOLDER          groups of tests, as everything.py runs them
    python tests/benchmarks/results.py put RECORD ...        records from elsewhere, into data/ and their pages
    python tests/benchmarks/results.py plot                  the pictures, from the tables that the pages hold

NAME is PAGE or PAGE.BLOCK. `--record FOLDER` writes the record there, and changes no page.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf

from optexp.pages import jobs
from optexp.pages.blocks import blocks, keep
from optexp.pages.machine import here, sentence
from optexp.pages.record import MEASURED, Record
from optexp.pages.rules import kernelbench
from optexp.result import Result
from optexp.sweeps.study import STEP, Study

PAGES = Path(__file__).parents[2] / "experiments" / "results"
DATA = PAGES / "data"
SETTINGS = ("measurement", "profile.", "verify=", "replay=")  # of how a job is measured
UNSAID = ("hydra", "tracking", "environment")  # overrides that change no figure
OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}  # of a test in JUnit's XML
UNITS = {"µs": 1.0, "ms": 1e3, "s": 1e6, "GFLOP/s": 1e-3, "TFLOP/s": 1.0, "×": 1.0, "": 1.0}


@dataclass(frozen=True)
class Chart:
    """The picture of a page, by the headings of its table: lines over a number, or bars where `x` is words.

    x:   headings whose cells name a point
    y:   heading of the value, and the axis' label
    by:  heading that tells lines apart
    log: axes that are logarithmic
    """

    x: Sequence[str]
    y: tuple[str, str]
    by: str = ""
    log: str = ""


CHARTS: Mapping[str, Chart] = {
    "gelu_five_ways": Chart(["variant", "strategy"], ("time/step", "time/step, µs")),
    "graph_by_kernel_count": Chart(["layers"], ("time/step", "time/step, µs"), "strategy", "xy"),
    "matmul_scaling": Chart(["size"], ("products", "TFLOP/s"), "dtype", "x"),
    "mlp_stacks": Chart(["strategy"], ("time/step", "time/step, µs")),
}


def number(cell: str) -> float | None:
    """A cell's value in its axis' unit: µs, TFLOP/s, or as it stands; None where the cell holds no number."""
    found = re.match(r"([\d.]+) ?(µs|ms|s|[GT]FLOP/s|×|)(?: |$)", cell)
    return float(found[1]) * UNITS[found[2]] if found else None


def cells(page: str) -> list[dict[str, str]]:
    """The rows of a page's first block, by heading."""
    lines = [line for line in blocks(page)[MEASURED].splitlines() if line.startswith("|")]
    heads, _, *rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [dict(zip(heads, row, strict=True)) for row in rows]


def draw(chart: Chart, rows: Sequence[Mapping[str, str]], path: Path) -> None:
    """The picture of a table, as SVG; the same table gives the same bytes."""
    shown = [(row, value) for row in rows if (value := number(row[chart.y[0]])) is not None]
    figure = Figure(figsize=(6.5, 0.9 + 0.32 * len(shown) if not chart.by else 3.6), layout="constrained")
    axes = figure.subplots()
    if chart.by:
        for name in dict.fromkeys(row[chart.by] for row, _ in shown):
            line = [(float(row[chart.x[0]]), value) for row, value in shown if row[chart.by] == name]
            axes.plot(*zip(*line, strict=True), marker="o", label=name)
        axes.set_xlabel(chart.x[0])
        axes.set_ylabel(chart.y[1])
        axes.legend(frameon=False)
    else:
        names = [" · ".join(row[heading] for heading in chart.x) for row, _ in shown]
        bars = axes.barh(names, [value for _, value in shown], color="#3f51b5")
        axes.bar_label(bars, fmt="%.4g", padding=3)
        axes.invert_yaxis()
        axes.set_xlabel(chart.y[1])
    for axis in chart.log:
        getattr(axes, f"set_{axis}scale")("log", base=2 if axis == "x" else 10)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(exist_ok=True)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        figure.savefig(path, metadata={"Date": None})


# --- records -----------------------------------------------------------------------------------------------------


def study(folder: Path) -> tuple[str, Record]:
    """A study's name, and the record of its jobs."""
    jobs_found = [job for job in folders(folder) if (job / ".hydra").is_dir()]
    if not jobs_found:
        sys.exit(f"{folder} holds no record of a job: name a study's folder, as multirun/2026-01-31/12-00-00")
    configs = [OmegaConf.load(job / ".hydra" / "config.yaml") for job in jobs_found]
    steps = [str(OmegaConf.select(config, STEP) or "") for config in configs]
    assert isinstance(configs[0], DictConfig)
    asked = Study.of(configs[0])
    if asked is None:
        sys.exit(f"{folder} is no study: run one by experiments=")
    rows = [jobs.row(job, step=step) for job, step in zip(jobs_found, steps, strict=True)]
    settings = shared([typed(job) for job in jobs_found])
    hydra = OmegaConf.load(jobs_found[0] / ".hydra" / "hydra.yaml")
    name = str(OmegaConf.select(hydra, "hydra.runtime.choices.experiments"))
    return name, Record(
        "study", machine(jobs_found[0], settings), rows, {"study": {**asdict(asked), "steps": {}, "step": None}}
    )


def compared(of: Sequence[Path]) -> Record:
    """A row for each comparison, those of a sweep's folder one after the other."""
    found = [job for folder in of for job in folders(folder) if typed(job)]
    if not found:
        sys.exit(f"{of[0]} holds no record of a comparison")
    commands = [typed(folder) for folder in found]
    settings = shared(commands) if len(found) > 1 else []
    own = [" ".join(word for word in words if word not in settings) for words in commands]
    rows = [jobs.row(folder, words) for folder, words in zip(found, own, strict=True)]
    return Record("comparisons", machine(found[0], settings), rows)


def shown(folder: Path) -> Record:
    """All that the terminal shows of one comparison, for the README."""
    options = {"typed": " ".join(typed(folder))}
    record = Record("terminal", "", [jobs.whole(folder)], options)
    read = Record("terminal", "", [json.loads((folder / "result.json").read_text())], options)
    assert record.text() == read.text(), "the record leaves out what the terminal shows"
    return record


def judged(path: Path) -> Record:
    """Lines of the judge, with what their table shows."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [{key: line[key] for key in kernelbench.KEYS} for line in lines]
    return Record("kernelbench", sentence(lines[0]["versions"]), rows)


def tested(folder: Path) -> Record:
    """Groups of tests whose outcomes are in FOLDER/tests_*.xml, and how each ended in its log."""
    rows = []
    for path in sorted(folder.glob("tests_*.xml")):
        cases = [case for suite in ElementTree.parse(path).getroot() for case in suite if case.tag == "testcase"]
        outcomes = [next((child.tag for child in case if child.tag in OUTCOMES), "passed") for case in cases]
        failed = [case for case, outcome in zip(cases, outcomes, strict=True) if OUTCOMES.get(outcome) == "failed"]
        counts = Counter(OUTCOMES.get(outcome, outcome) for outcome in outcomes)
        rows.append({
            "group": path.stem.removeprefix("tests_"),
            "outcomes": dict(counts),
            "failures": [f"{case.get('classname')}.{case.get('name')}" for case in failed],
            "seconds": sum(float(case.get("time", 0.0)) for case in cases),
            "ended": path.with_suffix(".log").read_text().rstrip().rpartition("\n")[2],
            "commit": commit(),
        })  # fmt: skip
    return Record("groups_of_tests", here("cuda" if torch.cuda.is_available() else "cpu"), rows)


def folders(folder: Path) -> list[Path]:
    """Folders of comparisons, in the order of their numbers: 2 before 10."""
    return sorted((path.parent for path in folder.rglob("result.json")), key=numbered)


def numbered(path: Path) -> list[tuple[int, str]]:
    """Its parts, as numbers where they are."""
    return [(int(part) if part.isdecimal() else 0, part) for part in path.parts]


def typed(folder: Path) -> list[str]:
    """The overrides of a comparison as they were typed; none where the folder is none."""
    path = folder / ".hydra" / "overrides.yaml"
    words = [str(word).removeprefix("++") for word in OmegaConf.load(path)] if path.is_file() else []
    return [word for word in words if word.partition(".")[0] not in UNSAID]


def shared(commands: Sequence[Sequence[str]]) -> list[str]:
    """Settings of the measurement that all commands have: they are said once."""
    return [word for word in commands[0] if word.startswith(SETTINGS) and all(word in words for words in commands)]


def machine(folder: Path, settings: Sequence[str]) -> str:
    """Machine, preset and settings of a comparison."""
    result = Result.read(folder / "result.json")
    preset = f"measurement={result.config.get('measurement')}"
    said = " ".join([preset, *(word for word in settings if word != preset)])
    return f"{sentence(result.environment)} `{said}`."


def commit() -> str:
    told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=PAGES, capture_output=True, text=True)
    return told.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("study", "jobs", "readme", "judged", "tests", "put", "plot"))
    parser.add_argument("what", nargs="*")
    parser.add_argument("--record", type=Path, default=DATA, metavar="FOLDER")
    asked = parser.parse_args()
    paths = [Path(word).resolve() for word in asked.what]
    if asked.command == "plot":
        plot()
        return
    if not paths or (asked.command == "jobs" and len(paths) < 2):
        parser.error(f"{asked.command}: name what to read")
    for name, record in found(asked.command, asked.what, paths):
        print(keep(record, name, asked.record))
    if asked.record == DATA:
        plot()


def found(command: str, words: Sequence[str], paths: Sequence[Path]) -> Iterator[tuple[str, Record]]:
    """Name and record of each block."""
    if command == "study":
        yield from map(study, paths)
    elif command == "jobs":
        yield words[0], compared(paths[1:])
    elif command == "put":
        elsewhere = [path for path in paths if path.parent != DATA]
        for picture in {found for path in elsewhere for found in (path.parents[1] / "plots").glob("*.svg")}:
            shutil.copy(picture, PAGES / "plots")
        yield from ((path.name.removesuffix(".json"), Record.read(path)) for path in paths)
    else:
        name, read = SINGLE[command]
        yield name, read(paths[0])


SINGLE: Mapping[str, tuple[str, Callable[[Path], Record]]] = {
    "readme": ("README", shown), "judged": ("kernelbench", judged), "tests": ("gpu_tests", tested),
}  # fmt: skip


def plot() -> None:
    for name, chart in CHARTS.items():
        draw(chart, cells((PAGES / f"{name}.md").read_text()), PAGES / "plots" / f"{name}.svg")


if __name__ == "__main__":
    main()
