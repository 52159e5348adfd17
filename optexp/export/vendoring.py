"""Modules of optexp that a file takes along as text, to import them where optexp is not: kernels are many lines."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

OWN, CARRIED = "optexp", "carried"


def carried(modules: Iterable[str], beside: Iterable[Path] = ()) -> str:
    """Lines after which these modules, and their imports from optexp, are importable from a package `carried`.

    Args:
        modules: Dotted names.
        beside: Files for the folder of the first module.
    """
    waiting = [f"{OWN}.{name}" for name in modules]
    files: dict[str, str] = {}
    for name in waiting:
        file = origin(name)
        assert file is not None
        place = name.replace(".", "/").replace(OWN, CARRIED, 1)
        files[f"{place}.py"] = file.read_text()
        waiting += [other for other in imported(ast.parse(file.read_text())) if other not in waiting]
    folder = str(Path(next(iter(files))).parent)
    files |= {f"{folder}/{file.name}": file.read_text() for file in beside}
    texts = "\n".join(f"    {name!r}: r'''\n{text.replace(OWN, CARRIED)}''',  # {name}" for name, text in files.items())
    return f"SOURCES = {{\n{texts}\n}}\n{UNPACK}"


UNPACK = """\
folder = Path(tempfile.mkdtemp())  # as files, which compilers read
for name, text in SOURCES.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text.lstrip("\\n"))
sys.path.insert(0, str(folder))
"""


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules of optexp that code imports when it runs, without those for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == OWN:
            inside = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if origin(name) else node.module or "" for name in inside)
        yield from imported(node)


def origin(module: str) -> Path | None:
    """File of a module; None where the module does not exist."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # something in a module
        return None
    return Path(spec.origin) if spec and spec.origin else None
