"""`python -m optexp.run strategy=amp train.py -- --epochs 3`: a script as it is, as the workload of a comparison.

Arguments before the script are those of `python -m optexp`; arguments after it are the script's.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from optexp.__main__ import command

USAGE = """\
usage: python -m optexp.run [strategy=amp ...] train.py [--] [arguments of the script]

The script marks its loop: for batch in optexp.steps(loader, model=model, optimizer=optimizer):
Without optexp.run the mark does nothing. Overrides are those of `python -m optexp --help`."""

OVERRIDE = re.compile(r"[+~]{0,2}[a-z_][\w.@]*=")


def main() -> NoReturn:
    """The command line in `sys.argv`."""
    if len(sys.argv) == 1 or sys.argv[1] in ("-h", "--help"):
        print(USAGE)
        sys.exit(0)
    try:
        sys.argv[1:] = overrides(sys.argv[1:])
    except ValueError as error:
        print(f"optexp: {error}", file=sys.stderr)
        sys.exit(1)
    command()


def overrides(arguments: Sequence[str]) -> list[str]:
    """Arguments of `python -m optexp` for a script with its own.

    Raises:
        ValueError: no argument is a script, there is no such file, or an override stands behind it.
    """
    scripts = [index for index, argument in enumerate(arguments) if argument.endswith(".py") and "=" not in argument]
    if not scripts:
        raise ValueError("no script is named: write python -m optexp.run strategy=amp train.py -- --its arguments")
    index = scripts[0]
    path, own = Path(arguments[index]), list(arguments[index + 1 :])
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file below {Path.cwd()}")
    if own[:1] == ["--"]:
        own = own[1:]
    elif behind := [argument for argument in own if OVERRIDE.match(argument)]:
        raise ValueError(
            f"{behind[0]} stands behind the script: write it before {path}, or -- before the script's own arguments"
        )
    theirs = list(arguments[:index])
    ours = ["workload=script", f"workload.path={quoted(str(path))}"]
    ours += [f"workload.arguments=[{','.join(map(quoted, own))}]"] if own else []
    ours += [] if learns(path) or any(one.startswith("workload.mode=") for one in theirs) else ["workload.mode=forward"]
    flags_first = bool(theirs) and theirs[0].startswith("-")  # Hydra wants its overrides in one piece
    return [*theirs, *ours] if flags_first else [*ours, *theirs]


def learns(path: Path) -> bool:
    """True if the mark names an optimizer, if it may imply one, or if the script itself has no mark."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:  # running it says where
        return True
    marks = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_mark(node)]
    given = {key.arg for mark in marks for key in mark.keywords}
    implied = "model" not in given and any(getattr(node, "attr", "") == "backward" for node in ast.walk(tree))
    return not marks or "optimizer" in given or implied


def _is_mark(node: ast.Call) -> bool:
    called = ast.unparse(node.func)
    name = called.rpartition(".")[2]
    named = any(key.arg == "model" for key in node.keywords)
    return name in ("steps", "step") and (named or called == f"optexp.{name}")


def quoted(text: str) -> str:
    """A value as Hydra's grammar reads it: the same characters."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'") if text.endswith("\\") or "'" in text else text
    return f"'{escaped}'"
