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
import math
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from optexp.kernelkit import assembly, extension
from optexp.kernelkit.kernel import Case, Kernel, ceil_div, kernels
from optexp.kernelkit.recording import recorded, rehearsal
from optexp.measurement import clock
from optexp.profiling.calibration import calibrate
from optexp.records.profile import Calibration

Call = Callable[[], Any]

COMPILED = {"none": (), "default": ("default",), "all": ("default", "max-autotune-no-cudagraphs")}
COLUMNS = ("lower_bound", "eager", "compile", "max-autotune", "best_library", "plain", "cuda", "ours")
OTHERS = ("eager", "compile", "max-autotune", "best_library")  # none of which may be faster than ours
BACKWARD = 1.10  # times the lower bound, where that is memory
NOISE = 1.02  # two medians of the same call differ by so much, and by a tenth of a µs
COPIES = ("copy engine", "copy kernel")
ALIGNED = 512  # bytes, as the allocator's: what is not divisible is copied more slowly
MARKS = ("<!-- kernels: begin -->", "<!-- kernels: end -->")


def shown(column: str) -> str:
    """The name of a column as readers see it."""
    return column.replace("_", " ")


@dataclass
class Row:
    """One line of the table.

    us:     µs of a call by candidate; None where it failed or does not exist
    moved:  bytes that had to be read and written; None for GEMMs, which memory does not bound
    goal:   most of ours, in lower bounds; None: no more than the others
    """

    kernel: str
    shape: str
    dtype: str
    direction: str
    cache: str
    moved: int | None
    us: dict[str, float | None] = field(default_factory=dict)
    goal: float | None = None

    @property
    def ratio(self) -> float | None:
        """Ours in lower bounds."""
        ours, bound = self.us.get("ours"), self.us.get("lower_bound")
        return ours / bound if ours and bound else None

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.shape} {self.dtype} {self.direction} {self.cache}"

    def missed(self) -> list[str]:
        """Which goals, in words."""
        ours = self.us.get("ours")
        if ours is None:
            return [f"{self.name}: ours has no figure"]
        found = []
        if self.ratio and self.goal and self.ratio > self.goal:
            found.append(f"{self.name}: {self.ratio:.3f} times the lower bound, and the goal is {self.goal}")
        other, best = min(
            ((n, us) for n in OTHERS if (us := self.us.get(n))), key=lambda pair: pair[1], default=("", 0.0)
        )
        if other and ours > NOISE * best + 0.1:
            found.append(f"{self.name}: {ours / best:.2f} times {shown(other)}")
        cuda, eager = self.us.get("cuda"), self.us.get("eager")
        if cuda and eager and cuda > NOISE * eager + 0.1:
            found.append(f"{self.name}: the one in CUDA C++ {cuda / eager:.2f} times eager")
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("the kernels are timed on a CUDA device, and none was found: run this on a machine with an NVIDIA GPU")
    chosen = [kernels()[name] for name in options.kernels]
    build(chosen, device)
    rows = []
    for row in measure(chosen, device, options):
        print(line(row), flush=True)
        rows.append(row)
    ceilings = calibrate(device)
    overheads = [overhead(k, c, device) for k in chosen for c in by_hand(k, device)]
    text = report(rows, overheads, ceilings)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "kernels.md").write_text(text)
    (options.output / "kernels.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    plots = []
    if options.plots:
        for kernel in chosen:
            plots.append(options.output / f"kernels-{kernel.name}.svg")
            draw(kernel, sweep(kernel, device), ceilings, plots[-1])
    if options.code:
        assembly.write(options.output / "code")
    if options.into:
        put_into(options.into, text, plots)
    missed = [line for row in rows for line in row.missed()] + slow(overheads)
    print(f"\n{text}\nwritten to {options.output}\n\n{len(missed)} goals missed", *missed, sep="\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
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
    parser.add_argument(
        "--into", type=Path, help=f"Markdown file whose text between {MARKS[0]} and {MARKS[1]} to replace"
    )
    return parser.parse_args(arguments)


# --- measuring ---------------------------------------------------------------------------------------------------


def measure(chosen: Sequence[Kernel], device: torch.device, options: argparse.Namespace) -> Iterator[Row]:
    """Rows in the order of the table, as they are found."""
    for kernel in chosen:
        for case in kernel.benchmarks:
            if options.shapes and options.shapes not in case.name:
                continue
            for name in options.dtype.split(","):
                for cache in ("cold", "warm"):
                    yield from rows_of(kernel, case, name, cache, device, options)
                torch._dynamo.reset()  # the next shape is not to be compiled as one that changes
                if device.type == "cuda":
                    torch.cuda.empty_cache()


def rows_of(
    kernel: Kernel, case: Case, dtype: str, cache: str, device: torch.device, options: argparse.Namespace
) -> Iterator[Row]:
    """Forward, and backward where something is differentiated."""
    sets = copies(case, getattr(torch, dtype), device, cold=cache == "cold")
    if cache == "warm" and outgrows(sets[0], device):
        return  # it was cold already
    candidates = functions(kernel, COMPILED[options.compile])
    timing = (3, 1e-3) if options.quick else (9, 3e-3)
    with torch.no_grad():
        arriving = torch.randn_like(kernel.reference(*sets[0]))
        calls = {name: forward_passes(f, sets) for name, f in candidates.items()}
        moved = None if kernel.lower_bound else bytes_of(sets[0]) + arriving.nbytes
        calls |= copying(moved, device, len(sets))
        if kernel.plain is not None:
            calls["plain"] = forward_passes(kernel.plain, sets)
        forward = lowest(race(calls, device, *timing))
    yield Row(kernel.name, case.name, dtype, "forward", cache, moved, forward, case.goal)
    begin, end = differentiated(kernel.reference, sets[0], arriving)
    begin()
    if options.forward or all(grad is None or grad.data_ptr() == arriving.data_ptr() for grad in end()):
        return  # what arrives is passed on as it is
    kept = 2 * kernel.saved_bytes(*sets[0]) if kernel.saved_bytes is not None else 0  # written, too
    once = (kept or bytes_of(sets[0])) + bytes_of(sets[0]) + arriving.nbytes  # for gradients, these, and what arrives
    if cache == "warm":  # as often as takes the device longer than the host
        sets *= max(4, min(64, 2**28 // once))
    dys = [arriving if cache == "warm" else torch.randn_like(arriving) for _ in sets]
    both = {name: passes(f, sets, dys, apart=cache == "cold") for name, f in candidates.items()}
    if kernel.lower_bound is not None:
        times = {name: us and 2 * us for name, us in race(both, device, *timing).items()}
        yield Row(kernel.name, case.name, dtype, "both passes", cache, None, times)
        return
    # Forward again, beside both: of a difference, each part is to meet the same card, and warm there are more sets now.
    first = {f"{name}, forward": forward_passes(f, sets) for name, f in candidates.items()}
    bounds = copying(once, device, 1 if cache == "warm" else len(sets))
    found = race(both | first | bounds, device, *timing)
    backward = {name: _second(found[name], found[f"{name}, forward"]) for name in both}
    backward |= lowest({name: found[name] for name in bounds})
    goal = BACKWARD if once > 2**25 else None  # what is smaller costs launches
    yield Row(kernel.name, case.name, dtype, "backward", cache, once, backward, goal)


def _second(each: float | None, first: float | None) -> float | None:
    """Of two passes, from what each takes on average, and the first; None, too, where scatter left nothing."""
    return None if each is None or first is None or 2 * each <= first else 2 * each - first


def functions(kernel: Kernel, modes: Sequence[str]) -> dict[str, Callable[..., Tensor]]:
    """What is timed, by the name of its column."""
    found: dict[str, Callable[..., Tensor]] = {"eager": kernel.reference}
    for mode in modes:
        compiled = torch.compile(kernel.reference, mode=mode, dynamic=False)
        found["compile" if mode == "default" else "max-autotune"] = compiled
    if kernel.best_library is not None:
        found["best_library"] = kernel.best_library
    if kernel.lower_bound is not None:
        found["lower_bound"] = kernel.lower_bound
    if kernel.cuda is not None:
        found["cuda"] = kernel.cuda
    return {**found, "ours": kernel.function}


def copies(case: Case, dtype: torch.dtype, device: torch.device, cold: bool) -> list[tuple[Any, ...]]:
    """The case's arguments: once, or as often as it takes until the first have left L2 when their turn comes again."""
    generator = torch.Generator(device).manual_seed(0)

    def fill(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    first = case.arguments(fill)
    if not cold or device.type != "cuda":
        return [first]
    count = max(2, math.ceil(enough(device) / bytes_of(first)))
    return [first, *(case.arguments(fill) for _ in range(min(count, 64) - 1))]


def enough(device: torch.device) -> int:
    """Bytes after which nothing of what came before is left in L2."""
    return 4 * int(torch.cuda.get_device_properties(device).L2_cache_size)


def outgrows(args: Sequence[Any], device: torch.device) -> bool:
    return device.type == "cuda" and bytes_of(args) >= enough(device)


def copying(moved: int | None, device: torch.device, count: int = 1) -> dict[str, list[Call]]:
    """Copies that read and write this many bytes, each of memory of its own, by the engine and by a kernel: at some
    sizes one takes half as long again as the other."""
    if moved is None:
        return {}
    numbers = ceil_div(moved, 2 * ALIGNED) * ALIGNED // 4
    sources = [torch.empty(numbers, dtype=torch.int32, device=device).random_() for _ in range(count)]
    return {
        COPIES[0]: [partial(torch.empty_like(source).copy_, source) for source in sources],
        COPIES[1]: [partial(torch.neg, source, out=torch.empty_like(source)) for source in sources],
    }


def lowest(times: dict[str, float | None]) -> dict[str, float | None]:
    """The times with the faster of both copies as the lower bound."""
    bounds = [us for name in COPIES if (us := times.pop(name, None))]
    return times | ({"lower_bound": min(bounds)} if bounds else {})


def bytes_of(args: Sequence[Any]) -> int:
    return sum(arg.nbytes for arg in args if isinstance(arg, Tensor))


def forward_passes(function: Callable[..., Tensor], sets: Sequence[Sequence[Any]]) -> list[Call]:
    """Without gradients; each result has memory of its own."""
    return [torch.no_grad()(partial(keep, [], partial(function, *args))) for args in sets]


def passes(
    function: Callable[..., Tensor], sets: Sequence[Sequence[Any]], dys: Sequence[Tensor], apart: bool = False
) -> list[Call]:
    """All forward passes, and then all backward passes; apart: their gradients have memory of their own, too."""
    pairs = [differentiated(function, args, dy) for args, dy in zip(sets, dys, strict=True)]
    return [begin for begin, _ in pairs] + [partial(keep, [], end) if apart else end for _, end in pairs]


def keep(kept: list[Any], call: Call) -> Any:
    """What it returns, until it is called again."""
    kept.clear()  # before: through an older result leaves would remember its stream, which breaks a capture
    kept.append(call())
    return kept[0]


def differentiated(function: Callable[..., Tensor], args: Sequence[Any], dy: Tensor) -> tuple[Call, Call]:
    """The forward pass, and the backward pass that must follow it, with the gradients of all tensors."""
    leaves = [arg.detach().requires_grad_() if isinstance(arg, Tensor) else arg for arg in args]
    wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    made: list[Tensor] = []

    def end() -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(made.pop(), wanted, dy, allow_unused=True)

    return partial(keep, made, partial(function, *leaves)), end


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


def race(
    calls: dict[str, list[Call]], device: torch.device, rounds: int, block_s: float = 3e-3
) -> dict[str, float | None]:
    """µs of a call by candidate, the median over rounds in which all take turns; None for one that fails.

    What takes ten times a block is timed once.
    """
    ready: dict[str, tuple[Call, int, int]] = {}
    found: dict[str, float | None] = dict.fromkeys(calls)
    for name, every in calls.items():
        try:
            ready[name] = prepare(every, device, block_s)
        except (RuntimeError, ValueError, TritonError) as error:
            print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
    samples: dict[str, list[float]] = {name: [] for name in ready}
    order, shuffle = list(ready), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)  # after a long GEMM the card is hotter
        for name in order:
            work, count, steps = ready[name]
            if steps == 1 and samples[name]:
                continue
            samples[name].append(clock.device_step_s(work, steps, device) / count * 1e6)
    return found | {name: median(values) for name, values in samples.items()}


@rehearsal()  # of ours, which a graph records however small the call
def prepare(every: list[Call], device: torch.device, block_s: float) -> tuple[Call, int, int]:
    """One function that makes all of these calls, how many they are, and how often it is called in a block."""
    for call in (*every, every[0]):  # compiles, and chooses the fastest way
        call()
    if device.type == "cuda":
        # Up to 100 calls, so that the device is not done before a slow host has asked for the next replay: before each,
        # torch also sets random numbers going, where there are such.
        once = clock.time_block(partial(_all, every), 1, device).wall_s
        every = every * max(4 if len(every) == 1 else 1, min(100 // len(every), int(4e-3 / once)))
        work = recorded(every, device)
    else:
        work = partial(_all, every)
    once = clock.time_block(work, 1, device).wall_s
    return work, len(every), 1 if once > 10 * block_s else max(2, min(50, int(block_s / once)))


def _all(calls: list[Call]) -> None:
    for call in calls:
        call()


# --- calls by hand -----------------------------------------------------------------------------------------------


def by_hand(kernel: Kernel, device: torch.device) -> list[Case]:
    """Cases in which the host, and not the device, sets the pace, and on a GPU larger ones until it no longer does."""
    sizes = {case.name: case.arguments(partial(torch.empty, device="meta"))[0].numel() for case in kernel.benchmarks}
    powers = (20, 22, 24, 25) if device.type == "cuda" else ()
    larger = [Case(f"2^{power}", partial(kernel.sweep, size=2**power)) for power in powers]
    return [*(case for case in kernel.benchmarks if sizes[case.name] <= 2**18), *larger]


def overhead(kernel: Kernel, case: Case, device: torch.device) -> dict[str, Any]:
    """µs of wall time a call, one after the other: forward, forward with gradients wanted, both passes."""
    args = copies(case, torch.float32, device, cold=False)[0]
    leaves = [arg.requires_grad_() if isinstance(arg, Tensor) else arg for arg in args]
    dy = torch.ones_like(kernel.reference(*args))
    ways: dict[str, tuple[bool, Callable[[], object]]] = {}
    for name, function in (("eager", kernel.reference), ("ours", kernel.function)):
        forward = partial(function, *leaves)
        ways[name] = (False, forward)
        ways[f"{name} (grad)"] = (True, forward)
        ways[f"{name} (both passes)"] = (True, partial(_all, list(differentiated(function, args, dy))))
    best = dict[str, float]()
    for _ in range(10):  # in turns: from one second to the next a host's pace differs by more than the calls do
        for way, (enabled, call) in ways.items():
            with torch.set_grad_enabled(enabled):
                if way not in best:
                    call()
                    best[way] = clock.time_block(call, 2, device).wall_s
                # Counted anew: of two steps that were held up there would be few in all blocks, and each block has an
                # end for which the host waits.
                steps = max(1, min(100, int(0.01 / best[way])))
                best[way] = min(best[way], clock.time_block(call, steps, device).wall_s)
    return {"kernel": kernel.name, "shape": case.name, **{way: wall_s * 1e6 for way, wall_s in best.items()}}


def slow(overheads: Sequence[dict[str, Any]]) -> list[str]:
    """Calls that take longer by hand than torch's own, in words."""
    return [
        f"{found['kernel']} {found['shape']}{suffix}: {found['ours' + suffix]:.1f} µs by hand, and"
        f" {found['eager' + suffix]:.1f} by torch"
        for found in overheads
        for suffix in ("", " (grad)", " (both passes)")
        if found["ours" + suffix] > 1.1 * found["eager" + suffix]
    ]


# --- over size ---------------------------------------------------------------------------------------------------


def sweep(kernel: Kernel, device: torch.device) -> list[Row]:
    """Forward in bfloat16 at sizes from 4 K elements to 256 M, cold where that is possible."""
    rows: list[Row] = []
    for power in range(12, 29, 2):
        case = Case(str(2**power), lambda fill, size=2**power: kernel.sweep(fill, size))  # type: ignore[misc]
        settings = argparse.Namespace(compile="none", forward=True, quick=True)
        rows += rows_of(kernel, case, "bfloat16", "cold", device, settings)
    return rows


def draw(kernel: Kernel, rows: Sequence[Row], ceilings: Calibration, path: Path) -> None:
    """GB/s over size beside the measured copy rate; TFLOP/s where the work is a GEMM."""
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
    """Of a call: GB moved, or 10¹² operations of a GEMM."""
    fakes = kernel.sweep(partial(torch.empty, device="meta", dtype=torch.bfloat16), size)
    result = kernel.reference(*fakes)
    if kernel.lower_bound is None:
        return (bytes_of(fakes) + result.nbytes) / 1e9
    return 2 * result.numel() * int(fakes[0].shape[-1]) / 1e12


# --- what is written ---------------------------------------------------------------------------------------------


def line(row: Row) -> str:
    """As it is found, for the terminal."""
    times = ", ".join(f"{shown(name)} {us:.4g}" for name, us in row.us.items() if us is not None)
    goal = f" (goal {row.goal})" if row.goal else ""
    ours, others = row.us.get("ours"), {name: row.us.get(name) for name in ("lower_bound", "eager", "plain")}
    ratios = ", ".join(f"{ours / us:.3f} {shown(name)}" for name, us in others.items() if ours and us)
    return f"{row.name}: {times} µs; ours {ratios}{goal}"


def report(rows: Sequence[Row], overheads: Sequence[dict[str, Any]], ceilings: Calibration) -> str:
    """The table, as Markdown."""
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
            _rate(row),
        ]
        for row in rows
    ]
    rate = f"{ceilings.bandwidth / 1e12:.2f} TB/s copied, " + ", ".join(
        f"{flops / 1e12:.0f} TFLOP/s in {dtype}" for dtype, flops in ceilings.matrix.items()
    )
    text = f"{ceilings.device}, torch {torch.__version__}; measured ceilings: {rate}. µs a call, medians, one run.\n\n"
    text += table(head, body)
    if overheads:
        names = [name for name in overheads[0] if name not in ("kernel", "shape")]
        lines = [[f"{o['kernel']} {o['shape']}", *(f"{o[name]:.1f}" for name in names)] for o in overheads]
        text += "\nCalls one after the other from Python, float32: µs of wall time each.\n\n"
        text += table(["kernel, shape", *names], lines)
    return text


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *body)]
    return "\n".join(lines) + "\n"


def _rate(row: Row) -> str:
    ours = row.us.get("ours")
    return f"{row.moved / ours / 1e3:.0f}" if ours and row.moved else ""


def _number(us: float | None) -> str:
    return "" if us is None else f"{us:.3g}" if us < 1000 else f"{us:.0f}"


def put_into(path: Path, text: str, plots: Sequence[Path] = ()) -> None:
    """Replace what stands between the marks, or add it at the end; plots go into a folder beside the file."""
    if plots:
        folder = path.parent / "plots"
        folder.mkdir(exist_ok=True)
        text += "\nOver size, bfloat16, cold:\n\n"
        for plot in plots:
            shutil.copy(plot, folder)
            text += f"![{plot.stem}](plots/{plot.name})\n"
    old = path.read_text() if path.exists() else ""
    before, begin, rest = old.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2] if begin else "\n"
    before = before if begin or not before else before.rstrip("\n") + "\n\n"
    path.write_text(f"{before}{MARKS[0]}\n{text}{MARKS[1]}{after}")
