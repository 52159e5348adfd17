"""A user's file as a module: a member of its package, or as if Python had been started in its folder.

While it runs, `sys.argv` is its path alone: no script reads the arguments of the process.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import SOURCE_SUFFIXES, SourceFileLoader
from pathlib import Path
from traceback import extract_tb
from types import CodeType, FunctionType, ModuleType

from optexp.errors import ConfigError, first_line
from optexp.support.random_state import seed_all
from optexp.user_code.once_only import several_times
from optexp.user_code.texts import from_source

SEED = 0  # of random numbers that a file draws while it runs: the same in every process, after whatever ran before


@dataclass(frozen=True)
class Place:
    """A file, its dotted name, and the folder on `sys.path` that it has this name in."""

    path: Path
    name: str
    root: Path

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]

    @property
    def folders(self) -> tuple[Path, Path]:
        """Folders that its imports are found in."""
        return self.root, self.path.parent


@dataclass(frozen=True)
class Imported:
    """displaced: top-level names that modules of another folder had before this file was imported"""

    module: ModuleType
    place: Place
    displaced: list[str]


class FromSource(SourceFileLoader):
    """A loader without bytecode files: one belongs to the time of its source in whole seconds and to its size, so that
    a file written twice within a second may come with its first code."""

    def get_code(self, fullname: str) -> CodeType:
        return from_source(self)


_imported: dict[Path, Imported] = {}
_folders: set[Path] = set()  # of files that were imported, on `sys.path`


def import_file(path: Path, key: str, anew: bool = False) -> ModuleType:
    """The module of a file.

    Args:
        key: the option that names the file
        anew: run the file again, though it was imported before: no other program has its globals

    Raises:
        ConfigError: there is no such file, it is no Python, or it ends in `sys.exit`
    """
    return imported(path, key, anew).module


def imported(path: Path, key: str, anew: bool = False) -> Imported:
    """The module of a file as `import_file` returns it, with its origin.

    Raises:
        ConfigError: as for `import_file`.
    """
    require_file(path, key)
    asked, path = f"{key}={path}", path.resolve()
    if not anew and path in _imported:
        return _imported[path]
    place = place_of(path)
    loaded = sys.modules.get(place.name)
    if not anew and loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return _imported.setdefault(path, Imported(loaded, place, []))
    with as_script(path, asked), several_times(), _alone(place) as displaced:
        if not _in_package(place):
            place = Place(path, path.stem, path.parent)
        seed_all(SEED)
        module = _run(place, asked)
        displaced = sorted({*displaced, place.top} if module.__name__ != place.name else displaced)
        _imported[path] = Imported(module, place, displaced)
    return _imported[path]


def require_file(path: Path, key: str) -> None:
    """Raises ConfigError where the file that the option `key` names does not exist."""
    if not path.is_file():
        raise ConfigError(f"{key}={path}: there is no such file below {Path.cwd()}")


@contextmanager
def as_script(path: Path, asked: str) -> Iterator[None]:
    """A context in which a user's code runs as a script without arguments; `sys.argv` stays so.

    Raises:
        ConfigError: the code ends in `sys.exit`
    """
    sys.argv = [str(path)]
    try:
        yield
    except SystemExit as ending:
        raise ConfigError(_ended(ending, asked)) from None


def place_of(path: Path) -> Place:
    """Folders with an `__init__.py` are packages; so are as many more as relative imports in the file climb, and then
    all folders below the working folder."""
    folders: list[str] = []
    root = path.parent
    while (root / "__init__.py").is_file() and _importable(root):
        folders, root = [root.name, *folders], root.parent
    if (climbed := _climbed(path)) > len(folders):
        here = Path.cwd()
        while _importable(root) and (len(folders) < climbed or (here in root.parents and root != here)):
            folders, root = [root.name, *folders], root.parent
    stem = path.stem.replace(".", "_")  # net.v2.py is in no package "net"
    name = path.parent.name if stem == "__init__" and folders else stem
    folders = folders[:-1] if stem == "__init__" else folders
    return Place(path, ".".join([*folders, name]), root)


def _importable(folder: Path) -> bool:
    return "." not in folder.name and folder != folder.parent


def _climbed(path: Path) -> int:
    """How many folders up the relative imports of a file go: 1 for `from .parts import Block`."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # running it says where
        return 0
    return max((node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)), default=0)


def _in_package(place: Place) -> bool:
    """Import its package. Not every script that lies in one can do so, nor needs to."""
    parent = place.name.rpartition(".")[0]
    try:
        if parent:
            importlib.import_module(parent)
    except Exception:
        if _climbed(place.path):
            raise
        return False
    return True


