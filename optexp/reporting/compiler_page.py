"""compiler.html: each graph from capture to generated code, stage beside stage. One file, no network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from optexp.records import filenames
from optexp.records.compiler import CompiledGraph
from optexp.reporting.compiler_section import FIGURES
from optexp.reporting.report import templates
from optexp.result import Result

MOST_GRAPHS = 40  # of an arm that are shown; the others are files
MOST_TEXT = 150_000  # characters of a stage
TITLES = {
    "captured": "FX graph as captured",
    "transformed": "FX graph as transformed",
    "ir_before": "IR before fusion",
    "ir_after": "IR after fusion",
    "generated": "Generated code",
}


@dataclass(frozen=True)
class Stage:
    """title, the text, and the file that holds it whole"""

    title: str
    text: str
    file: str
    cut: bool


@dataclass(frozen=True)
class Shown:
    """A graph with its stages and figures by title."""

    graph: CompiledGraph
    stages: list[Stage]
    figures: dict[str, float]


def write(result: Result, folder: Path) -> None:
    """Write the page where an arm has compiled graphs; its texts are read from the files beside the record."""
    arms = {
        name: [_shown(graph, folder) for graph in found.compiler.graphs[:MOST_GRAPHS]]
        for name, found in result.profile.arms().items()
        if found.compiler and found.compiler.graphs
    }
    if arms:
        page = templates().get_template("compiler.html.j2")
        (folder / filenames.COMPILER_PAGE).write_text(page.render(result=result, arms=arms, most=MOST_TEXT))


def _shown(graph: CompiledGraph, folder: Path) -> Shown:
    stages = []
    for stage, title in TITLES.items():
        file = graph.files.get(stage, "")
        text = (folder / file).read_text(errors="replace") if file and (folder / file).is_file() else ""
        stages.append(Stage(title, text[:MOST_TEXT], file, len(text) > MOST_TEXT))
    figures = {title: value for title, name in FIGURES.items() if (value := getattr(graph, name)) is not None}
    return Shown(graph, stages, figures)
