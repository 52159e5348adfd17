"""Problems, workloads and solutions as flashinfer-bench and SOL-ExecBench write them. Needs no torch.

Schemas: https://github.com/flashinfer-ai/flashinfer-bench (FlashInfer Trace) and
https://github.com/NVIDIA/SOL-ExecBench, which adds axes of expressions, inputs by the reference's own function, and
`languages`. Fields that decide nothing here are not read.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import msgspec

from optexp.errors import ConfigError

ENTRY = "run"  # of every reference
LARGEST = 2**63 - 1  # of torch's sizes
HIGHEST_POWER = 64  # of which no size is a larger one
OPERATORS: dict[type[ast.AST], Callable[..., int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class Const(msgspec.Struct, frozen=True, tag_field="type", tag="const"):
    """An axis whose size is part of the problem."""

    value: int


class Var(msgspec.Struct, frozen=True, tag_field="type", tag="var"):
    """An axis whose size each workload gives."""


class Expr(msgspec.Struct, frozen=True, tag_field="type", tag="expr"):
    """An axis whose size follows from others'."""

    expression: str


Axis: TypeAlias = Const | Var | Expr


class TensorSpec(msgspec.Struct, frozen=True):
    """An input or output; `shape` names axes, or is None for a Python number."""

    shape: list[str] | None
    dtype: str
    description: str | None = None


class Definition(msgspec.Struct, frozen=True):
    """A problem: its axes, tensors in the order of arguments, and `run` in the source of its reference."""

    name: str
    axes: dict[str, Axis]
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    reference: str
    op_type: str | None = None
    custom_inputs_entrypoint: str | None = None


class Random(msgspec.Struct, frozen=True, tag_field="type", tag="random"):
    """Values drawn anew for every batch."""


class Scalar(msgspec.Struct, frozen=True, tag_field="type", tag="scalar"):
    """A Python number."""

    value: bool | int | float


class Stored(msgspec.Struct, frozen=True, tag_field="type", tag="safetensors"):
    """A tensor of a file."""

    path: str
    tensor_key: str


class Custom(msgspec.Struct, frozen=True, tag_field="type", tag="custom"):
    """A tensor of the reference's function `custom_inputs_entrypoint`."""


class CaseSpec(msgspec.Struct, frozen=True):
    """A workload: sizes of the axes, and the source of each input."""

    uuid: str
    axes: dict[str, int]
    inputs: dict[str, Random | Scalar | Stored | Custom]


class Traced(msgspec.Struct, frozen=True):
    """A line of flashinfer-bench's workloads."""

    definition: str
    workload: CaseSpec


class SourceFile(msgspec.Struct, frozen=True):
    """A file of a solution; without a content it lies beside the solution's JSON."""

    path: str
    content: str = ""


class CompileOptions(msgspec.Struct, frozen=True):
    """Flags of compilers and linker."""

    cflags: list[str] = []
    cuda_cflags: list[str] = msgspec.field(default_factory=lambda: ["-O3", "--use_fast_math"])
    ld_flags: list[str] = msgspec.field(default_factory=lambda: ["-lcuda"])


class BuildSpec(msgspec.Struct, frozen=True):
    """How a solution is built and called. flashinfer-bench has one `language`, SOL-ExecBench several `languages`."""

    entry_point: str
    language: str | None = None
    languages: list[str] = []
    destination_passing_style: bool = True
    binding: str | None = None
    compile_options: CompileOptions | None = None

    @property
    def file(self) -> str:
        return self.entry_point.partition("::")[0]

    @property
    def function(self) -> str:
        return self.entry_point.partition("::")[2]

    @property
    def compiled(self) -> bool:
        """Whether it is C++ or CUDA C++."""
        return not self.file.endswith(".py")

    @property
    def bound_by(self) -> str:
        """The binding of C++ code; each suite has its own default."""
        return self.binding or ("torch" if self.languages else "tvm-ffi")


class Solution(msgspec.Struct, frozen=True):
    """An implementation of a definition, with its sources."""

    name: str
    definition: str
    spec: BuildSpec
    sources: list[SourceFile]
    author: str = ""


def filled(solution: Solution, folder: Path) -> Solution:
    """The solution with the contents of files that lie beside its JSON.

    Args:
        folder: Of the JSON.
    """

    def content(source: SourceFile) -> SourceFile:
        beside = folder / source.path
        held = bool(source.content) or not beside.is_file()
        return source if held else msgspec.structs.replace(source, content=beside.read_text())

    return msgspec.structs.replace(solution, sources=[content(source) for source in solution.sources])


def sizes(definition: Definition, case: CaseSpec) -> dict[str, int]:
    """The size of every axis.

    Raises:
        ConfigError: the workload lacks an axis, or an expression cannot be evaluated.
    """
    found = {name: axis.value for name, axis in definition.axes.items() if isinstance(axis, Const)} | case.axes
    waiting = {name: axis.expression for name, axis in definition.axes.items() if isinstance(axis, Expr)}
    while waiting:
        ready = [name for name, text in waiting.items() if _names(text) <= found.keys()]
        if not ready:  # they need an axis that has none
            break
        found |= {name: evaluated(waiting.pop(name), found) for name in ready}
    if missing := definition.axes.keys() - found.keys():
        raise ConfigError(f"{definition.name}: workload {case.uuid} gives no size of {', '.join(sorted(missing))}")
    return found


def shape(spec: TensorSpec, known: Mapping[str, int]) -> list[int] | None:
    """The sizes of a tensor; None for a Python number.

    Raises:
        ConfigError: the shape names an axis that does not exist.
    """
    if spec.shape is None:
        return None
    return [known[axis] if axis in known else evaluated(axis, known) for axis in spec.shape]


def evaluated(expression: str, known: Mapping[str, int]) -> int:
    """An arithmetic expression of axes.

    Raises:
        ConfigError: it holds anything else than numbers, axes and operators, or its value is no integer.
    """
    try:
        value = _value(ast.parse(expression, mode="eval").body, known)
        size = int(value)
    except (SyntaxError, KeyError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise ConfigError(f"the axis expression {expression!r} cannot be evaluated: {error}") from None
    if value != size or not 0 <= size <= LARGEST:
        raise ConfigError(f"the axis expression {expression!r} gives {value}, which is no size")
    return size


def _value(node: ast.AST, known: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.Name(id=name):
            return known[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            first, second = _value(left, known), _value(right, known)
            if isinstance(op, ast.Pow) and abs(second) > HIGHEST_POWER:
                raise OverflowError(f"the power {second} is too high")
            return OPERATORS[type(op)](first, second)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(operand, known))
    raise TypeError(f"{type(node).__name__} is no arithmetic")


def _names(expression: str) -> set[str]:
    try:
        return {node.id for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Name)}
    except SyntaxError:
        return set()  # evaluating it says where
