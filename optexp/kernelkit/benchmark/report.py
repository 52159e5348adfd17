"""The kernel benchmark's report: lines for the terminal, tables in Markdown, plots over size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from optexp.kernelkit.benchmark.calls import bytes_of
from optexp.kernelkit.benchmark.rows import COLUMNS, HostCost, Row, shown
from optexp.kernelkit.kernel import Kernel
from optexp.records.profile import Calibration


def line(row: Row) -> str:
    """One row, for the terminal."""
    times = ", ".join(f"{shown(name)} {us:.4g}" for name, us in row.us.items() if us is not None)
    goal = f" (goal {row.goal})" if row.goal else ""
    ours, others = row.us.get("ours"), {name: row.us.get(name) for name in ("lower_bound", "eager", "plain")}
    ratios = ", ".join(f"{ours / us:.3f} {shown(name)}" for name, us in others.items() if ours and us)
    return f"{row.name}: {times} µs; ours {ratios}{goal}"


def report(rows: Sequence[Row], costs: Sequence[HostCost], ceilings: Calibration, version: str) -> str:
    """The tables of device and host times, as Markdown. version: of torch"""
    columns = [name for name in COLUMNS if any(row.us.get(name) is not None for row in rows)]
    head = ["kernel, shape, dtype", "pass", "L2", *map(shown, columns), "ours / lower bound", "goal", "GB/s"]
    body = [
        [
            f"{row.kernel} {row.shape}, {row.dtype}",
            row.direction,
            row.cache,
            *(_number(row.us.get(name)) for name in columns),
            f"{row.ratio:.3f}" if row.ratio else "",
            str(row.goal or ""),
            f"{row.rate:.0f}" if row.rate else "",
        ]
        for row in rows
    ]
    rate = f"{ceilings.bandwidth / 1e12:.2f} TB/s copied, " + ", ".join(
        f"{flops / 1e12:.0f} TFLOP/s in {dtype}" for dtype, flops in ceilings.matrix.items()
    )
    text = f"{ceilings.device}, torch {version}; measured ceilings: {rate}. µs a call, medians, one run.\n\n"
    text += table(head, body)
    if costs:
        lines = [[f"{cost.kernel} {cost.shape}", *(f"{us:.1f}" for us in cost.by_column().values())] for cost in costs]
        text += "\nCalls one after the other from Python, float32: µs of wall time each.\n\n"
        text += table(["kernel, shape", *costs[0].by_column()], lines)
    return text


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *body)]
    return "\n".join(lines) + "\n"


def _number(us: float | None) -> str:
    return "" if us is None else f"{us:.3g}" if us < 1000 else f"{us:.0f}"


def draw(kernel: Kernel, rows: Sequence[Row], ceilings: Calibration, path: Path) -> None:
    """Plot rates over size, as an SVG: GB/s beside the measured copy rate, or TFLOP/s of a GEMM.

    rows:  of `measure.sweep`, whose shapes are sizes
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    is_gemm = kernel.lower_bound is not None
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.subplots()
    for index, name in enumerate(("eager", "best_library", "cuda", "ours", "lower_bound")):
        times = {int(row.shape): us for row in rows if (us := row.us.get(name))}
        if times:
            bound = "bare GEMM" if is_gemm else "copy"
            label = bound if name == "lower_bound" else shown(name)
            rates = [_work(kernel, size) / us * 1e6 for size, us in times.items()]
            axes.plot(list(times), rates, color=f"C{index}", marker="o", markersize=3, label=label)
    ceiling = ceilings.matrix.get("bfloat16", 0.0) / 1e12 if is_gemm else ceilings.bandwidth / 1e9
    axes.axhline(ceiling, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("elements of the input, bfloat16, cold")
    axes.set_ylabel("TFLOP/s" if is_gemm else "GB/s, read and written")
    axes.set_title(f"{kernel.name} on {ceilings.device}; dashed: the measured ceiling", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": kernel.name}):  # the same from the same numbers
        figure.savefig(path, metadata={"Date": None})


def _work(kernel: Kernel, size: int) -> float:
    """The work of one call: GB moved, or 10¹² operations of a GEMM."""
    fakes = kernel.sweep(partial(torch.empty, device="meta", dtype=torch.bfloat16), size)
    result = kernel.reference(*fakes)
    if kernel.lower_bound is None:
        return (bytes_of(fakes) + result.nbytes) / 1e9
    return 2 * result.numel() * int(fakes[0].shape[-1]) / 1e12
