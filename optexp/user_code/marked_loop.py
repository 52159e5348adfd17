"""The body of a marked statement in a script's source, as the source of a function.

    for i, (x, y) in enumerate(optexp.steps(loader, ...)):        def marked_loop(items):
        loss = net(x, y)                                    ->        nonlocal index, total
        total += loss.item()                                          for i, (x, y) in enumerate(items, index):
                                                                          loss = net(x, y) ...

Variables that the body carries from one iteration to the next stay those of the script; all others are the function's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from optexp.errors import ConfigError

FUNCTION, ITEMS, INDEX, FACTORY = "marked_loop", "optexp_items", "optexp_index", "optexp_factory"
PROGRESS = ("tqdm", "trange", "track", "progress_bar", "rich_track")  # go over their first argument
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
OTHER_BATCHES = "{}:{}: the loop goes over {}, which may change the marked batches: mark all of it"
BACKWARD = ("backward", "manual_backward")

Span = tuple[int, int, int, int]  # line, column, last line, last column, as code objects have them


@dataclass(frozen=True)
class MarkedLoop:
    """A marked statement of a file.

    line:    of the statement
    reads:   names that the body reads before it assigns them, in the order of the source
    carried: those of them that it assigns too
    shared:  others that it assigns, and functions beside it read
    losses:  names of what backward() is called on, or of what the body calls a loss
    results: other names that the body assigns
    indexed: enumerate() counts the iterations, from `first`
    """

    line: int
    target: ast.expr | None
    body: Sequence[ast.stmt]
    reads: tuple[str, ...]
    carried: tuple[str, ...]
    shared: tuple[str, ...]
    losses: tuple[str, ...]
    results: tuple[str, ...]
    indexed: bool = False
    first: ast.expr | None = None

    @property
    def kept(self) -> tuple[str, ...]:
        """Variables that the function leaves changed."""
        return (*self.carried, *self.shared, *([INDEX] * self.indexed))

    def source(self, held: Sequence[str]) -> ast.Module:
        """A module that defines a factory of `held`, which returns the function; the function returns its variables.

        Args:
            held: Names of the script's function around the loop that the body reads; none of a loop at top level.
        """
        inner = [name for name in self.kept if name in held]
        outer = [name for name in self.kept if name not in held]
        declared: list[ast.stmt] = [ast.Nonlocal(inner)] * bool(inner) + [ast.Global(outer)] * bool(outer)
        body = Bare().visit(ast.Module(self._loop(), [])).body
        function = _function(FUNCTION, [ITEMS], [*declared, *body, LOCALS])
        factory = _function(FACTORY, list(held), [function, ast.Return(_load(FUNCTION))])
        for node in (factory, function):
            node.lineno = node.end_lineno = self.line
            node.col_offset = node.end_col_offset = 0
        return ast.fix_missing_locations(ast.Module([factory], []))

    def _loop(self) -> list[ast.stmt]:
        """A loop over the items: `continue` and `break` keep their meaning."""
        items: ast.expr = _load(ITEMS)
        if self.indexed:
            items = ast.Call(_load("enumerate"), [items, _load(INDEX)], [])
        found: list[ast.stmt] = [ast.For(self.target or ast.Name("_", ast.Store()), items, list(self.body), [])]
        if self.indexed:
            counted = ast.Call(_load("len"), [_load(ITEMS)], [])
            found.append(ast.AugAssign(ast.Name(INDEX, ast.Store()), ast.Add(), counted))
        return found


def marked_loop(tree: ast.Module, span: Span, path: str) -> MarkedLoop:
    """The marked statement that was running at `span`.

    Args:
        span: Of the instruction that reached the mark.
        path: Of the file, for messages.

    Raises:
        ConfigError: the mark is not where a loop or a block begins, or the body is no function's.
    """
    within = [node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.With)) and _is_at(node, span)]
    if not within:
        raise ConfigError(
            f"{path}:{span[0]}: the mark is not at a loop: write `for batch in optexp.steps(loader, model=model,"
            " optimizer=optimizer):`, or `with optexp.step(model=model, optimizer=optimizer):`"
        )
    node = max(within, key=lambda node: node.lineno)
    scope = _scope_of(tree, node)
    _refuse(node, path)
    target, (indexed, first) = (
        (node.target, _counted(node, path)) if isinstance(node, ast.For) else (None, (False, None))
    )
    flow = Flow()
    if target is not None:
        flow.assign(target)
    flow.block(node.body)
    assigned, reads = flow.assigned | flow.maybe, tuple(flow.reads)
    others = _read_elsewhere(tree if scope is None else scope, node)
    carried = tuple(name for name in reads if name in assigned)
    shared = tuple(sorted((assigned & others) - set(carried)))
    results = tuple(sorted(assigned - set(carried) - flow.targets))
    losses = _losses(node.body) or tuple(name for name in results if "loss" in name.lower())
    return MarkedLoop(node.lineno, target, node.body, reads, carried, shared, losses, results, indexed, first)


# --- the statement -----------------------------------------------------------------------------------------------


def _is_at(node: ast.For | ast.With, span: Span) -> bool:
    """Whether an instruction belongs to the head of a statement; in Python 3.11 iter() has the statement's own span."""
    heads: list[ast.AST] = [node.iter] if isinstance(node, ast.For) else [item.context_expr for item in node.items]
    return span == _span(node) or any(_holds(_span(head), span) for head in heads)


