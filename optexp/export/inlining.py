"""Definitions copied out of their modules, with all that they use, into a file that runs without those modules."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import symtable
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import MethodDescriptorType, ModuleType
from typing import Any

import torch
from torch import fx

from optexp.errors import NotCovered

OWN = "optexp"
BUILTINS = set(dir(__builtins__)) if isinstance(__builtins__, ModuleType) else set(__builtins__)


@dataclass(frozen=True)
class Definition:
    """The binding of a name in a module: statements, or an import."""

    statements: tuple[ast.stmt, ...]
    text: str

    @property
    def imported(self) -> bool:
        return isinstance(self.statements[0], (ast.Import, ast.ImportFrom))


class Inliner:
    """Collects imports and copied definitions in the order in which they must stand.

    modules:   what is copied from, besides optexp itself; all else is imported
    reserved:  names that the file uses for other things
    """

    def __init__(self, modules: Iterable[str] = (), reserved: Iterable[str] = ()) -> None:
        self.modules = set(modules)
        self.origins = dict.fromkeys(reserved, "the file")
        self.names: dict[str, set[str]] = defaultdict(set)  # imported ones by module; "" is the module itself
        self.copied: list[str] = []
        self._done: set[str] = set()

    def copies_from(self, module: str) -> bool:
        return module.partition(".")[0] == OWN or module in self.modules

    def take(self) -> str:
        """Definitions copied since the last call."""
        copied, self.copied = self.copied, []
        return "\n\n\n".join(copied)

    def imports(self) -> str:
        """All imports so far: the standard library's first."""
        lines: dict[bool, list[str]] = {True: [], False: []}
        for module in sorted(self.names):
            names = self.names[module]
            standard = module.partition(".")[0] in sys.stdlib_module_names
            lines[standard] += sorted(name for name in names if name.startswith("import "))
            if plain := sorted(name for name in names if not name.startswith("import ")):
                lines[standard].append(f"from {module} import {', '.join(plain)}")
        ordered = [sorted(group, key=lambda line: line.startswith("from")) for group in lines.values()]
        return "\n\n".join("\n".join(group) for group in ordered if group)

    def add_import(self, line: str) -> None:
        for statement in ast.parse(line).body:
            assert isinstance(statement, (ast.Import, ast.ImportFrom))
            for alias in statement.names:
                self._import(statement, alias)

    def lines(self, text: str, module: str) -> str:
        """The same lines without imports; definitions that they use or import from copied modules are copied.

        Args:
            text: Lines of the exported file itself.
            module: Its names may be used without an import.

        Raises:
            NotCovered: a definition cannot be copied.
        """
        tree = ast.parse(text)
        imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        bound = {name for node in tree.body for name in bound_by(node)} | self.origins.keys()
        for node in imports:
            for alias in node.names:
                self._import(node, alias)
        skipped = {line for node in imports for line in range(node.lineno, (node.end_lineno or 0) + 1)}
        kept = "\n".join(line for number, line in enumerate(text.splitlines(), 1) if number not in skipped)
        for name in sorted(uses(tree.body) - bound):
            if name in definitions(module):
                self.need(module, name)
        return kept.strip("\n")

    def need(self, module: str, name: str) -> None:
        """Copy the definition of `name` in `module`, or import it as that module does.

        Raises:
            NotCovered: the module has no definition that could be copied, or its name is taken by another.
        """
        definition = definitions(module).get(name)
        if definition is None:
            raise NotCovered(f"{module} has no definition of {name} that could be copied")
        if definition.imported:
            for node in definition.statements:
                assert isinstance(node, (ast.Import, ast.ImportFrom))
                for alias in node.names:
                    if (alias.asname or alias.name.partition(".")[0]) == name:
                        self._import(node, alias)
            return
        if self.origins.setdefault(name, module) != module:
            raise NotCovered(f"{name} of {module} would take the name of another, of {self.origins[name]}")
        if definition.text in self._done:
            return
        self._done.add(definition.text)
        self.code(definition.statements, module)
        self.copied.append(definition.text)

    def code(self, statements: Iterable[ast.stmt], module: str) -> None:
        """Copy the definitions that these statements of a module use.

        Raises:
            NotCovered: a function imports from a copied module, or a definition cannot be copied.
        """
        statements = list(statements)
        for statement in statements:
            for node in ast.walk(statement):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                if any(map(self.copies_from, names)):
                    raise NotCovered(f"{module} imports {names[0]} inside a function")
        for name in sorted(uses(statements)):
            if name in definitions(module):
                self.need(module, name)
        for name in sorted(annotated(statements)):
            if self._is_alias(module, name):
                self.need(module, name)

    def _is_alias(self, module: str, name: str) -> bool:
        """Whether a name of an annotation can be had without copying a class: annotations are never evaluated."""
        definition = definitions(module).get(name)
        if definition is None:
            return False
        first = definition.statements[0]
        if isinstance(first, ast.ImportFrom) and self.copies_from(first.module or ""):
            return self._is_alias(first.module or "", name)
        if isinstance(first, (ast.Import, ast.ImportFrom)):
            return True
        return isinstance(first, ast.Assign) and all(self._is_alias(module, n) for n in uses(definition.statements))

    def _import(self, node: ast.Import | ast.ImportFrom, alias: ast.alias) -> None:
        called = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
        if isinstance(node, ast.Import):
            if self.copies_from(alias.name):
                raise NotCovered(f"it needs the module {alias.name} as a whole")
            self.names[alias.name].add(f"import {called}")
        elif self.copies_from(node.module or ""):
            if alias.asname not in (None, alias.name):
                raise NotCovered(f"{alias.name} of {node.module} is called {alias.asname}")
            self.need(node.module or "", alias.name)
        elif node.module != "__future__":
            self.names[node.module or ""].add(called)


