"""Streams: independent work runs concurrently on several streams, where a single stream would queue it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from optexp.errors import Unsupported, refusing
from optexp.profiling.intervals import Union
from optexp.program import Batch, Program, flatten, forward, map_batch, preserved, tensors_of, to_device
from optexp.program.feeds import settings
from optexp.schema import choice
from optexp.strategy import Counters, Evidence, Notes, Remedy, Stage, Strategy
from optexp.transforms.chunked import Chunked, Overlapped, Split, rows
from optexp.transforms.stream_parallel import Lanes, NoBranches, side_by_side

if TYPE_CHECKING:
    from optexp.profiling.bounds import Bound
    from optexp.profiling.view import View
    from optexp.records.profile import Calibration
    from optexp.trace import Trace

TOO_SMALL = "the GPU is done with each chunk before the host has dispatched the next (fewer and larger ones?)"
CHUNK_BYTES = 16 * 2**20  # large enough for full speed of copies and of products
ENGAGED = 0.02  # least overlap that counts; kernels of one stream overlap slightly at their launch


@dataclass
class Streams(Strategy):
    """Runs independent parts of a step on several streams.

    mode:     branches: independent parts of the model, found in its graph; chunks: pieces of a batch in host memory,
              copied in, computed and copied out concurrently; split: pieces of a batch on the device, one per stream;
              auto: chunks if the step itself copies its batch, else branches
    streams:  most streams; None: 2 for split, else 4 (for chunks: one for copies in, one for copies out, two for work)
    chunks:   number of chunks, before the first and the last are halved; None: chunks of 16 MiB, at least as many as
              the step has
    """

    stage = Stage.STREAMS
    variants = ({"mode": "branches"}, {"mode": "chunks"}, {"mode": "split"})

    mode: str = choice("auto", "branches", "chunks", "split")
    streams: int | None = None
    chunks: int | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("streams", self.streams, 2), ("chunks", self.chunks, 2)):
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}")

    @property
    def excludes(self) -> frozenset[str]:
        return frozenset({"graph_trees"})

    @property
    def remedies(self) -> tuple[Remedy, ...]:
        return (Remedy("gpu_idle"), Remedy("memory_copy", rank=2, options={"mode": "chunks"}))

    def bound(self, view: View, ceilings: Calibration | None) -> Bound | None:
        """Kernels run concurrently within the card's bandwidth and flop/s; with chunks, copies overlap too."""
        from optexp.profiling.side_by_side import kernels_together_us, longest_way_us

        step = view.parts(ceilings)
        if not step.on_gpu:
            return None
        copies = step.copied_us("HtoD", "DtoH") > 0 and self.mode in ("auto", "chunks")
        together = kernels_together_us(step, split=copies or self.mode != "branches")
        text = f"kernels run side by side, whose work needs {step.share(together)}"
        if not copies:
            return step.less(text, device=step.kernels_us - together, waiting=view.account("python").us)
        way = max(together, longest_way_us(step))
        text += f"; the longest of copying in, computing and copying out takes {step.share(way)}"
        return step.less(text, device=step.device_us - way, waiting=step.waiting_us, least=step.launching_us())

    def unsupported_on(self, device: torch.device) -> str | None:
        if device.type == "cuda":
            return None
        return (
            f"work runs side by side on a CUDA device alone, and this run is on the {device.type.upper()}:"
            " use device=cuda on a machine with an NVIDIA GPU"
        )

    def unsupported(self, program: Program, device: torch.device) -> str | None:
        if reason := self.unsupported_on(device):
            return reason
        mode = self.mode_for(program)
        if mode == "branches":
            return None
        if not (isinstance(program.step, Chunked) or program.step is forward):
            return f"mode={mode} takes a batch apart, which inference alone allows: use workload.mode=forward"
        if mode == "chunks" and "delivers" not in settings(program.feed):
            return (
                "mode=chunks overlaps copies that the step makes itself, and here the feed makes them, or none: use"
                " workload=pipeline, workload.source=host, or mode=split"
            )
        if mode == "chunks" and self.streams == 2:
            return "mode=chunks needs 3 streams: one for copies in, one for copies out, and at least one for work"
        if mode == "split" and isinstance(program.step, Chunked):
            return "the step takes its batch apart already: use mode=chunks"
        return None

    def mode_for(self, program: Program) -> str:
        if self.mode != "auto":
            return self.mode
        return "chunks" if isinstance(program.step, Chunked) else "branches"

    def apply(self, program: Program) -> tuple[Program, Notes]:
        mode = self.mode_for(program)
        if mode == "branches":
            return program, {"mode": mode, **self.branch(program)}
        batch = program.feed.next()
        results = require_rows(program, batch)
        lanes, chunks = Lanes(program.device, self.streams or (2 if mode == "split" else 4)), 0
        step: Split | Overlapped = Split(lanes)
        if mode == "chunks":
            chunks = self.chunks or fitting_chunks(program, batch)
            step = Overlapped(lanes, chunks, home=isinstance(program.step, Chunked))
            program = replace(program, feed=replace(program.feed, delivers=False))  # type: ignore[type-var]
        return replace(program, step=step), {
            "mode": mode,
            "streams": len(lanes.streams),
            "chunks": chunks,
            "listing": step.listing() if results == ["output"] else "",
        }

    def branch(self, program: Program) -> Notes:
        """Replace `model.forward` by its version on lanes, so that wrappers around the model use it too."""
        args, kwargs = program.arguments(to_device(program.feed.next(), program.device))
        untraced = "branches are found in the model's graph, and torch.fx cannot trace this model"
        advice = "call the towers from a forward without that, or try strategy.streams.mode=split"
        try:
            with refusing(untraced, advice), preserved(program):
                replacement = side_by_side(program.model, args, kwargs, self.streams or 4)
        except NoBranches as reason:
            raise Unsupported(
                f"the model has no branches: {reason}; for inference, try strategy.streams.mode=split"
            ) from reason
        forward: Any = replacement.__call__
        if "torch._dynamo" in sys.modules:  # compiled, each piece becomes a graph of its own, on its own lane
            forward = torch.compiler.disable(forward, recursive=False)
        program.model.forward = forward
        compiled = any(hasattr(program.call, name) for name in ("_torchdynamo_orig_callable", "_orig_mod"))
        used = "torch.compiler.disable(side_by_side, recursive=False)" if compiled else "side_by_side"
        listing = replacement.listing()
        return {
            "streams": len(replacement.lanes.streams) + 1,
            "pieces": len(replacement.pieces),
            "listing": listing and f"{listing}\n\nmodel.forward = {used}\n",
        }

    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        parts = {"branches": f"{notes.get('pieces')} pieces", "chunks": f"{notes.get('chunks')} chunks"}
        work = f"{parts.get(notes['mode'], 'pieces')} on {notes['streams']} streams"
        if notes["mode"] == "chunks":
            return overlap_of_copies(after, work)
        if together(after) < together(before) + ENGAGED:
            return Evidence(
                False,
                f"{work}, but kernels never ran side by side: the host launches them too slowly (add cuda_graph), or"
                " each fills the device by itself",
            )
        return Evidence(True, f"{work}: {together(after):.2f} kernels at a time on average, where there are any")

    def recipe(self, notes: Notes) -> str:
        return str(notes["listing"])


