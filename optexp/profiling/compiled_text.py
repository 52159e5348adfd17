"""Operators and bytes in texts of torch.compile: FX graphs, Inductor's IR, generated code. Pure functions of text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

_BYTES = {"f64": 8, "i64": 8, "c64": 8, "c128": 16, "f32": 4, "i32": 4, "f16": 2, "bf16": 2, "i16": 2, "i8": 1, "u8": 1,
          "b8": 1, "f8e4m3fn": 1, "f8e5m2": 1}  # fmt: skip
_TORCH_BYTES = {"float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "float32": 4, "int32": 4, "float16": 2,
                "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1,
                "float8_e5m2": 1}  # fmt: skip
_VIEWS = {
    "permute", "view", "_unsafe_view", "reshape", "expand", "slice", "select", "unsqueeze", "squeeze", "transpose",
    "as_strided", "alias", "detach", "split", "t", "split_with_sizes", "unbind", "diagonal", "lift_fresh_copy",
    "view_as_real", "view_as_complex",
}  # fmt: skip
_TYPED = re.compile(r'(\w+): "(\w+)\[([^\]]*)\]')
_CALL = re.compile(r"^\s+(\w+)(?:: \"(?:[^\"]*)\")? = ([\w.]+)\(([^;\n]*)\)(?:;|$|\s*#)", re.MULTILINE)
_ITEM = re.compile(r"^\s+(\w+)(?:: \"(?:[^\"]*)\")? = (\w+)\[\d+\]", re.MULTILINE)
_ATEN = re.compile(r"torch\.ops\.(\w+)\.(\w+)")
_WORD = re.compile(r"\b[A-Za-z_]\w*\b")


def targets(graph: str) -> list[str]:
    """Called functions of a printed FX graph, without items of results that are tuples."""
    return [target for _, target, _ in _CALL.findall(graph) if not target.startswith(("fx_pytree", "self._"))]


def captured_ops(graph: str) -> int:
    """Calls in a printed FX graph."""
    return len(targets(graph))


def aten_ops(graph: str) -> int:
    """Number of torch operators in a printed graph, without views, which compute nothing."""
    return sum(1 for _, target, _ in _CALL.findall(graph) if (op := _ATEN.match(target)) and op[2] not in _VIEWS)


def tensor_bytes(graph: str) -> dict[str, int]:
    """Bytes by name of each tensor with a printed type; tensors with a symbolic size are left out."""
    found = {}
    for name, dtype, sizes in _TYPED.findall(graph):
        shape = [size.strip() for size in sizes.split(",") if size.strip()]
        if dtype in _BYTES and all(size.isdigit() for size in shape):
            found[name] = _BYTES[dtype] * prod(map(int, shape))
    return found


def bytes_unfused(graph: str) -> int | None:
    """Bytes read and written if each operator of a printed graph ran by itself; None where a size is symbolic."""
    known = tensor_bytes(graph)
    typed = {name for name, *_ in _TYPED.findall(graph)}
    if not typed or typed - known.keys():
        return None
    total = 0
    computed = {name for name, target, _ in _CALL.findall(graph) if _is_computed(target)}
    for name, target, arguments in _CALL.findall(graph):
        if _is_computed(target):
            read = set(_WORD.findall(arguments)) & known.keys()
            total += known.get(name, 0) + sum(known[operand] for operand in read)
    return total + sum(known.get(name, 0) for name, source in _ITEM.findall(graph) if source in computed)


def _is_computed(target: str) -> bool:
    op = _ATEN.match(target)
    return op is not None and op[2] not in _VIEWS


@dataclass(frozen=True)
class Node:
    """A node of Inductor's scheduler, with the number of elements it touches in each buffer it reads or writes."""

    name: str
    kind: str
    reads: Mapping[str, int | None]
    writes: Mapping[str, int | None]
    members: frozenset[str]


