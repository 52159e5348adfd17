"""A script's mark, looked for in its source before the script runs. Nothing is imported.

What is imported from the script's own folder, from PYTHONPATH and from editable installs is read too; the standard
library and installed packages are not. Where the source does not tell what is imported, there may be a mark.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from optexp.errors import ConfigError
from optexp.user_code.bound_names import INSTALLED

UNKNOWN = {"import_module", "__import__", "exec", "run_path", "run_module", "instantiate", "spec_from_file_location"}
MARK = "for batch in optexp.steps(loader, model=model, optimizer=optimizer):"
IMPORT = "import optexp, and "
PASS_ON = ("enumerate", "tqdm", "track")  # they give the batches of what they are given
LIGHTNING = "give Lightning's Trainer `callbacks=[OptexpCallback()]`, from optexp.integrations.lightning"
CALLBACKS = {  # by module that a script without a loop of its own imports
    "lightning": LIGHTNING,
    "pytorch_lightning": LIGHTNING,
    "transformers": "add `trainer.add_callback(OptexpCallback(trainer))`, from optexp.integrations.transformers",
}


def require_mark(script: Path) -> None:
    """Return where a script has a mark, or may have one, and where it cannot be parsed: running it says where.

    Raises:
        ConfigError: no file that it imports has one, or no loop goes over it; with the line to write.
    """
    try:
        if not _may_be_marked(script.resolve()):
            raise ConfigError(
                f"{script} marks no step, nor does a module that it imports: {_advice(script)}; nothing was run"
            )
        if (line := _unused(ast.parse(script.read_bytes()))) is not None:
            raise ConfigError(
                f"{script}:{line} calls optexp.steps and no loop goes over what it returns:"
                f" {_advice(script).removeprefix(IMPORT)}; nothing was run"
            )
    except (SyntaxError, UnicodeDecodeError):
        return


def _may_be_marked(script: Path) -> bool:
    due, seen = [script], set[Path]()
    while due:
        file = due.pop()
        if file in seen:
            continue
        seen.add(file)
        tree = ast.parse(file.read_bytes())
        if _mentions(tree):
            return True
        due += [found for name, places in _imports(tree, file, script.parent) for found in _files(name, places)]
    return False


def _mentions(tree: ast.Module) -> bool:
    """Whether a file uses optexp, or imports what no source tells."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "optexp":
            return True
        if isinstance(node, ast.Import):
            ours = (alias for alias in node.names if alias.name.partition(".")[0] == "optexp")
            if any((alias.asname or "optexp") in names for alias in ours):
                return True
        if isinstance(node, (ast.Attribute, ast.Name)) and ast.unparse(node).split(".")[-1] in UNKNOWN:
            return True
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.path":
            return True
    return False


def _unused(tree: ast.Module) -> int | None:
    """The line of the only use of optexp in a script where that is a call of `steps` whose result nothing uses."""
    imported = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    ours = {alias.asname or alias.name for alias in imported if alias.name == "optexp"}
    if any(isinstance(node, ast.ImportFrom) and str(node.module).startswith("optexp") for node in ast.walk(tree)):
        return None
    read = Counter(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    if sum(read[name] for name in ours) != 1:
        return None
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Call(func=called)):
                name = ""
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=called)):
                pass
            case _:
                continue
        if ast.unparse(called) in {f"{one}.steps" for one in ours} and not read[name]:
            return node.lineno
    return None


def _imports(tree: ast.Module, file: Path, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Dotted names that may be modules, with the folders to look in."""
    everywhere = [str(folder), *sys.path]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, everywhere) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            places = [str(file.parents[node.level - 1])] if node.level else everywhere
            names = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]  # modules, or parts
            yield from ((name, places) for name in names)


def _files(name: str, places: Sequence[str]) -> list[Path]:
    """Files of a module and of the packages around it, as far as they are not installed."""
    found = list[Path]()
    for index, part in enumerate(name.split(".")):
        spec = None if part in ("optexp", *sys.builtin_module_names) else PathFinder.find_spec(part, places)
        if spec is None and index == 0 and part not in sys.modules:
            spec = importlib.util.find_spec(part)  # of an editable install; imports nothing
        if spec is None or (spec.origin or "").startswith(INSTALLED):
            break
        found += [Path(spec.origin)] if spec.origin and spec.origin.endswith(".py") else []
        places = list(spec.submodule_search_locations or ())
    return found


# --- what to write -----------------------------------------------------------------------------------------------


def _advice(script: Path) -> str:
    """The line to add, as far as the source tells."""
    tree = ast.parse(script.read_bytes())
    model, optimizer = _owner(tree, "parameters") or "model", _owner(tree, "zero_grad") or "optimizer"
    optimizer = "optimizer" if optimizer == model else optimizer  # as in model.zero_grad()
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For) and "backward" in _methods(node)]
    if not loops:
        imported = {name.partition(".")[0] for name, _ in _imports(tree, script, script.parent)}
        callback = next((line for module, line in CALLBACKS.items() if module in imported), None)
        return callback or f"{IMPORT}mark its loop: `{MARK}`"
    return f"{IMPORT}{_marked(loops[-1], model, optimizer)}"  # the walk goes from the outside to the inside


def _marked(loop: ast.For, model: str, optimizer: str) -> str:
    """The loop's first line with its mark, inside `enumerate` and progress bars; of a loop over numbers, its body's."""
    head = ast.For(target=loop.target, iter=copy.deepcopy(loop.iter), body=[ast.Pass()], orelse=[])
    outer: ast.Call | None = None
    batches = head.iter
    while isinstance(batches, ast.Call) and batches.args and ast.unparse(batches.func).split(".")[-1] in PASS_ON:
        outer, batches = batches, batches.args[0]
    if isinstance(batches, ast.Call) and ast.unparse(batches.func) == "range":
        return f"put the body of line {loop.lineno} into `with optexp.step(model={model}, optimizer={optimizer}):`"
    text = f"optexp.steps({ast.unparse(batches)}, model={model}, optimizer={optimizer})"
    marked = ast.parse(text, mode="eval").body
    if outer is None:
        head.iter = marked
    else:
        outer.args[0] = marked
    return f"write line {loop.lineno} as `{ast.unparse(ast.fix_missing_locations(head)).partition(chr(10))[0]}`"


def _methods(tree: ast.AST) -> set[str]:
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {called.attr for called in calls if isinstance(called, ast.Attribute)}


def _owner(tree: ast.AST, method: str) -> str | None:
    """The one variable whose method of this name is called; None where there are several, or none."""
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    owners = {
        ast.unparse(called.value) for called in calls if isinstance(called, ast.Attribute) and called.attr == method
    }
    return owners.pop() if len(owners) == 1 else None
