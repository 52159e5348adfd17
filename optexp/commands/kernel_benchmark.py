"""Our kernels beside everything they must beat, in one run: `python -m optexp.benchmark --kernels gelu,softmax`.

Each call is recorded in a CUDA graph, so that what is timed is the device; blocks of all candidates take turns.
Cold: each call reads inputs that have left L2, and writes memory of its own, as the copies do. Warm: the same inputs
again and again, where L2 can hold some of them.
The lower bound is the faster of two copies of the same bytes, by the copy engine and by a kernel; for GEMMs the bare
GEMM. Backward = time(forward + backward) − time(forward under no_grad); writes that forward does only for backward are
charged to backward. All forward passes come first: behind its own forward pass, a backward pass would find in L2 what
that read last. GEMMs are timed in both passes together, because candidates save different tensors for backward. The
report ends with the goals that are missed: the lower bound, or a faster alternative.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from shutil import copy

import torch

from optexp.comparison import gpu_lock
from optexp.kernelkit import assembly, extension
from optexp.kernelkit.benchmark.measure import COMPILED, Settings, measure, sweep
from optexp.kernelkit.benchmark.race import host_bound_cases, host_cost
from optexp.kernelkit.benchmark.report import draw, line
from optexp.kernelkit.benchmark.rows import HostCost, Row
from optexp.kernelkit.kernel import Kernel, kernels
from optexp.pages.blocks import keep
from optexp.pages.machine import here
from optexp.pages.record import Record
from optexp.profiling.calibration import calibrate
from optexp.records.profile import Calibration


def main(arguments: Sequence[str] | None = None) -> None:
    """Time the chosen kernels, and write table, data and plots.

    Raises:
        SystemExit: The arguments are wrong, or there is no CUDA device.
    """
    options = parse(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("the kernels are timed on a CUDA device, and none was found: run this on a machine with an NVIDIA GPU")
    with gpu_lock.locked(options.device, gpu_lock.announced):
        _time(options, device)


def _time(options: argparse.Namespace, device: torch.device) -> None:
    chosen = [kernels()[name] for name in options.kernels]
    build(chosen, device)
    settings = Settings(options.compile, options.dtype.split(","), options.shapes, options.forward, options.quick)
    rows = []
    for row in measure(chosen, device, settings):
        print(line(row), flush=True)
        rows.append(row)
    ceilings = calibrate(device)
    costs = [host_cost(kernel, case, device) for kernel in chosen for case in host_bound_cases(kernel, device)]
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "kernels.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    plots = []
    if options.plots:
        for kernel in chosen:
            plots.append(options.output / f"kernels-{kernel.name}.svg")
            draw(kernel, sweep(kernel, device), ceilings, plots[-1])
    record = as_record(rows, costs, ceilings, [plot.stem for plot in plots], options.device)
    (options.output / "kernels.md").write_text(text := record.text())
    if options.code:
        assembly.write(options.output / "code")
    if options.record:
        for plot in plots:
            copy(plot, folder_of(options.record.parent / "plots"))
        keep(record, "kernels", options.record)
    missed = [goal for row in rows for goal in row.missed()] + [call for cost in costs for call in cost.slow()]
    print(f"\n{text}\nwritten to {options.output}\n\n{len(missed)} goals missed", *missed, sep="\n")


def as_record(
    rows: Sequence[Row], costs: Sequence[HostCost], ceilings: Calibration, plots: Sequence[str], device: str
) -> Record:
    """The record of the result page."""
    held = [{**asdict(row), "us": {name: rounded(us) for name, us in row.us.items()}} for row in rows]
    options = {"costs": [asdict(cost) for cost in costs], "ceilings": asdict(ceilings), "plots": list(plots)}
    return Record("kernels", here(device), held, {**options, "torch": torch.__version__})


def rounded(us: float | None) -> float | None:
    """A time with five digits, of which tables show three."""
    return None if us is None else float(f"{us:.5g}")


def folder_of(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options; SystemExit where one is wrong."""
    known = sorted(kernels())

    def names(text: str) -> list[str]:
        if unknown := set(text.split(",")) - set(known):
            raise argparse.ArgumentTypeError(f"no kernel {', '.join(unknown)}; there are {', '.join(known)}")
        return text.split(",")

    parser = argparse.ArgumentParser(prog="python -m optexp.benchmark", description=__doc__.split("\n\n")[0])
    parser.add_argument("--kernels", type=names, default=known, help=f"of {','.join(known)}")
    parser.add_argument("--shapes", help="only shapes whose name contains this")
    parser.add_argument("--dtype", default="float32,bfloat16", help="of float32, bfloat16, float16")
    parser.add_argument("--compile", choices=COMPILED, default="default", help="what of torch.compile to time")
    parser.add_argument("--forward", action="store_true", help="leave backward out")
    parser.add_argument("--quick", action="store_true", help="three short rounds instead of nine")
    parser.add_argument("--plots", action="store_true", help="also over size, as pictures")
    parser.add_argument("--code", action="store_true", help="also keep PTX, machine code, registers and spills")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, default=Path("outputs/kernels"), help="folder for table, data, plots")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="folder for the record of the result page")
    return parser.parse_args(arguments)


def build(chosen: Sequence[Kernel], device: torch.device) -> None:
    """Compile all CUDA C++ of these kernels in parallel; a source that fails here fails again when it is called."""
    if device.type != "cuda" or extension.why_not(device) is not None:
        return
    sources = {source for kernel in chosen for source in kernel.sources}
    usable = [source for source in sources if source.needs is None or source.needs.met_by(device)]
    index = torch.cuda.current_device() if device.index is None else device.index
    with ThreadPoolExecutor(max(1, len(usable))) as pool:
        for source in usable:
            pool.submit(extension.library, source, index)
