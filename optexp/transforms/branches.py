"""A model's graph, cut into pieces of which some may run concurrently.

Operations depend on each other through values and through memory. An in-place operation must wait for all readers of
the memory that it overwrites, and two calls of one module that counts (BatchNorm) must not overlap. Operations without
such dependencies may run at the same time.
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

# A branch without one of these operations gets no lane of its own: waiting for it would cost more than it saves.
PRODUCTS: set[Any] = {
    operator.matmul, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum,
    F.linear, F.bilinear, F.conv1d, F.conv2d, F.conv3d, F.scaled_dot_product_attention,
    torch.conv1d, torch.conv2d, torch.conv3d, "matmul", "mm", "bmm",
}  # fmt: skip


HOLDS = "holds"  # key of a node's meta: "tensor", "tensors" (a value with tensors inside), or "" (no tensor)


@dataclass
class Piece:
    """Operations that run one after the other on one lane (a stream).

    lane:     number of the lane; 0 is the caller's stream
    inputs:   values from other pieces that this piece reads
    outputs:  values of this piece that other pieces read
    waits:    indices of pieces on other lanes that must have ended before this piece starts
    awaited:  whether a piece on another lane waits for this one
    frees:    values that no later piece reads
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
    """A tracer that keeps a submodule whole if it cannot be traced, as one whose branches depend on values."""

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
    """The model as a graph of its operations, over the same parameters and buffers; errors of tracing pass through.

    constants:  arguments of the model that are no tensors, by name; the graph holds for these values only
    """
    graph = Whole().trace(model, concrete_args=dict(constants) or None)
    for node in reversed(graph.nodes):  # removes fx's checks of the constants, which never change
        check = getattr(node.target, "__name__", "") in ("_assert", "_assert_is_none")
        if check or (node.target is operator.eq and not node.users):
            graph.erase_node(node)
    return fx.GraphModule(model, graph)


def cut(model: fx.GraphModule, inputs: list[Any], limit: int) -> list[Piece]:
    """The pieces in launch order, on at most `limit` lanes.

    inputs:  arguments of one call, in the order of the graph's placeholders; the call is run under no_grad
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
    """The operations that each operation depends on; keys are in the order of the graph."""
    touches = Touches(model)
    with torch.no_grad():
        touches.run(*inputs)
    needs: Needs = {}
    readers: dict[int, list[fx.Node]] = defaultdict(list)
    writer: dict[int, fx.Node] = {}
    for node in model.graph.nodes:
        if node.op not in ("call_function", "call_method", "call_module"):
            continue
        needed = dict.fromkeys(n for n in node.all_input_nodes if n in needs)
        for memory in touches.read[node]:
            if memory in writer:
                needed[writer[memory]] = None
            readers[memory].append(node)
        for memory in touches.written[node]:
            needed |= dict.fromkeys(other for other in readers[memory] if other is not node)
            writer[memory] = node
        needs[node] = list(needed)
    return needs


class Touches(fx.Interpreter):
    """Runs the graph once and records the memory that each operation reads and writes.

    All values stay alive during the run, so that no memory is reused.
    """

    def __init__(self, model: fx.GraphModule) -> None:
        super().__init__(model, garbage_collect_values=False)
        self.read: dict[fx.Node, set[int]] = {}
        self.written: dict[fx.Node, set[int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n) if n.op != "output" else ((), {})
        operands = tensors(args, kwargs)
        versions = [tensor._version for tensor in operands]
        result = super().run_node(n)
        counting = kept(self.module.get_submodule(str(n.target))) if n.op == "call_module" else []
        n.meta[HOLDS] = "tensor" if isinstance(result, Tensor) else "tensors" if tensors(result) else ""
        changed = [t for t, version in zip(operands, versions, strict=True) if t._version != version]
        self.read[n] = {memory(tensor) for tensor in (*operands, *tensors(result), *counting)}
        self.written[n] = {memory(tensor) for tensor in (*changed, *counting)}
        return result


def kept(module: nn.Module) -> list[Tensor]:
    """Tensors that a module may write besides its results: buffers and attributes (scratch memory)."""
    attributes = (value for part in module.modules() for value in vars(part).values())
    return [*module.buffers(), *(value for value in attributes if isinstance(value, Tensor))]


def tensors(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def memory(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


# --- lanes -------------------------------------------------------------------------------------------------------


def lanes(needs: Needs, model: fx.GraphModule, limit: int) -> dict[fx.Node, int]:
    """The lane of each operation.

    An operation continues the lane of a dependency that no other operation has continued yet. If there is none and its
    branch is worth a lane (`PRODUCTS`), it takes an idle lane, all of whose work it depends on, or opens a new one.
    """
    order = {node: index for index, node in enumerate(needs)}
    all_needs = ancestors(needs)
    worth = holds_product(needs, model)
    lane_of: dict[fx.Node, int] = {}
    tails: list[fx.Node] = []  # the last operation of each lane
    for node, needed in needs.items():
        continued = [lane_of[n] for n in needed if tails[lane_of[n]] is n]
        idle = [lane for lane, tail in enumerate(tails) if all_needs[node] >> order[tail] & 1]
        if not tails:
            lane = 0
        elif continued:
            lane = min(continued)
        elif not worth[node]:
            lane = lane_of[needed[-1]] if needed else 0
        elif idle:
            lane = idle[0]
        elif len(tails) < limit:
            lane = len(tails)
        else:
            lane = order[node] % limit
        lane_of[node] = lane
        if lane < len(tails):
            tails[lane] = node
        else:
            tails.append(node)
    return lane_of


def ancestors(needs: Needs) -> dict[fx.Node, int]:
    """All direct and indirect dependencies of each operation: bit i stands for the i-th operation of `needs`.

    A set of nodes for each operation would take much more memory in a graph of thousands.
    """
    bit = {node: 1 << index for index, node in enumerate(needs)}
    found: dict[fx.Node, int] = {}
    for node, needed in needs.items():
        found[node] = 0
        for n in needed:
            found[node] |= bit[n] | found[n]
    return found


def holds_product(needs: Needs, model: fx.GraphModule) -> dict[fx.Node, bool]:
    """Whether an operation, or one that depends on it alone, is one of `PRODUCTS` or a module with parameters."""
    worth: dict[fx.Node, bool] = {}
    for node in reversed(needs):
        product = node.target in PRODUCTS
        if node.op == "call_module":
            product = any(True for _ in model.get_submodule(str(node.target)).parameters())
        only = (user for user in node.users if needs.get(user) == [node])
        worth[node] = product or any(worth[user] for user in only)
    return worth


def gathered(needs: Needs, lane_of: dict[fx.Node, int]) -> list[Piece]:
    """The pieces: a lane is cut before operations that wait for another lane, and after those that another awaits."""
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
    """Set a piece's inputs, outputs and `run`. Parameters are no inputs, as each piece holds them itself."""
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
