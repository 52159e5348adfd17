"""Steps that split a batch along its first dimension and join the results."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from operator import itemgetter

import torch
from torch import Tensor

from optexp.program import Batch, Outputs, Program, flatten, map_batch, tensors_of
from optexp.transforms.stream_parallel import Lanes

AHEAD = 2  # chunks per lane that are copied in, and as many that are copied out, while the lane computes another


@dataclass(frozen=True)
class Chunked:
    """One step without overlap: copy each chunk to the device, compute, and copy the result to its rows on the host.

    chunks:        number of pieces of a batch, of equal size if its rows can be divided so
    non_blocking:  do not wait for single copies; results then go to pinned memory, as copies to pageable memory wait
    """

    chunks: int
    non_blocking: bool = False

    def __call__(self, program: Program, batch: Batch) -> Outputs:
        out: Outputs = {}
        whole, done = rows(tensors_of(batch)), 0
        pinned = self.non_blocking and program.device.type == "cuda"
        assert whole is not None
        with torch.no_grad():
            for chunk in split(batch, evenly(whole, self.chunks)):
                there = map_batch(lambda tensor: tensor.to(program.device, non_blocking=self.non_blocking), chunk)
                done += send_home(flatten(program.predict(there)), out, whole, done, pinned)
        if pinned:
            torch.cuda.current_stream(program.device).synchronize()
        return out

    def listing(self) -> str:
        """The step in plain PyTorch, for `repro.py`."""
        pinned = "torch.cuda.is_available()" if self.non_blocking else "False"
        return CHUNKED.format(chunks=self.chunks, non_blocking=self.non_blocking, pinned=pinned)


CHUNKED = """\
def step(batch):
    done, pinned = 0, {pinned}
    with torch.no_grad():
        for chunk in zip(*(tensor.chunk({chunks}) for tensor in batch), strict=True):
            result = predict(tuple(tensor.to(device, non_blocking={non_blocking}) for tensor in chunk))
            if not done:
                home = torch.empty((len(batch[0]), *result.shape[1:]), dtype=result.dtype, pin_memory=pinned)
            home[done : done + len(result)].copy_(result, non_blocking=pinned)
            done += len(result)
    if pinned:
        torch.cuda.synchronize()
    return home
