"""A model's graph, cut into pieces of which some may run side by side.

Operations depend on each other through values, and through memory: an in-place operation must wait for all who read
what it overwrites, and two calls of one module that counts (BatchNorm) must not meet. What needs neither is free to
run at the same time.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from optexp.transforms.tracing import Tracer

# Without one of these a branch is not worth a stream of its own: waiting for it costs more than it takes.
PRODUCTS: set[Any] = {
    operator.matmul, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum,
    F.linear, F.bilinear, F.conv1d, F.conv2d, F.conv3d, F.scaled_dot_product_attention,
    torch.conv1d, torch.conv2d, torch.conv3d, "matmul", "mm", "bmm",
}  # fmt: skip


HOLDS = "holds"  # key of a node's meta: whether its value is a "tensor", has "tensors" inside, or has none ("")


@dataclass
class Piece:
    """Operations that run one after the other on one lane.

    lane:     0 is where the caller is
    inputs:   values it reads that others made
    outputs:  values it makes that others read
    waits:    indices of pieces on other lanes that must have ended
    awaited:  whether a piece on another lane waits for this one
    frees:    values that nobody reads after it
    """

    lane: int
    nodes: list[fx.Node] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    awaited: bool = False
    frees: list[fx.Node] = field(default_factory=list)
    run: Callable[..., Any] = tuple


class Whole(Tracer):
    """A submodule that cannot be traced (its branches depend on values) stays whole."""

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        already = set(self.graph.nodes)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            for node in reversed(self.graph.nodes):
                if node not in already:
                    self.graph.erase_node(node)
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)


def trace(model: nn.Module, constants: Mapping[str, Any]) -> fx.GraphModule:
    """The model as a graph of its operations, over the same parameters and buffers; raises what tracing raised.

    constants:  arguments of the model that are no tensors, by name: what depends on them is decided once
    """
    graph = Whole().trace(model, concrete_args=dict(constants) or None)
    for node in reversed(graph.nodes):  # checks that the constants are what they were: they are
        check = getattr(node.target, "__name__", "") in ("_assert", "_assert_is_none")
        if check or (node.target is operator.eq and not node.users):
            graph.erase_node(node)
    return fx.GraphModule(model, graph)


def cut(model: fx.GraphModule, inputs: list[Any], limit: int) -> list[Piece]:
    """The pieces, in an order in which they can be launched, on at most `limit` lanes.

    inputs:  of one call, in the order of the graph's placeholders; the call is made, under no_grad
    """
    needs = dependencies(model, inputs)
    pieces = gathered(needs, lanes(needs, model, limit))
    for piece in pieces:
        connect(piece, model)
    read_last = {node: index for index, piece in enumerate(pieces) for node in piece.inputs}
    kept = set(model.graph.output_node().all_input_nodes)
    for node, index in read_last.items():
        if node not in kept:
            pieces[index].frees.append(node)
    return pieces


Needs = dict[fx.Node, list[fx.Node]]


def dependencies(model: fx.GraphModule, inputs: list[Any]) -> Needs:
    """What each operation has to wait for, in the order of the graph."""
    touches = Touches(model)
    with torch.no_grad():
        touches.run(*inputs)
    needs: Needs = {}
    readers: dict[int, list[fx.Node]] = defaultdict(list)
    writer: dict[int, fx.Node] = {}
    for node in model.graph.nodes:
        if node.op not in ("call_function", "call_method", "call_module"):
            continue
        found = dict.fromkeys(n for n in node.all_input_nodes if n in needs)
        for memory in touches.read[node]:
            if memory in writer:
                found[writer[memory]] = None
            readers[memory].append(node)
        for memory in touches.written[node]:
            found |= dict.fromkeys(other for other in readers[memory] if other is not node)
            writer[memory] = node
        needs[node] = list(found)
    return needs


class Touches(fx.Interpreter):
    """Runs the graph once and notes which memory each operation reads and writes. All values stay alive meanwhile, so
    that memory is never used twice."""

    def __init__(self, model: fx.GraphModule) -> None:
        super().__init__(model, garbage_collect_values=False)
        self.read: dict[fx.Node, set[int]] = {}
        self.written: dict[fx.Node, set[int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n) if n.op != "output" else ((), {})
        given = tensors(args, kwargs)
        versions = [tensor._version for tensor in given]
        result = super().run_node(n)
        counting = kept(self.module.get_submodule(str(n.target))) if n.op == "call_module" else []
        n.meta[HOLDS] = "tensor" if isinstance(result, Tensor) else "tensors" if tensors(result) else ""
        changed = [t for t, version in zip(given, versions, strict=True) if t._version != version]
        self.read[n] = {memory(tensor) for tensor in (*given, *tensors(result), *counting)}
        self.written[n] = {memory(tensor) for tensor in (*changed, *counting)}
        return result


def kept(module: nn.Module) -> list[Tensor]:
    """What a module may write besides its results: buffers, and tensors it has as attributes (scratch memory)."""
    attributes = (value for part in module.modules() for value in vars(part).values())
    return [*module.buffers(), *(value for value in attributes if isinstance(value, Tensor))]


def tensors(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def memory(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


# --- who runs where ----------------------------------------------------------------------------------------------


def lanes(needs: Needs, model: fx.GraphModule, limit: int) -> dict[fx.Node, int]:
    """Each operation follows the first of those it needs that nobody else has followed; where there is none, and its
    branch holds a product, it opens a lane, or takes one that has nothing left to do for others."""
    order = {node: index for index, node in enumerate(needs)}
    before: dict[fx.Node, int] = {}  # bit sets of all that came before
    for node, needed in needs.items():
        before[node] = sum({1 << order[n] for n in needed}) if needed else 0
        for n in needed:
            before[node] |= before[n]
    worth = holds_product(needs, model)
    lane_of: dict[fx.Node, int] = {}
    tails: list[fx.Node] = []
    for node, needed in needs.items():
        open_ends = [lane_of[n] for n in needed if tails[lane_of[n]] is n]
        if not tails:
            lane = 0
        elif open_ends:
            lane = min(open_ends)
        elif not worth[node]:
            lane = lane_of[needed[-1]] if needed else 0
        else:
            idle = (i for i, tail in enumerate(tails) if before[node] >> order[tail] & 1)
            new = len(tails) if len(tails) < limit else order[node] % limit
            lane = next(idle, new)
        if lane == len(tails):
            tails.append(node)
        tails[lane], lane_of[node] = node, lane
    return lane_of


def holds_product(needs: Needs, model: fx.GraphModule) -> dict[fx.Node, bool]:
    """Whether an operation, or one that needs it and nothing else, is a product."""
    worth: dict[fx.Node, bool] = {}
    for node in reversed(needs):
        product = node.target in PRODUCTS
        if node.op == "call_module":
            product = any(True for _ in model.get_submodule(str(node.target)).parameters())
        only = (user for user in node.users if needs.get(user) == [node])
        worth[node] = product or any(worth[user] for user in only)
    return worth


def gathered(needs: Needs, lane_of: dict[fx.Node, int]) -> list[Piece]:
    """Pieces: a lane is cut before an operation that waits for another lane, and after one that another waits for."""
    awaited = {n for node, needed in needs.items() for n in needed if lane_of[n] != lane_of[node]}
    pieces: list[Piece] = []
    piece_of: dict[fx.Node, int] = {}
    latest: dict[int, int] = {}
    for node, needed in needs.items():
        lane = lane_of[node]
        waits = sorted({piece_of[n] for n in needed if lane_of[n] != lane})
        current = latest.get(lane)
        if current is None or waits or pieces[current].awaited:
            current = latest[lane] = len(pieces)
            pieces.append(Piece(lane, waits=waits))
        pieces[current].nodes.append(node)
        pieces[current].awaited |= node in awaited
        piece_of[node] = current
    return pieces


def connect(piece: Piece, model: fx.GraphModule) -> None:
    """Fill in what goes in and out of a piece, and what runs it. Parameters are nobody's input: each piece has them."""
    inside = set(piece.nodes)
    needed = dict.fromkeys(n for node in piece.nodes for n in node.all_input_nodes if n not in inside)
    piece.inputs = [n for n in needed if n.op != "get_attr"]
    piece.outputs = [node for node in piece.nodes if any(user not in inside for user in node.users)]
    graph = fx.Graph()
    copies = {n: graph.placeholder(n.name) for n in piece.inputs}
    for node in (*(n for n in needed if n.op == "get_attr"), *piece.nodes):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in piece.outputs))
    piece.run = fx.GraphModule(model, graph)