# --- what there is -----------------------------------------------------------------------------------------------


@cache
def definitions(module: str) -> dict[str, Definition]:
    """Names that a module's top level binds, without those for type checkers.

    Raises:
        NotCovered: the module's source is not in a file.
    """
    try:
        source = inspect.getsource(importlib.import_module(module))
    except (OSError, TypeError) as error:
        raise NotCovered(f"the source of {module} is not in a file") from error
    found: dict[str, list[ast.stmt]] = defaultdict(list)
    for node in ast.parse(source).body:
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            for name in bound_by(node):
                found[name].append(node)
    lines = source.splitlines()
    return {
        name: Definition(tuple(nodes), "\n".join(segment(node, lines) for node in nodes))
        for name, nodes in found.items()
    }


def bound_by(node: ast.stmt) -> Iterator[str]:
    """The names that a top-level statement binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    else:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                yield inner.id


def segment(node: ast.stmt, lines: list[str]) -> str:
    """The lines of a statement: decorators, and comments right above it, included."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)]) - 1
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return "\n".join(lines[first : node.end_lineno])


def uses(statements: Iterable[ast.stmt]) -> set[str]:
    """Names of the module's level that these statements read, without annotations."""
    bare = [_Bare().visit(ast.parse(ast.unparse(node)).body[0]) for node in statements]
    text = "\n".join(ast.unparse(ast.fix_missing_locations(node)) for node in bare)
    top = symtable.symtable(text, "file", "exec")

    def inside(table: symtable.SymbolTable) -> Iterator[str]:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (table is top or symbol.is_global()):
                yield symbol.get_name()
        for child in table.get_children():
            yield from inside(child)

    return set(inside(top)) - BUILTINS


def annotated(statements: Iterable[ast.stmt]) -> set[str]:
    """Names in annotations of functions."""
    found: list[ast.expr | None] = []
    for statement in statements:
        for node in ast.walk(statement):
            found += [node.annotation] if isinstance(node, ast.arg) else []
            found += [node.returns] if isinstance(node, ast.FunctionDef) else []
            found += [node.annotation] if isinstance(node, ast.AnnAssign) else []
    return {n.id for annotation in found if annotation for n in ast.walk(annotation) if isinstance(n, ast.Name)}