"""


@dataclass(frozen=True)
class Split:
    """Pieces of the batch, each on a stream of its own."""

    lanes: Lanes

    def __call__(self, program: Program, batch: Batch) -> Outputs:
        results = []
        whole = rows(tensors_of(batch))
        assert whole is not None
        with torch.no_grad(), self.lanes.open() as streams:
            for stream, piece in zip(streams, split(batch, evenly(whole, len(streams))), strict=False):
                with torch.cuda.stream(stream):
                    results.append(flatten(program.predict(piece)))
        with torch.no_grad():
            return joined(results)

    def listing(self) -> str:
        return LANES.format(streams=len(self.lanes.streams)) + SPLIT + JOINED


@dataclass(frozen=True)
class Overlapped:
    """Chunks of a batch in host memory on overlapping streams: one copies in, several compute in turn, one copies out.

    The first and the last chunk are halved, as no work hides the first copy in and the last copy out. A chunk's memory
    is freed once its own stream waits for the last user, so that only a few chunks are on the device at a time.

    lanes:  the first for copies in, the second for copies out, the others for work
    chunks: number of pieces of a batch before halving
    home:   results are copied to pinned host memory, and the step waits for them; else they stay on the device
    """

    lanes: Lanes
    chunks: int
    home: bool

    def __call__(self, program: Program, batch: Batch) -> Outputs:
        results: list[Outputs] = []
        out: Outputs = {}
        whole, done = rows(tensors_of(batch)), 0
        assert whole is not None
        pieces = split(batch, halved_ends(evenly(whole, self.chunks)))
        arriving, leaving = deque[tuple[Batch, torch.cuda.Event]](), deque[tuple[Outputs, torch.cuda.Event]]()
        with torch.no_grad(), self.lanes.open() as (inward, outward, *work):

            def bring(piece: Batch) -> None:
                with torch.cuda.stream(inward):
                    there = map_batch(lambda tensor: tensor.to(program.device, non_blocking=True), piece)
                    arriving.append((there, inward.record_event()))

            ahead = AHEAD * len(work)  # whole turns: a lane waits for the copies of its own results
            for piece in islice(pieces, ahead):
                bring(piece)
            turns = cycle(work)
            while arriving:
                lane = next(turns)
                if len(leaving) == ahead:
                    result, left = leaving.popleft()
                    lane.wait_event(left)
                    inward.wait_event(left)  # a model may return its input as result
                    del result
                chunk, arrived = arriving.popleft()
                lane.wait_event(arrived)
                with torch.cuda.stream(lane):
                    result = flatten(program.predict(chunk))
                computed = lane.record_event()
                inward.wait_event(computed)
                del chunk
                if self.home:
                    outward.wait_event(computed)
                    with torch.cuda.stream(outward):
                        done += send_home(result, out, whole, done, pinned=True)
                    leaving.append((result, outward.record_event()))
                else:
                    results.append(result)
                for piece in islice(pieces, 1):
                    bring(piece)
        if not self.home:
            return joined(results)
        torch.cuda.current_stream(program.device).synchronize()
        return out

    def listing(self) -> str:
        """The step in plain PyTorch."""
        kept, end = (HOME, WAITED) if self.home else (STAYING, JOINED + AT_HOME)
        work = CHUNKS.format(chunks=self.chunks, ahead=AHEAD, kept=kept)
        return LANES.format(streams=len(self.lanes.streams)) + work + end


def send_home(result: Outputs, out: Outputs, whole: int, done: int, pinned: bool) -> int:
    """Copy a chunk's results to their rows of `out`, without waiting if `pinned`; returns the number of rows."""
    count = 0
    for name, tensor in result.items():
        count = tensor.shape[0]
        if name not in out:
            out[name] = torch.empty((whole, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=pinned)
        out[name][done : done + count].copy_(tensor, non_blocking=pinned)
    return count


def split(batch: Batch, sizes: Sequence[int]) -> Iterator[Batch]:
    """Pieces of a batch with these numbers of rows, as views that are made one by one, when they are needed."""
    start = 0
    for size in sizes:
        yield map_batch(itemgetter(slice(start, start + size)), batch)
        start += size


def evenly(whole: int, pieces: int) -> list[int]:
    """Sizes of pieces as by `torch.chunk`: the last may be smaller, and there may be fewer pieces."""
    size = max(1, -(-whole // pieces))
    return [min(size, whole - start) for start in range(0, whole, size)]


def halved_ends(sizes: list[int]) -> list[int]:
    """The sizes with the first and the last halved."""
    first, *middle, last = sizes if len(sizes) > 1 else [*sizes, 0]
    return [*evenly(first, 2), *middle, *evenly(last, 2)]


def joined(results: list[Outputs]) -> Outputs:
    """The results of all pieces, concatenated by name."""
    return {name: torch.cat([result[name] for result in results]) for name in results[0]}


def rows(batch: Mapping[str, Tensor]) -> int | None:
    """The first dimension that all tensors share; None where there is none."""
    sizes = {tensor.shape[0] if tensor.dim() else -1 for tensor in batch.values()}
    return sizes.pop() if len(sizes) == 1 and -1 not in sizes else None


# --- in plain PyTorch --------------------------------------------------------------------------------------------

LANES = """\
lanes = [torch.cuda.Stream() for _ in range({streams})]


@torch.no_grad()
def step(batch):
    here, results = torch.cuda.current_stream(), []
    for lane in lanes:
        lane.wait_stream(here)
"""

SPLIT = """\
    for lane, *piece in zip(lanes, *(tensor.chunk(len(lanes)) for tensor in batch)):
        with torch.cuda.stream(lane):
            results.append(predict(tuple(piece)))
"""

CHUNKS = """\
    def parts(batch, count):
        return list(zip(*(tensor.chunk(count) for tensor in batch)))

    first, *middle, last = parts(batch, {chunks})
    pieces = [*parts(first, 2), *middle, *parts(last, 2)]
    (inward, outward, *work), arriving, leaving = lanes, [], []
    ahead = {ahead} * len(work)
    for index in range(-ahead, len(pieces)):
        if index >= 0:
            lane = work[index % len(work)]
            if len(leaving) == ahead:  # memory is given back when whoever used it last is done
                result, left = leaving.pop(0)
                lane.wait_event(left)
                inward.wait_event(left)
                del result
            chunk, arrived = arriving.pop(0)
            lane.wait_event(arrived)
            with torch.cuda.stream(lane):
                result = predict(chunk)
            computed = lane.record_event()
            inward.wait_event(computed)
            del chunk
{kept}\
        with torch.cuda.stream(inward):
            for piece in pieces[index + ahead :][:1]:
                there = tuple(tensor.to(device, non_blocking=True) for tensor in piece)
                arriving.append((there, inward.record_event()))
"""

STAYING = """\
            results.append(result)
"""

HOME = """\
            outward.wait_event(computed)
            if index == 0:
                home = torch.empty((len(batch[0]), *result.shape[1:]), dtype=result.dtype, pin_memory=True)
                places = home.split([len(piece[0]) for piece in pieces])
            with torch.cuda.stream(outward):
                places[index].copy_(result, non_blocking=True)
            leaving.append((result, outward.record_event()))
"""

JOINED = """\
    for lane in lanes:
        here.wait_stream(lane)
    return torch.cat(results)
"""

WAITED = """\
    for lane in lanes:
        here.wait_stream(lane)
    here.synchronize()
    return home
"""

AT_HOME = """

def bring(batch):
    return batch  # the step copies it
"""
