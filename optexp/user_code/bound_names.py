"""Names that a Python file binds, from its source alone: the file is not imported."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator, Set
from pathlib import Path

INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
UNTOLD = frozenset(
    ["globals", "exec", "setattr", "__getattr__", "modules"]
)  # names that bind, or find, others at run time


def missing(file: Path, name: str, untold: Set[str] = UNTOLD) -> list[str] | None:
    """The file's own classes, aliases and functions where none of its statements can bind `name`; None where one may.

    Of installed packages, and of files with a name of `untold`, which may find names at run time, nothing is said.
    """
    path = file.resolve()
    if str(path).startswith(INSTALLED):
        return None
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):  # importing it says where
        return None
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names |= {node.attr} & untold
    if name in names or "*" in names or names & untold:
        return None
    if path.name == "__init__.py" and any(path.parent.glob(f"{name}*")):  # a module of the package
        return None
    classes = [one.name for one in tree.body if isinstance(one, ast.ClassDef)]
    functions = [one.name for one in tree.body if isinstance(one, ast.FunctionDef)]
    return [one for one in (*classes, *_other_names(tree), *functions) if not one.startswith("_")]


def init_parameters(file: Path, name: str) -> list[str] | None:
    """Parameters of a class's own `__init__` by name; None where the source does not tell which ones it takes.

    It tells nothing of what a decorator, a metaclass or another statement may put in its place.
    """
    path = file.resolve()
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return None
    bound = [one for one in tree.body if name in {*_bound(one)}]
    if str(path).startswith(INSTALLED) or len(bound) != 1 or not isinstance(kind := bound[0], ast.ClassDef):
        return None
    made = [one for one in kind.body if isinstance(one, ast.FunctionDef) and one.name in ("__init__", "__new__")]
    if kind.decorator_list or kind.keywords or len(made) != 1 or made[0].decorator_list or made[0].args.kwarg:
        return None
    return [one.arg for one in (*made[0].args.args[1:], *made[0].args.kwonlyargs)]


def _bound(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name
        return
    for one in ast.walk(statement):
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield one.name
        elif isinstance(one, ast.alias):
            yield one.asname or one.name.partition(".")[0]
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            yield one.id


def _other_names(tree: ast.Module) -> Iterator[str]:
    """`Model` of `Model = Net` and of `Model = nets.Net`."""
    for one in tree.body:
        if isinstance(one, ast.Assign) and isinstance(one.value, (ast.Name, ast.Attribute)):
            yield from (target.id for target in one.targets if isinstance(target, ast.Name))
