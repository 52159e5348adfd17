"""The report's section on compilers: counts of each arm, graph breaks, recompilations, and the kernels' resources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optexp.records.compiler import CompiledGraph, CompilerEvidence, KernelResources
from optexp.records.profile import ArmProfile
from optexp.reporting.compiler_words import broken, counted, recompiled
from optexp.result import Result

MOST_GRAPHS = 24  # rows
MOST_KERNELS = 30


@dataclass(frozen=True)
class CompilerArm:
    """One arm.

    totals:   of all graphs, by heading; None where a graph does not tell
    breaks, recompiles, skips: sentences
    command:  that opens the structured log
    """

    graphs: list[CompiledGraph]
    more: int
    totals: Mapping[str, float | None]
    breaks: list[str]
    recompiles: list[str]
    skips: list[str]
    kernels: list[KernelResources]
    command: str


@dataclass(frozen=True)
class CompilerSection:
    """measured: figures of a step, each with one value by arm;  page: whether `compiler.html` exists"""

    arms: Mapping[str, CompilerArm]
    measured: Mapping[str, Mapping[str, float]]
    page: bool


FIGURES = {
    "operators captured": "captured_ops",
    "ATen operators": "aten_ops",
    "IR nodes before fusion": "ir_before",
    "IR nodes after fusion": "ir_after",
    "generated kernels": "kernels",
    "library calls": "library_calls",
    "bytes, unfused (estimate)": "bytes_unfused",
    "bytes, fused (estimate)": "bytes_after",
}
MEASURED = {"kernels": "kernels a step", "launches": "launches a step", "ops": "operator calls a step"}


def compiler_section(result: Result) -> CompilerSection | None:
    """None where nothing was compiled and no kernel's resources are known."""
    arms = result.profile.arms()
    known = {name: _arm(found.compiler) for name, found in arms.items() if found.compiler}
    if not known:
        return None
    graphs = any(arm.graphs for arm in known.values())
    return CompilerSection(known, _measured(arms) if graphs else {}, graphs)


def _arm(found: CompilerEvidence) -> CompilerArm:
    return CompilerArm(
        found.graphs[:MOST_GRAPHS],
        len(found.graphs) - MOST_GRAPHS,
        totals(found.graphs),
        [broken(each) + (f": {each.code}" if each.code else "") for each in found.breaks],
        [f"{recompiled(each)}: {', '.join(each.guards[:3])}" for each in found.recompiles],
        [f"{counted(each.graphs, 'graph')}: {each.reason}" for each in found.skips],
        found.kernels[:MOST_KERNELS],
        f"tlparse {found.log}/*.log" if found.log and found.graphs else "",
    )


def totals(graphs: list[CompiledGraph]) -> dict[str, float | None]:
    """Sums over graphs; None where one of them does not tell."""
    values = {title: [getattr(graph, name) for graph in graphs] for title, name in FIGURES.items()}
    return {title: None if not each or None in each else sum(each) for title, each in values.items()}


def _measured(arms: Mapping[str, ArmProfile]) -> dict[str, dict[str, float]]:
    rows = {
        title: {name: found.metrics[metric] for name, found in arms.items() if metric in found.metrics}
        for metric, title in MEASURED.items()
    }
    return {title: values for title, values in rows.items() if values}
