"""Result pages: tables from records, pictures from tables.

    python tests/benchmarks/results.py study FOLDER ...      studies (multirun/...) into the pages of their names
    python tests/benchmarks/results.py jobs PAGE FOLDER ...  comparisons (outputs/...) into a page, a row for each
    python tests/benchmarks/results.py plot                  the pictures, from the tables that the pages hold

A page holds machine and table between two marks; the text around them stays.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf

from optexp.result import Result
from optexp.support.units import at_least, microseconds, ratio
from optexp.sweeps.study import STEP, Study, completed, points
from optexp.sweeps.study_table import table

PAGES = Path(__file__).parents[2] / "experiments" / "results"
MARKS = ("<!-- measured -->", "<!-- /measured -->")
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
    """The rows between a page's marks, by heading."""
    lines = [line for line in page.partition(MARKS[0])[2].partition(MARKS[1])[0].splitlines() if line.startswith("|")]
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


def provenance(result: Result) -> str:
    """Machine, versions and command of a record, in one sentence."""
    facts = result.environment
    device = facts.get("gpu") or facts.get("cpu") or result.device
    versions = (f"{name} {facts[name]}" for name in ("python", "torch", "triton") if facts.get(name))
    driver = f"driver {facts.get('driver') or 'not recorded'}" if facts.get("gpu") else ""
    return f"{'; '.join(filter(None, (str(device), driver, ', '.join(versions))))}."


def block(heads: Sequence[str], rows: Sequence[Sequence[str]], result: Result) -> str:
    """Machine and table, as they stand between the marks."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (heads, *rows)]
    lines.insert(1, "|" + "---|" * len(heads))
    return "\n".join([f"**Machine.** {provenance(result)}", "", *lines])


def compared(folders: Sequence[Path]) -> str:
    """A row for each comparison: command, both times, the interval, and how many processes it rests on."""
    found = [(folder, Result.read(folder / "result.json")) for folder in folders]
    heads = ["command", "verdict", "baseline", "candidate", "at least", "estimate", "interval", "processes"]
    rows = []
    for folder, result in found:
        overrides = OmegaConf.load(folder / ".hydra" / "overrides.yaml")
        typed = " ".join(str(word).removeprefix("++") for word in overrides)
        times = [microseconds(arm.step_us) if arm.step_us else "" for arm in (result.baseline, result.candidate)]
        cells = [f"`{typed}`", str(result.verdict), *times]
        if speedup := result.speedup:
            interval = f"{speedup.low:.3g} to {speedup.high:.3g}"
            cells += [f"{at_least(speedup.low)}×", ratio(speedup.estimate), interval, str(speedup.processes)]
        rows.append([*cells, *[""] * (len(heads) - len(cells))])
    return block(heads, rows, found[0][1])


def measured(folder: Path) -> tuple[str, str]:
    """A study's name, and its table with provenance, from the records of its jobs."""
    jobs = sorted(path.parent for path in folder.rglob("result.json") if (path.parent / ".hydra").is_dir())
    if not jobs:
        sys.exit(f"{folder} holds no record of a job: name a study's folder, as multirun/2026-01-31/12-00-00")
    configs = [OmegaConf.load(job / ".hydra" / "config.yaml") for job in jobs]
    steps = [str(OmegaConf.select(config, STEP) or "") for config in configs]
    finished = list(zip(map(Result.read, (job / "result.json" for job in jobs)), steps, strict=True))
    assert isinstance(configs[0], DictConfig)
    study = Study.of(configs[0])
    if study is None:
        sys.exit(f"{folder} is no study: run one by experiments=")
    study = completed(study, finished)
    heads, rows = table(study, points(study, finished))
    hydra = OmegaConf.load(jobs[0] / ".hydra" / "hydra.yaml")
    name = str(OmegaConf.select(hydra, "hydra.runtime.choices.experiments"))
    return name, block(heads, rows, finished[0][0])


def put(page: str, content: str) -> str:
    """A page with other content between its marks."""
    before, _, rest = page.partition(MARKS[0])
    return f"{before}{MARKS[0]}\n{content}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def write(name: str, content: str) -> None:
    """Into a page that may be new."""
    path = PAGES / f"{name}.md"
    page = path.read_text() if path.exists() else f"# {name}\n\n{MARKS[0]}\n{MARKS[1]}\n"
    path.write_text(put(page, content))
    print(path)


def main() -> None:
    command, *rest = sys.argv[1:] or ["help"]
    if command == "study" and rest:
        for name, content in map(measured, map(Path, rest)):
            write(name, content)
    elif command == "jobs" and len(rest) > 1:
        write(rest[0], compared([Path(folder) for folder in rest[1:]]))
    elif command != "plot":
        sys.exit(__doc__)
    for name, chart in CHARTS.items():
        draw(chart, cells((PAGES / f"{name}.md").read_text()), PAGES / "plots" / f"{name}.svg")


if __name__ == "__main__":
    main()