class _Bare(ast.NodeTransformer):
    """Without annotations, but for what dataclasses look at."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        self.generic_visit(node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        self.generic_visit(node)
        shown = "ClassVar" in ast.unparse(node.annotation)
        value = node.value or (ast.Name("ClassVar", ast.Load()) if shown else ast.Constant(None))
        return ast.Assign([node.target], value)


# --- objects as source -------------------------------------------------------------------------------------------


def flat_class(instance: Any, entries: Iterable[str], inliner: Inliner) -> str:
    """Source of a dataclass instance's class without its bases.

    Args:
        instance: Its fields' values become literals.
        entries: Methods that the file calls; those that they call are copied too.
        inliner: Collects definitions of other names.

    Raises:
        NotCovered: a method calls super(), or a value or definition has no source.
    """
    cls = type(instance)
    assert is_dataclass(instance)
    values = {f.name for f in fields(instance)}
    constants, methods, waiting = [], list[str](), list(dict.fromkeys(entries))
    for name in waiting:
        home, node = _member(cls, name)
        if name in values or name == "name" or node is None:
            constants.append(f"    {name} = {literal(getattr(instance, name), f'{cls.__name__}.{name}')}")
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call) and getattr(inner.func, "id", "") == "super":
                raise NotCovered(f"{home.__name__}.{name} calls super()")
            if isinstance(inner, ast.Attribute) and getattr(inner.value, "id", "") == "self":
                waiting += [inner.attr] if inner.attr not in waiting else []
        inliner.code([node], home.__module__)
        methods.append(segment(node, inspect.getsource(sys.modules[home.__module__]).splitlines()))
    body = "\n\n".join(["\n".join(constants), *methods] if constants else methods)
    doc = (inspect.getdoc(sys.modules[cls.__module__]) or "").splitlines()
    return f'class {cls.__name__}:\n    """{doc[0] if doc else cls.__name__}"""\n\n{body}'


def _member(cls: type, name: str) -> tuple[type, ast.stmt | None]:
    """The class of the hierarchy that has an attribute, and its method's code where it is one."""
    for home in cls.__mro__:
        if name in vars(home):
            found = definitions(home.__module__).get(home.__name__)
            bodies = [s.body for s in found.statements if isinstance(s, ast.ClassDef)] if found else []
            methods = [n for body in bodies for n in body if isinstance(n, ast.FunctionDef) and n.name == name]
            return home, methods[-1] if methods else None
    return cls, None


def literal(value: Any, what: str) -> str:
    """A value as source.

    Args:
        what: Subject of the message.

    Raises:
        NotCovered: the value has no literal.
    """
    text = repr(value)
    if isinstance(value, str) and '"' not in text:
        text = f'"{text[1:-1]}"'
    try:
        same = ast.literal_eval(text) == value
    except (ValueError, SyntaxError):
        same = False
    if not same:
        raise NotCovered(f"{what} is {type(value).__name__} and cannot be written down")
    return text


def code_of(model: fx.GraphModule) -> str | None:
    """`def rewritten(self, ...)` of a traced model, for a model with the same submodules and parameters.

    None where it needs values that the traced model alone holds.
    """
    if (spelled := spelled_graph(model.graph, "self")) is None:
        return None
    text, imports = spelled
    header = re.search(r"def forward\((.*?)\).*?:\n", text)
    assert header
    arguments = ast.unparse(_Bare().visit(ast.parse(header[0] + "    pass").body[0].args))  # type: ignore[attr-defined]
    body = text[header.end() :].rstrip()
    return "\n".join([*sorted(imports), f"\n\ndef rewritten({arguments}):\n{body}\n"])


def spelled_graph(graph: fx.Graph, model: str) -> tuple[str, set[str]] | None:
    """`def forward(<model>, ...)` of a graph, and its imports; None where it needs other values."""
    code = graph.python_code(model)
    if "_tensor_constant" in code.src:
        return None
    text, imports = code.src, set[str]()
    for name, value in code.globals.items():
        if not re.search(rf"\b{name}\b", text):
            continue
        if isinstance(value, MethodDescriptorType):
            text = re.sub(rf"\b{name}\b", f"torch.Tensor.{value.__name__}", text)
        elif isinstance(value, ModuleType):
            imports.add(f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}")
        elif value is torch.device:
            text = re.sub(rf"\b{name}\(", "torch.device(", text)  # `device` is the file's own
        elif getattr(value, "__module__", None) not in (None, "builtins"):
            if "." in value.__qualname__:
                return None
            text = re.sub(rf"\b{value.__name__}\b", f"{value.__name__}_result", text)  # what fx calls its values
            text = re.sub(rf"\b{name}\b", value.__name__, text)
            imports.add(f"from {value.__module__} import {value.__name__}")
        elif isinstance(value, float):
            text = re.sub(rf"\b{name}\b", f"float({name!r})", text)
    return text, imports