def _run(place: Place, asked: str) -> ModuleType:
    name, (parent, _, stem) = place.name, place.name.rpartition(".")
    loaded = sys.modules.get(name)
    if not parent and loaded is not None and getattr(loaded, "__file__", None) != str(place.path):
        name = _unlike(name, place.path)  # an installed module has its name
    inside = [str(place.path.parent)] if place.path.stem == "__init__" else None
    if place.path.suffix not in SOURCE_SUFFIXES:
        raise ConfigError(f"{asked} is not a Python file")
    loader = FromSource(name, str(place.path))
    spec = importlib.util.spec_from_file_location(name, place.path, loader=loader, submodule_search_locations=inside)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where a DataLoader's workers find its classes
    loader.exec_module(module)
    if parent:
        setattr(sys.modules[parent], stem, module)
    return module


# --- files of the same name in several folders ------------------------------------------------------------------


@contextmanager
def _alone(place: Place) -> Iterator[list[str]]:
    """Inside, imports find the modules of the file's own folders first, where files of other folders had some of the
    same names. Those keep their names, and the file's get others. Yields such names."""
    _put_on_path(place)
    loaded = {name: name.partition(".")[0] for name in list(sys.modules)}
    tops = sorted(top for top in set(loaded.values()) if _rivals(top, place))
    others = {name: sys.modules[name] for name, top in loaded.items() if top in tops}
    for name in others:
        del sys.modules[name]
    try:
        yield tops
    finally:
        for name in [name for name in list(sys.modules) if name.partition(".")[0] in tops]:
            top, _, rest = name.partition(".")
            _rename(sys.modules.pop(name), ".".join([_unlike(top, place.root), rest]).rstrip("."))
        sys.modules.update(others)


def _put_on_path(place: Place) -> None:
    root, inner = map(str, place.folders)
    if root in sys.path and place.root in _folders:
        sys.path.remove(root)
    if root not in sys.path:
        sys.path.insert(0, root)
    if inner not in sys.path:  # of a package: last, so that its files hide none of Python's
        sys.path.append(inner)
    _folders.update(place.folders)


def _rivals(top: str, place: Place) -> bool:
    """Whether a module that is loaded comes from another folder than the file's import of that name would."""
    module = sys.modules.get(top)
    file, inside = getattr(module, "__file__", None), list(getattr(module, "__path__", ()) or ())
    if not (file or inside):
        return False
    found = Path(inside[0]).parent if inside else Path(str(file)).parent
    a_users = found in _folders or (top == place.top != place.name)
    return a_users and found not in place.folders and any(_holds(folder, top) for folder in place.folders)


def _holds(folder: Path, top: str) -> bool:
    return (folder / f"{top}.py").is_file() or (folder / top).is_dir()


def _unlike(name: str, folder: Path) -> str:
    return f"{name}_{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"


def _rename(module: ModuleType, name: str) -> None:
    """Everywhere a compiler or pickle reads the name: it would find the other module of this name."""
    old, package = module.__name__, getattr(module, "__package__", None)
    for value in list(vars(module).values()):
        if isinstance(value, (type, FunctionType)) and value.__module__ == old:
            with suppress(AttributeError, TypeError):
                value.__module__ = name
    module.__name__ = name
    if module.__spec__ is not None:
        module.__spec__.name = name
    if package:
        module.__package__ = name if hasattr(module, "__path__") else name.rpartition(".")[0]
    sys.modules[name] = module


# --- words ------------------------------------------------------------------------------------------------------


def spoken(ending: SystemExit) -> str:
    """The message of argparse, click or the code itself, as it ends the process."""
    said, trace = "", ending.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_name == "error" and frame.f_globals.get("__name__") == "argparse":
            said = str(frame.f_locals.get("message", ""))
        trace = trace.tb_next
    if not said and ending.__context__ is not None:
        cause = ending.__context__
        said = str(cause.format_message()) if hasattr(cause, "format_message") else first_line(cause)
    return said or (ending.code if isinstance(ending.code, str) else "")


def _ended(ending: SystemExit, asked: str) -> str:
    """A sentence on code that calls `sys.exit`, with its line and what argparse or click says."""
    said = spoken(ending)
    file = Path(sys.argv[0])
    lines = [frame for frame in extract_tb(ending.__traceback__) if frame.filename == str(file)]
    where = f" in line {lines[-1].lineno} ({lines[-1].line})" if lines else ""
    code = "" if ending.code is None or isinstance(ending.code, str) else ending.code
    return (
        f"{asked} calls sys.exit({code}) while it is imported{where}{f': {said}' if said else ''}: put the lines that"
        ' run a script below `if __name__ == "__main__":`; sys.argv holds the script\'s name alone'
    )
