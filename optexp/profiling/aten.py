"""ATen operators by their entries in `native_functions.yaml`, which ships with torch (package torchgen)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote_plus

FILE = Path("packaged", "ATen", "native", "native_functions.yaml")
REPOSITORY = "https://github.com/pytorch/pytorch"
SOURCE = "aten/src/ATen/native/native_functions.yaml"  # the same file in torch's repository


@dataclass(frozen=True)
class AtenEntry:
    """An operator's entry.

    line:   of the file, counted from 1
    schema: arguments and results, as the file writes them
    cuda:   the C++ function that computes it on a GPU; empty where it is composed of other operators
    """

    line: int
    schema: str
    cuda: str

    @property
    def place(self) -> str:
        """File and line, as editors take them."""
        return f"{SOURCE}:{self.line}"

    @property
    def url(self) -> str:
        """The entry in torch's repository, at the installed version."""
        version = metadata.version("torch").partition("+")[0]
        return f"{REPOSITORY}/blob/v{version}/{SOURCE}#L{self.line}"

    @property
    def cuda_url(self) -> str:
        """A search for the source file of the CUDA function, which torch's wheels do not name; empty without one."""
        query = f"repo:pytorch/pytorch path:aten/src/ATen/native {self.cuda}"
        return f"https://github.com/search?type=code&q={quote_plus(query)}" if self.cuda else ""


@cache
def entries() -> Mapping[str, AtenEntry]:
    """Every entry by its operator with overload ("gelu.out"); empty where torchgen has no such file."""
    spec = find_spec("torchgen")
    folders = spec.submodule_search_locations if spec is not None else None
    path = Path(folders[0]) / FILE if folders else None
    if path is None or not path.is_file():
        return {}
    by_name: dict[str, AtenEntry] = {}
    delegates: dict[str, str] = {}
    name, schema, line, block = "", "", 0, list[str]()

    def keep() -> None:
        if name:
            text = "\n".join(block)
            cuda = re.search(r"^ {4}(?:\w+, )*CUDA(?:, \w+)*: (\w+)", text, re.MULTILINE)
            by_name[name] = AtenEntry(line, schema, cuda[1] if cuda else "")
            if delegate := re.search(r"^ {2}structured_delegate: (\S+)", text, re.MULTILINE):
                delegates[name] = delegate[1]

    for number, text in enumerate(path.read_text().splitlines(), 1):
        if head := re.match(r"- func: ([\w.]+)(\(.*)", text):
            keep()
            name, schema, line, block = head[1], head[2], number, []
        else:
            block.append(text)
    keep()
    for name, other in delegates.items():
        if not by_name[name].cuda and other in by_name:
            by_name[name] = AtenEntry(by_name[name].line, by_name[name].schema, by_name[other].cuda)
    return by_name


def entry(operator: str) -> AtenEntry | None:
    """The entry of an operator, by its name in a trace ("aten::gelu"): the unnamed overload, else the first one.

    None for operators of other libraries.
    """
    library, _, name = operator.partition("::")
    if library != "aten":
        return None
    if (plain := entries().get(name)) is not None:
        return plain
    return next((candidate for full, candidate in entries().items() if full.partition(".")[0] == name), None)
