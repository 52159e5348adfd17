"""Output of Nsight Compute (`ncu --csv --page details`) and Nsight Systems (`nsys stats --format csv`) as tables."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from optexp.records.nsight import Advice, ToolKernel, ToolRow, ToolTable
from optexp.trace import short_name

Row = Mapping[str, str]

_US = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6}
_PERCENT = {  # names of metrics in "%", by field of a row
    "Compute (SM) Throughput": "sm_percent",
    "Memory Throughput": "memory_percent",
    "Achieved Occupancy": "occupancy_percent",
    "Theoretical Occupancy": "theoretical_occupancy_percent",
}
_ADVICE = {"OPT", "WRN"}  # types of rules that advise; others repeat measurements
SYSTEM_REPORTS = {
    "cuda_gpu_kern_sum": "Kernels",
    "cuda_gpu_mem_time_sum": "Copies",
    "cuda_api_sum": "CUDA API",
    "nvtx_sum": "NVTX ranges",
}


def rows(text: str, first: str) -> list[Row]:
    """Lines of a CSV table after its header, which begins with the column `first`; the tool's messages are skipped.

    Empty where there is no such header.
    """
    lines = text.splitlines(keepends=True)  # a cell may hold several
    start = next((i for i, line in enumerate(lines) if line.lstrip('"').startswith(first)), None)
    if start is None:
        return []
    table = csv.DictReader(lines[start:], restval="", strict=False)  # rows of metrics end before the columns of rules
    return [row for row in table if any(list(row.values())[1:])]


# --- Nsight Compute ----------------------------------------------------------------------------------------------


@dataclass
class _Launches:
    """Values of every launch of one kernel with one configuration."""

    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    ids: set[tuple[str, str]] = field(default_factory=set)


def kernels(text: str) -> list[ToolKernel]:
    """One row for each kernel and configuration, those with most time first.

    Args:
        text: Of `ncu --csv --page details`, with any units.
    """
    found = defaultdict[tuple[str, str, str], _Launches](_Launches)
    for row in rows(text, "ID"):
        launches = found[row["Kernel Name"], row.get("Grid Size", ""), row.get("Block Size", "")]
        launches.ids.add((row["ID"], row.get("Process ID", "")))
        name, unit, value = row["Metric Name"], row["Metric Unit"], _number(row["Metric Value"])
        if value is None:
            continue
        if name == "Duration" and unit in _US:
            launches.values["us"].append(value * _US[unit])
        elif name in _PERCENT and unit == "%":
            launches.values[_PERCENT[name]].append(value)
        elif name == "Registers Per Thread":
            launches.values["registers"].append(value)
    table = [_kernel(*key, launches) for key, launches in found.items()]
    return sorted(table, key=lambda row: -(row.us or 0.0) * row.launches)


def _kernel(name: str, grid: str, block: str, launches: _Launches) -> ToolKernel:
    means = {key: sum(values) / len(values) for key, values in launches.values.items()}
    registers = means.pop("registers", None)
    return ToolKernel(
        short_name(name),
        len(launches.ids),
        _size(grid),
        _size(block),
        registers=None if registers is None else round(registers),
        **means,
    )


def advice(text: str) -> list[Advice]:
    """Findings of the rules, one for each kernel and rule, those with the largest estimated speedup first."""
    found: dict[tuple[str, str], Advice] = {}
    for row in rows(text, "ID"):
        if row.get("Rule Type") not in _ADVICE:
            continue
        kernel, rule = short_name(row["Kernel Name"]), row["Rule Name"]
        speedup = _number(row.get("Estimated Speedup", ""))
        known = found.get((kernel, rule))
        if known is None or (speedup or 0.0) > (known.speedup_percent or 0.0):
            found[kernel, rule] = Advice(kernel, rule, " ".join(row["Rule Description"].split()), speedup)
    return sorted(found.values(), key=lambda finding: -(finding.speedup_percent or 0.0))


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _size(text: str) -> str:
    """ "(256, 1, 1)" as "256×1×1"."""
    return "×".join(re.findall(r"\d+", text))


# --- Nsight Systems ----------------------------------------------------------------------------------------------


def summary(title: str, text: str) -> ToolTable:
    """A summary of Nsight Systems; its rows keep their order, which is by time.

    Args:
        text: Of `nsys stats --format csv --report X`, with times in nanoseconds.
    """
    table = [_summed(row) for row in rows(text, "Time (%)")]
    return ToolTable(title, [row for row in table if row is not None])


def _summed(row: Row) -> ToolRow | None:
    name = _first(row, ("Name", "Range", "Operation"))
    calls = _number(_first(row, ("Instances", "Num Calls", "Count")))
    share, total = _number(row["Time (%)"]), _number(row.get("Total Time (ns)", ""))
    if calls is None or share is None:
        return None
    middle = _number(row.get("Med (ns)", ""))
    shown = name if name.startswith(":") else short_name(name)
    return ToolRow(
        shown.removeprefix(":"),
        int(calls),
        share / 100,
        None if total is None else total / 1e3,
        None if middle is None else middle / 1e3,
    )


def _first(row: Row, columns: Iterable[str]) -> str:
    return next((row[column] for column in columns if row.get(column)), "")


# --- why there is nothing ----------------------------------------------------------------------------------------


def refusal(output: str) -> str:
    """The tool's own reason for measuring nothing; empty where its output has no error."""
    if "ERR_NVGPUCTRPERM" in output:
        return "the driver lets only administrators read the performance counters (ERR_NVGPUCTRPERM)"
    errors = re.findall(r"==ERROR==\s*(.+)", output)
    return _sentence(errors) if errors else ""


def _sentence(lines: Sequence[str]) -> str:
    return lines[0].strip().rstrip(".")