_HEAD = re.compile(r"^(\w+): (\w+)\(")
_DEP = re.compile(r"(?:MemoryDep|StarDep)\((?:name=)?'(\w+)'(?:, [^{}\n]*?(\{[^}]*\}))?")
_MEMBER = re.compile(r"\.snodes\[\d+\] =\n(\w+): ")
_LAYOUT = re.compile(r"^\s*(\w+)\.layout = \w+\('[^']*', torch\.(\w+), size=\[([^\]]*)\]", re.MULTILINE)
_USERS = re.compile(r"^\s*(\w+)\.users = \[(.*?)\]$", re.MULTILINE | re.DOTALL)
_USER = re.compile(r"node=(?:\w+\(name='(\w+)'\)|(OUTPUT))")


def ir_nodes(ir: str) -> list[Node]:
    """Nodes of a printed IR that do work; nodes that only reserve memory are left out."""
    blocks = (block.lstrip("\n") for block in re.split(r"\n\n\n+", ir.partition("\n")[2]))
    return [node for block in blocks if (node := _node(block)) and not node.kind.startswith("Nop")]


def _node(block: str) -> Node | None:
    if not (head := _HEAD.match(block)):
        return None
    name = head[1]
    reads, writes = dict[str, int | None](), dict[str, int | None]()
    for kind, listed in re.findall(
        rf"^{name}\.(writes|unmet_dependencies|met_dependencies) =\s*(\[.*?\])$", block, re.MULTILINE | re.DOTALL
    ):
        (writes if kind == "writes" else reads).update((dep, _elements(sizes)) for dep, sizes in _DEP.findall(listed))
    return Node(name, head[2], reads, writes, frozenset(_MEMBER.findall(block)) or frozenset({name}))


def _elements(ranges: str) -> int | None:
    """Elements of an iteration, from "{c0: 8, c1: 64}"; None where it is symbolic or unknown."""
    sizes = [part.partition(":")[2].strip() for part in ranges.strip("{}").split(",") if part.strip()]
    return prod(map(int, sizes)) if ranges and all(size.isdigit() for size in sizes) else None


def ir_bytes(ir: str, inputs: Mapping[str, int]) -> int | None:
    """Bytes that the nodes of a printed IR read and write; None where a buffer's size is unknown.

    A buffer that only one node writes and reads is not counted: it stays in registers or in the cache.

    inputs: bytes of the graph's inputs, by name
    """
    buffers = dict[str, tuple[int, int]]()  # elements, bytes of one
    for name, dtype, sizes in _LAYOUT.findall(ir):
        shape = [size.strip() for size in sizes.split(",") if size.strip()]
        if dtype in _TORCH_BYTES and all(size.isdigit() for size in shape):
            buffers[name] = prod(map(int, shape)), _TORCH_BYTES[dtype]
    users = {name: {op or end for op, end in _USER.findall(listed)} for name, listed in _USERS.findall(ir)}
    total = 0
    for node in ir_nodes(ir):
        for name, touched in _outside(node, users):
            if name in buffers:
                elements, size = buffers[name]
                total += size * (elements if touched is None else min(elements, touched))
            elif name in inputs:
                total += inputs[name]
            else:
                return None
    return total


def _outside(node: Node, users: Mapping[str, set[str]]) -> Iterator[tuple[str, int | None]]:
    for name, touched in node.writes.items():
        if not users.get(name) or users[name] - node.members:
            yield name, touched
    yield from ((name, touched) for name, touched in node.reads.items() if name not in node.writes)


_DEFINED = re.compile(r"^(\w+) = async_compile\.\w+\(", re.MULTILINE)
_LIBRARY = re.compile(r"\b(?:extern_kernels\.\w+|torch\.ops\.(?!inductor\b)\w+\.\w+(?:\.\w+)?|aten\.\w+(?:\.\w+)?)\(")
DIRECTION = re.compile(r"# AOT ID: \['\d+_(forward|backward|inference)'\]")


def launches(code: str) -> tuple[int, int]:
    """Numbers of kernel launches and of library calls in one call of generated code."""
    body = "\n".join(line for line in code.splitlines() if not line.lstrip().startswith("#"))
    defined = set(_DEFINED.findall(code))
    ours = sum(len(re.findall(rf"(?<!def )\b{name}(?:\.run)?\(", body)) for name in defined)
    return ours, len(_LIBRARY.findall(body))