def _span(node: Any) -> Span:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _holds(outer: Span, inner: Span) -> bool:
    return outer[:2] <= inner[:2] and inner[2:] <= outer[2:]


def _scope_of(tree: ast.Module, node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The innermost function around a statement."""
    found = None
    for other in ast.walk(tree):  # breadth first: inner ones come later
        if isinstance(other, (ast.FunctionDef, ast.AsyncFunctionDef)) and any(n is node for n in ast.walk(other)):
            found = other
    return found


def _counted(node: ast.For, path: str) -> tuple[bool, ast.expr | None]:
    """Whether enumerate() counts the iterations, and its first number.

    Raises:
        ConfigError: the loop goes over something else of the marked batches.
    """
    goes_over, counted, first = node.iter, False, None
    while isinstance(goes_over, ast.Call):
        name = goes_over.func.attr if isinstance(goes_over.func, ast.Attribute) else getattr(goes_over.func, "id", "")
        if name == "steps":
            break
        if not goes_over.args:
            raise ConfigError(OTHER_BATCHES.format(path, node.lineno, ast.unparse(goes_over)))
        if name != "enumerate" and name not in PROGRESS:
            raise ConfigError(
                f"{path}:{node.lineno}: the loop goes over {name}(...) of the marked batches: mark all of it, as in"
                f" optexp.steps({name}(...), model=model)"
            )
        if name == "enumerate":
            starts = [*goes_over.args[1:], *(key.value for key in goes_over.keywords)]
            counted, first = True, starts[0] if starts else None
        goes_over = goes_over.args[0]
    if isinstance(goes_over, COMPREHENSIONS):
        raise ConfigError(OTHER_BATCHES.format(path, node.lineno, ast.unparse(goes_over)))
    return counted, first


def _refuse(node: ast.For | ast.With, path: str) -> None:
    for inner in _own(node.body):
        if isinstance(inner, (ast.Yield, ast.YieldFrom, ast.Await)):
            kind = "await" if isinstance(inner, ast.Await) else "yield"
            raise ConfigError(
                f"{path}:{inner.lineno}: the marked body has `{kind}`, which no function of a step can have: move the"
                " work of the step into a function, and mark a loop that calls it"
            )


def _own(nodes: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """All nodes inside, but those of functions that are defined there."""
    for node in nodes:
        yield node
        if not isinstance(node, SCOPES):
            yield from _own(list(ast.iter_child_nodes(node)))


def _losses(body: Sequence[ast.stmt]) -> tuple[str, ...]:
    """Names of what backward() is called on."""
    found = dict[str, None]()
    for node in _own(body):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in BACKWARD):
            continue
        inside = [node.func.value, *node.args]
        names = [n.id for part in inside for n in ast.walk(part) if isinstance(n, ast.Name)]
        stored = {n.id for n in _own(body) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        found |= dict.fromkeys(name for name in names if name in stored)
    return tuple(found)


# --- names -------------------------------------------------------------------------------------------------------


class Flow:
    """Which names a body reads before it has assigned them for certain.

    assigned: on every path so far;  maybe: on some;  targets: by the loop itself
    """

    def __init__(self) -> None:
        self.assigned, self.maybe, self.targets = set[str](), set[str](), set[str]()
        self.reads: dict[str, None] = {}

    def assign(self, target: ast.expr) -> None:
        """Bind the loop's own variables."""
        self.targets |= {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
        self.assigned |= self.targets
        self._expression(target)

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.If(test=test, body=body, orelse=other):
                self._expression(test)
                self._branches([body, other])
            case ast.For(target=target, iter=goes_over, body=body, orelse=other):
                self._expression(goes_over)
                self._expression(target)
                self.block([*body, *other])  # that it runs at least once is likely
            case ast.While(test=test, body=body, orelse=other):
                self._expression(test)
                self.block([*body, *other])
            case ast.Try(body=body, handlers=handlers, orelse=other, finalbody=final):
                self._branches([[*body, *other], *(handler.body for handler in handlers)])
                self.block(final)
            case ast.With(items=items, body=body):
                for item in items:
                    self._expression(item.context_expr)
                    if item.optional_vars is not None:
                        self._expression(item.optional_vars)
                self.block(body)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                self._read_inside(node)
                self.assigned.add(name)
            case ast.Assign(targets=targets, value=value):
                self._expression(value)
                for target in targets:
                    self._expression(target)
            case ast.AugAssign(target=target, value=value):
                self._expression(value)
                if isinstance(target, ast.Name):
                    self._read(target.id)
                self._expression(target)
            case ast.AnnAssign(target=target, value=value):
                for part in (value, target) if value is not None else ():
                    self._expression(part)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                self.assigned |= {(alias.asname or alias.name).partition(".")[0] for alias in names}
            case _:
                self._expression(node)

    def _branches(self, branches: Sequence[Sequence[ast.stmt]]) -> None:
        """Alternatives: what all of them assign is assigned."""
        before, ends = set(self.assigned), list[set[str]]()
        for branch in branches:
            self.assigned = set(before)
            self.block(branch)
            leaves = bool(branch) and isinstance(branch[-1], (ast.Continue, ast.Break, ast.Return, ast.Raise))
            self.maybe |= self.assigned
            ends += [] if leaves else [self.assigned]
        self.assigned = set.intersection(*ends) if ends else before

    def _expression(self, node: ast.AST) -> None:
        """Names in the order of evaluation: reads first."""
        if isinstance(node, (*SCOPES, *COMPREHENSIONS)):
            self._read_inside(node)
            return
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                self._read(node.id)
            else:
                self.assigned.add(node.id)
            return
        children = list(ast.iter_child_nodes(node))
        for child in reversed(children) if isinstance(node, ast.NamedExpr) else children:  # the target is bound last
            self._expression(child)

    def _read_inside(self, node: ast.AST) -> None:
        """A function or a comprehension: its own names are not read from outside."""
        inside = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
        own = {n.id for n in inside if not isinstance(n.ctx, ast.Load)}
        own |= {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
        for name in inside:
            if name.id not in own:
                self._read(name.id)
        self.assigned |= {n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr)}

    def _read(self, name: str) -> None:
        if name not in self.assigned:
            self.reads.setdefault(name)


def _read_elsewhere(scope: ast.AST, marked: ast.AST) -> set[str]:
    """Names that other functions of a scope read, or that it declares global: they see what the body assigns."""
    inside = set(map(id, ast.walk(marked)))
    found = set[str]()
    for node in ast.walk(scope):
        if id(node) in inside or node is scope:
            continue
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            found |= set(node.names)
        elif isinstance(node, (ast.FunctionDef, ast.Lambda)):
            own = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
            own |= {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
            names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
            found |= names - own
    return found


# --- nodes -------------------------------------------------------------------------------------------------------


class Bare(ast.NodeTransformer):
    """Leaves annotations of variables out: a global one can have none."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:  # ast's name
        return ast.copy_location(ast.Assign([node.target], node.value) if node.value else ast.Pass(), node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.stmt:  # whose annotations are its fields
        return node


LOCALS = ast.Return(ast.Call(ast.Name("locals", ast.Load()), [], []))


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _function(name: str, parameters: Sequence[str], body: list[ast.stmt]) -> ast.FunctionDef:
    arguments = ast.arguments([], [ast.arg(name) for name in parameters], None, [], [], None, [])
    return ast.FunctionDef(name, arguments, body, [])
