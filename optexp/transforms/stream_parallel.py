"""Streams beside the caller's own, and a model whose branches run on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import Tensor, fx, nn

from optexp.errors import Unsupported
from optexp.export.inlining import spelled_graph
from optexp.transforms.branches import HOLDS, Piece, cut, tensors, trace


class NoBranches(Unsupported):
    """The model has no concurrent branches; the message states why."""


class Lanes:
    """Streams that start after all earlier work of the caller's stream, and end before its later work.

    So memory that was freed before is no longer in use when a lane gets it, and graphs capture lanes completely.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self.device = device
        self.streams = [torch.cuda.Stream(device) for _ in range(count)]

    @contextmanager
    def open(self) -> Iterator[list[torch.cuda.Stream]]:
        here = torch.cuda.current_stream(self.device)
        for stream in self.streams:
            stream.wait_stream(here)
        try:
            yield self.streams
        finally:
            for stream in self.streams:
                here.wait_stream(stream)


class SideBySide:
    """A replacement of a model's `forward` that runs branches on lanes.

    Backward needs no change: autograd runs each operation on the stream of its forward, and synchronizes gradients.
    Values that cross lanes are recorded on the reading lane (`record_stream`), as the allocator knows only the lane
    that made them.
    """

    def __init__(self, forward: Signature, graph: fx.GraphModule, pieces: list[Piece], device: torch.device) -> None:
        self.signature, self.pieces = forward, pieces
        self.placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self.result = graph.graph.output_node().args[0]
        self.lanes = Lanes(device, max(piece.lane for piece in pieces))
        self.done = [torch.cuda.Event() for _ in pieces]
        made_on = {node: piece.lane for piece in pieces for node in piece.outputs}
        self.crossing = [[n for n in piece.inputs if made_on.get(n, 0) != piece.lane] for piece in pieces]
        self.returned = [n for n in graph.graph.output_node().all_input_nodes if made_on.get(n, 0)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = dict(zip(self.placeholders, in_order(self.signature, args, kwargs), strict=True))
        here = torch.cuda.current_stream(self.lanes.device)
        with each_its_own_casts(), self.lanes.open() as streams:
            for index, piece in enumerate(self.pieces):
                stream = streams[piece.lane - 1] if piece.lane else here
                with torch.cuda.stream(stream):
                    for awaited in piece.waits:
                        stream.wait_event(self.done[awaited])
                    recorded(stream, [values[node] for node in self.crossing[index]])
                    results = piece.run(*(values[node] for node in piece.inputs))
                    if piece.awaited:
                        self.done[index].record(stream)
                values.update(zip(piece.outputs, results, strict=True))
                for node in piece.frees:
                    del values[node]
        recorded(here, [values[node] for node in self.returned])
        return fx.node.map_arg(self.result, values.__getitem__)

    def listing(self) -> str:
        """Plain PyTorch that defines `side_by_side` for a `model`; "" where the graph holds values of its own."""
        codes = [spelled_graph(piece.run.graph, "model") for piece in self.pieces]  # type: ignore[attr-defined]
        known = [code for code in codes if code is not None]
        if len(known) < len(codes):
            return ""
        heads = [text.strip().replace("def forward(self, ", f"def piece_{i}(") for i, (text, _) in enumerate(known)]
        imports = sorted(set().union(*(imports for _, imports in known)))
        streams, given = len(self.lanes.streams), self.signature.parameters.values()
        parameters = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in given)
        lines = [
            *imports,
            f"lanes = [torch.cuda.Stream() for _ in range({streams})]",
            f"done = [torch.cuda.Event() for _ in range({len(self.pieces)})]",
            *(f"\n\n{head}" for head in heads),
            f"\n\ndef side_by_side({parameters}):",
            "    here = torch.cuda.current_stream()",
            "    cache_casts = torch.is_autocast_cache_enabled()",
            "    torch.set_autocast_cache_enabled(False)  # of a weight that lanes share, each makes its own",
            "    for lane in lanes:",
            "        lane.wait_stream(here)",
        ]
        for index, (piece, crossing) in enumerate(zip(self.pieces, self.crossing, strict=True)):
            stream = f"lanes[{piece.lane - 1}]" if piece.lane else "here"
            work = [f"{stream}.wait_event(done[{awaited}])" for awaited in piece.waits]
            work += [recording(node, stream) for node in crossing if node.meta[HOLDS]]
            work += [f"({', '.join(map(str, piece.outputs))},) = piece_{index}({', '.join(map(str, piece.inputs))})"]
            work += [f"done[{index}].record({stream})"] if piece.awaited else []
            lines += [f"    with torch.cuda.stream({stream}):", *(f"        {line}" for line in work)]
            lines += [f"    del {', '.join(map(str, piece.frees))}"] if piece.frees else []
        lines += ["    torch.set_autocast_cache_enabled(cache_casts)"]
        lines += ["    for lane in lanes:", "        here.wait_stream(lane)"]
        lines += [f"    {recording(node, 'here')}" for node in self.returned if node.meta[HOLDS]]
        return "\n".join([*lines, f"    return {self.result!r}"]) + "\n"


@contextmanager
def each_its_own_casts() -> Iterator[None]:
    """Disable autocast's cache of cast weights: another lane could read a cast without waiting for it."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def recorded(stream: torch.cuda.Stream, values: list[Any]) -> None:
    for tensor in tensors(values):
        tensor.record_stream(stream)


def recording(node: fx.Node, stream: str) -> str:
    """Source code that does for one value what `recorded` does."""
    if node.meta[HOLDS] == "tensor":
        return f"{node}.record_stream({stream})  # whoever drops it knows another stream"
    return f"torch.utils._pytree.tree_map_only(torch.Tensor, lambda part: part.record_stream({stream}), {node})"


def side_by_side(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], limit: int) -> SideBySide:
    """The replacement of `model.forward`. Raises NoBranches; errors of tracing pass through."""
    forward = signature(model.forward)
    if any(p.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) for p in forward.parameters.values()):
        raise NoBranches("its forward takes any number of arguments")
    inputs = in_order(forward, args, kwargs)
    constants = {
        name: value
        for name, value in zip(forward.parameters, inputs, strict=True)
        if not isinstance(value, Tensor | list | tuple | dict)
    }
    graph = trace(model, constants)
    pieces = cut(graph, inputs, limit)
    if not any(piece.lane for piece in pieces):
        raise NoBranches("no two of its products are independent of each other")
    device = next(tensor.device for tensor in tensors(inputs))
    return SideBySide(forward, graph, pieces, device)


def in_order(forward: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of a call, defaults included, in the order of the parameters."""
    if len(args) == len(forward.parameters):
        return list(args)
    bound = forward.bind(*args, **kwargs)
    bound.apply_defaults()
    return list(bound.arguments.values())
