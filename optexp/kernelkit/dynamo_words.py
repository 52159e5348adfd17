"""Short phrases for Dynamo's reasons: why a graph ended, which guard failed, and where. Needs no torch."""

from __future__ import annotations

import re
from pathlib import PurePath

_FRAME = re.compile(r'^\s*File "(.+?)", line (\d+), in ', re.MULTILINE)
_NAMED = re.compile(
    r"(?:builtin operator|the builtin|skipped function|function|operator|method) `([^`]+?)\.?`", re.IGNORECASE
)


def place(file: str, line: int | str) -> str:
    """A line of a file as text: "net.py:12"."""
    return f"{PurePath(file).name}:{line}"


def last_frame(text: str) -> str:
    """The innermost line of a stack trace in a text, such as "net.py:12"; "" without a stack trace."""
    frames = _FRAME.findall(text)
    return place(*frames[-1]) if frames else ""


def cause(reason: str) -> str:
    """The cause of a graph break in a few words, from Dynamo's explanation of several lines."""
    head, _, rest = reason.strip().partition("\n")
    if "Tensor.item()" in head:
        return "Tensor.item()"
    if head.startswith(("Data-dependent branching", "generic_jump")):
        return "branch on the value of a tensor"
    named = _NAMED.search(rest.partition("Developer debug context")[0])
    if head.startswith("Failed to trace builtin operator") and named:
        return f"call of {named[1]}"
    if head.startswith("Call to `"):
        return f"call of {head.split('`')[1]}"
    return f"{head} ({named[1]})" if named else head


def varied(reason: str) -> str:
    """The varying value in a failed guard, such as "value of self.position" for "self.position == 7"."""
    text = re.sub(r"L\['(\w+)'\]", r"\1", reason.partition(": ")[2].splitlines()[0] if ": " in reason else reason)
    if found := re.match(r"tensor '(.+?)' (size|stride|dtype|rank)", text):
        return f"{found[2]} of {found[1]}"
    if re.match(r"___stack\d+ (?:==|is|in) ", text):
        return "value that a graph break returns"
    if found := re.match(r"([\w.\[\]'\"]+) (?:==|is|in) ", text):
        return f"value of {found[1]}"
    if found := re.match(r"___check_obj_id\((.+?), \d+\)(?:, type=<class '(?:.+\.)?(\w+)'>)?", text):
        return f"object {found[1]}{f' ({found[2]})' if found[2] else ''}"
    return text.partition("  ")[0].strip() or "call"


def guard(reason: str) -> str:
    """The guard that failed, as code: "self.position == 7"."""
    text = reason.partition(": ")[2] if re.match(r"\d+/\d+: ", reason) else reason
    return text.strip().partition("\n")[0].partition("  #")[0].strip()
