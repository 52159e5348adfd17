"""`optimized.patch`: a stack as a block of plain PyTorch in the user's own file, to apply with git or patch.

    the user's definitions ── marked block: each strategy's `patch` ── `if __name__ == "__main__":` and what follows

All text outside the block stays as it is.
"""

from __future__ import annotations

import ast
import difflib
import io
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from optexp.errors import NotCovered
from optexp.export.inlining import bound_by
from optexp.records.patch import Patch
from optexp.strategy import Notes, Strategy, UserFile, compose, environment, label

BEGIN = "# --- {stack}, verified by optexp; all other lines are as they were ---"
END = "# --- end of {stack} ---"
NO_NEWLINE = "\\ No newline at end of file\n"


def patch(
    path: Path,
    file: UserFile,
    stack: Sequence[Strategy],
    notes: Mapping[str, Notes],
    own_class: bool,
    insert: Insert | None = None,
) -> Patch:
    """The patch that puts a stack into a user's file.

    Args:
        path: Of the file.
        file: Names that it binds.
        stack: Strategies.
        notes: Of their `apply`, by name.
        own_class: The model's class is defined in this file; else the block derives one.
        insert: Puts the block into the text; `inserted` by default.
    """
    place = applied_at(path)
    try:
        with path.open("rb") as opened:
            encoding = tokenize.detect_encoding(opened.readline)[0].removesuffix("-sig")  # a mark is a character
        before = path.read_bytes().decode(encoding)
        after = (insert or inserted)(before, block(file, stack, notes, own_class), file)
    except NotCovered as reason:
        return Patch(place, reason=str(reason))
    return Patch(place, diff(place, before, after).encode(encoding))


def applied_at(path: Path) -> str:
    """A file's path from the root of its git repository; outside one, from the working folder, else its name."""
    path = path.resolve()
    for folder in path.parents:
        if (folder / ".git").exists():
            return path.relative_to(folder).as_posix()
    return path.relative_to(Path.cwd()).as_posix() if Path.cwd() in path.parents else path.name