def require_rows(program: Program, batch: Batch) -> list[str]:
    """The names of the model's results. Raises Unsupported if the results do not have the rows of the batch."""
    count = rows(tensors_of(batch))
    if count is None:
        raise Unsupported("the batch's tensors have no first dimension in common, along which to take it apart")
    failed = "the model does not take a part of a batch"
    with refusing(failed, "write its forward for any number of rows"), preserved(program), torch.no_grad():
        few = map_batch(lambda tensor: tensor[: max(1, count // 8)].to(program.device), batch)
        results = flatten(program.predict(few))
    if rows(results) != rows(tensors_of(few)):
        raise Unsupported("the model's results have no row for each row of the batch: a batch cannot be taken apart")
    return list(results)


def fitting_chunks(program: Program, batch: Batch) -> int:
    nbytes = sum(tensor.nbytes for tensor in tensors_of(batch).values())
    least = program.step.chunks if isinstance(program.step, Chunked) else 2
    return max(least, round(nbytes / CHUNK_BYTES))


def together(trace: Trace) -> float:
    """Mean number of concurrent kernels, over the time with at least one."""
    busy = Union(kernel.interval for kernel in trace.kernels).total
    return sum(kernel.duration for kernel in trace.kernels) / busy if busy else 0.0


def overlap_of_copies(trace: Trace, work: str) -> Evidence:
    """Engaged if copies overlap with kernels; states the share of the longest of copies in, kernels and copies out.

    The profiler slows the host, and with it a step of many small chunks: a timed step may be closer to the limit.
    """
    kernels = Union(kernel.interval for kernel in trace.kernels)
    ways = {kind: Union(c.interval for c in trace.copies if c.kind == kind) for kind in ("HtoD", "DtoH")}
    copies = ways["HtoD"] | ways["DtoH"]
    beside = kernels.total + copies.total - (kernels | copies).total
    if not copies.total or beside < ENGAGED * copies.total:
        pageable = any(copy.pageable for copy in trace.copies)
        why = "copies from pageable memory wait: add pinned_memory" if pageable else TOO_SMALL
        return Evidence(False, f"{work}, but no kernel runs beside a copy: {why}")
    start, end = trace.window
    bound = max(kernels.total, *(way.total for way in ways.values()))
    return Evidence(
        True,
        f"{work}: kernels run during {beside / copies.total:.0%} of the time with copies, and the longest of copying"
        f" in, computing and copying out takes {bound / (end - start):.0%} of a profiled step",
    )
