"""State that a program reads only to update or print it: a running loss, a list of losses.

No later step depends on it, so a second program without it computes the same. The source shows it: in the program's
files, each statement that reads such a name updates it, updates other such state, or prints.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

from optexp.python_state.variables import INSTALLED, functions, users

UNDER_OTHER_NAMES = {"globals", "locals", "vars", "eval", "exec", "getattr", "__dict__", "attrgetter"}
PURE = {"abs", "float", "int", "len", "max", "min", "round", "sum"}
GROW = {"add_", "append", "appendleft", "extend", "mul_"}
PRINTS = {"print", "log", "debug", "info", "warning", "add_scalar", "set_description", "set_postfix"}


def write_only(names: Collection[str], step: Callable[..., Any], model: Any) -> set[str]:
    """The names that only updates and prints read, of those that `places` gives.

    step: whose variables they are, which runs the model
    """
    keys = {name: re.split(r"[.\[]", re.sub(r" \(\d+\)$", "", name).rstrip("]"))[-1] for name in names}
    trees = list(_trees(step, model))
    kept = {key for key in keys.values() if key.isidentifier()}
    if not trees or any(tree is None or not _is_plain(tree) for tree in trees):
        return set()
    while left := {key for key in kept if not all(_free_of_reads(tree, key, kept) for tree in trees if tree)}:
        kept -= left
    return {name for name, key in keys.items() if key in kept}


def _trees(step: Callable[..., Any], model: Any) -> Iterator[ast.Module | None]:
    """Of every file of the user's that the step's code is from, or that one of these imports; None of one without."""
    every = [code.__code__.co_filename for code in functions(step) if isinstance(code, FunctionType)]
    every += [sys.modules[kind.__module__].__file__ or "" for kind in type(model).__mro__ if users(kind)]
    waiting, seen = [file for file in every if not _installed(file)], set[str]()
    while waiting:
        if (file := waiting.pop()) in seen:
            continue
        seen.add(file)
        try:
            tree = ast.parse(Path(file).read_bytes())
        except (OSError, SyntaxError, ValueError):
            yield None
            continue
        yield tree
        waiting += [found for name in _imported(tree) if (found := _file_of(name)) and not _installed(found)]


def _installed(file: str) -> bool:
    return file.startswith((*INSTALLED, str(Path(__file__).parents[1])))


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _file_of(module: str) -> str:
    return getattr(sys.modules.get(module), "__file__", None) or ""


def _is_plain(tree: ast.Module) -> bool:
    """Whether names say what is read, and what those of Python, torch and logging say."""
    known = PURE | GROW | PRINTS
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            called = known if isinstance(node, ast.Name) else known - PURE  # an attribute is no function of Python's
            bound = isinstance(node.ctx, ast.Store) and _name(node) in called
            if bound or _name(node) in UNDER_OTHER_NAMES:
                return False
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name in known:
            return False
    return True


def _free_of_reads(tree: ast.Module, key: str, kept: Collection[str]) -> bool:
    return all(_harmless(statement, key, kept) for statement in tree.body)


def _harmless(node: ast.stmt, key: str, kept: Collection[str]) -> bool:
    """Whether a statement reads `key` only to update one of `kept` or to print, or not at all."""
    if not _reads(node, key):
        return True
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return _all_kept(targets, kept) and all(_computes(part, key) for part in [*targets, node.value])
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        if _name(called) in PRINTS:
            return all(_computes(value, key) for value in _arguments(node.value))
        grows = isinstance(called, ast.Attribute) and called.attr in GROW and _all_kept([called.value], kept)
        return grows and all(_computes(value, key) for value in [called, *_arguments(node.value)])
    if isinstance(node, ast.If) and _reads(node.test, key):  # what it decides is harmless
        inside = [*node.body, *node.orelse]
        return _computes(node.test, key) and all(_tells(one, kept) and _harmless(one, key, kept) for one in inside)
    inner = [child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]
    own = {id(part) for child in inner for part in ast.walk(child)}
    if any(_reads_here(part, key) for part in ast.walk(node) if id(part) not in own):
        return False
    return all(_harmless(child, key, kept) for child in _children(node))


def _tells(node: ast.stmt, kept: Collection[str]) -> bool:
    """Whether a statement does nothing but update one of `kept`, or print."""
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return _all_kept(targets, kept) and not any(map(_calls, [*targets, node.value]))
    printed = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _name(node.value.func) in PRINTS
    return printed or isinstance(node, ast.Pass)


def _computes(value: ast.expr, key: str) -> bool:
    """Whether an expression hands `key` to no function but Python's own, and binds no name to it."""
    for node in ast.walk(value):
        if isinstance(node, (ast.NamedExpr, ast.Lambda)):
            return False
        given = isinstance(node, ast.Call) and any(_reads(argument, key) for argument in _arguments(node))
        if given and not _is_pure(node):
            return False
    return True


def _all_kept(targets: Collection[ast.expr], kept: Collection[str]) -> bool:
    """Whether every target is a variable of `kept`, or an entry of one."""
    for target in targets:
        while isinstance(target, ast.Subscript):
            target = target.value
        if _name(target) not in kept:
            return False
    return True


def _calls(value: ast.expr) -> bool:
    """Whether it runs more than some of Python's own functions."""
    return any(isinstance(node, ast.Call) and not _is_pure(node) for node in ast.walk(value))


def _is_pure(call: ast.AST) -> bool:
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in PURE


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _children(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements inside, the outermost ones."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        else:
            yield from _children(child)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _reads(node: ast.AST, key: str) -> bool:
    return any(_reads_here(part, key) for part in ast.walk(node))


def _reads_here(node: ast.AST, key: str) -> bool:
    """A variable or an attribute of this name, or a text by which one may be found."""
    if isinstance(node, ast.Constant):
        return node.value == key
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return any(alias.name == key for alias in node.names)
    return isinstance(node, (ast.Name, ast.Attribute)) and _name(node) == key and isinstance(node.ctx, ast.Load)