# --- the block ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Lines for a user's file.

    imports: statements, one a line
    body:    all other lines
    """

    stack: str
    imports: tuple[str, ...]
    body: str

    @property
    def defined(self) -> set[str]:
        """Names that the body binds."""
        return {name for node in ast.parse(self.body).body for name in bound_by(node)}

    def text(self, has: set[str]) -> str:
        """The lines between their marks.

        Args:
            has: Imports of the file, which are left out.
        """
        imports = [line for line in self.imports if line not in has]
        head = "".join(f"{line}\n" for line in (BEGIN.format(stack=self.stack), *imports))
        head += "\n" * (2 if defines(self.body, 0) else bool(imports))
        return f"{head}{self.body}\n" + "\n\n" * defines(self.body, -1) + END.format(stack=self.stack) + "\n"


def block(file: UserFile, stack: Sequence[Strategy], notes: Mapping[str, Notes], own_class: bool) -> Block:
    """The lines of a stack.

    Raises:
        NotCovered: a member cannot be put into a file.
    """
    if not stack:
        raise NotCovered("the stack is empty")
    imports, bodies = ["import torch"], list[str]()
    if not own_class and file.forward != file.model:
        bodies.append(
            f'class {file.model}({file.model}):\n    """A class of this file: what else uses that one keeps it."""'
        )
    for strategy in compose(stack):
        try:
            lines = strategy.patch(notes.get(strategy.name, {}), file).strip("\n")
        except NotCovered as reason:
            raise NotCovered(f"{strategy.name}: {reason}") from reason
        found = [line for line in lines.splitlines() if line.startswith(("import ", "from "))]
        imports += [line for line in found if line not in imports]
        bodies.append("\n".join(line for line in lines.splitlines() if line not in found).strip("\n"))
    if variables := environment(stack):
        raise NotCovered(f"{', '.join(variables)} must be set before Python starts, which no file can do for itself")
    return Block(label(stack), tuple(ordered(imports)), spaced(bodies))


def ordered(imports: Sequence[str]) -> list[str]:
    """Whole modules first, then names of modules; the standard library before torch."""
    return sorted(imports, key=lambda line: (" torch" in line, line.startswith("from"), line))


def spaced(bodies: Sequence[str]) -> str:
    """Lines of one strategy after another, with two blank lines around definitions."""
    text = bodies[0]
    for body in bodies[1:]:
        text += ("\n\n\n" if defines(text, -1) or defines(body, 0) else "\n") + body
    return text


def defines(text: str, index: int) -> bool:
    """Whether the first (0) or the last (-1) statement is a definition."""
    return isinstance(ast.parse(text).body[index], (ast.FunctionDef, ast.ClassDef))


# --- the file ----------------------------------------------------------------------------------------------------


def inserted(text: str, added: Block, file: UserFile) -> str:
    """The file's text with the block behind its definitions, before what runs only as a script.

    Raises:
        NotCovered: names of the block are taken, or a part is defined after the place.
    """
    if "\r" in text.replace("\r\n", ""):
        raise NotCovered("lines of the file end in a carriage return alone")
    tree = ast.parse(text.removeprefix("\ufeff"))
    names = {name for node in tree.body for name in bound_by(node)}
    parts = {file.model, file.loss, file.optimizer, file.loader, file.train_step} - {None}
    if taken := sorted((added.defined - parts) & names):
        raise NotCovered(f"the file has a name {taken[0]} of its own, which the block would bind anew")
    guards = [node for node in tree.body if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)]
    if guards:
        late = {name for node in tree.body if node.lineno > guards[0].lineno for name in bound_by(node)} & parts
        if late:
            raise NotCovered(f"{sorted(map(str, late))[0]} is defined below `if __name__ == ...`: move it above")
    newline = "\r\n" if "\r\n" in text else "\n"
    lines = added.text(imported_by(tree)).replace("\n", newline)
    rows = lines_of(text)
    if not guards:
        end = "" if text.endswith("\n") else newline
        return text + end + newline * 2 + lines
    row = guards[0].lineno - 1
    while row and rows[row - 1].startswith("#"):
        row -= 1
    return "".join(rows[:row]) + lines + newline * 2 + "".join(rows[row:])


def behind_class(text: str, added: Block, file: UserFile) -> str:
    """The text of a script with the block behind the class of its model: what follows may train at once.

    Raises:
        NotCovered: the class is not at the top level, or names of the block are taken.
    """
    tree = ast.parse(text.removeprefix("\ufeff"))
    kinds = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == file.model]
    if not kinds:
        raise NotCovered(f"the class {file.model} is not at the top level of the file")
    names = {name for node in tree.body for name in bound_by(node)} - {file.model}
    if taken := sorted(added.defined & names):
        raise NotCovered(f"the file has a name {taken[0]} of its own, which the block would bind anew")
    newline, end, rows = "\r\n" if "\r\n" in text else "\n", kinds[0].end_lineno or 0, lines_of(text)
    before = ast.Module([node for node in tree.body if node.lineno < end], [])
    lines = added.text(imported_by(before)).replace("\n", newline)
    return "".join(rows[:end]) + newline * 2 + lines + "".join(rows[end:])


Insert = Callable[[str, Block, UserFile], str]


def lines_of(text: str) -> list[str]:
    """Lines with their ends, as git and Python count them."""
    return list(io.StringIO(text, newline="\n"))


def imported_by(tree: ast.Module) -> set[str]:
    """Imports at a file's top level, a statement for each name."""
    found = set()
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                called = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
                front = f"from {node.module} import" if isinstance(node, ast.ImportFrom) else "import"
                found.add(f"{front} {called}")
    return found


def diff(path: str, before: str, after: str) -> str:
    """A unified diff whose lines keep their own ends."""
    end = "\t" if " " in path else ""  # as git writes names with blanks
    rows = difflib.unified_diff(lines_of(before), lines_of(after), f"a/{path}{end}", f"b/{path}{end}", n=3)
    return "".join(finished(rows))


def finished(rows: Iterator[str]) -> Iterator[str]:
    """A diff's rows; a last line without an end is marked as one."""
    for row in rows:
        yield row if row.endswith("\n") else f"{row}\n{NO_NEWLINE}"
