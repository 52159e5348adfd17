"""Names that a Python file binds, from its source alone: the file is not imported."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
UNTOLD = {"globals", "exec", "setattr", "__getattr__", "modules"}  # names that bind, or find, others at run time


def missing(file: Path, name: str) -> list[str] | None:
    """The file's own classes, aliases and functions where none of its statements can bind `name`; None where one may.

    Of installed packages, which may find names at run time, nothing is said.
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
            names |= {node.attr} & UNTOLD
    if name in names or "*" in names or names & UNTOLD:
        return None
    if path.name == "__init__.py" and any(path.parent.glob(f"{name}*")):  # a module of the package
        return None
    classes = [one.name for one in tree.body if isinstance(one, ast.ClassDef)]
    functions = [one.name for one in tree.body if isinstance(one, ast.FunctionDef)]
    return [one for one in (*classes, *_other_names(tree), *functions) if not one.startswith("_")]


def _other_names(tree: ast.Module) -> Iterator[str]:
    """`Model` of `Model = Net` and of `Model = nets.Net`."""
    for one in tree.body:
        if isinstance(one, ast.Assign) and isinstance(one.value, (ast.Name, ast.Attribute)):
            yield from (target.id for target in one.targets if isinstance(target, ast.Name))
