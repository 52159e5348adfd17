"""Command lines as Hydra reads them, and Hydra's errors as advice."""

from __future__ import annotations

import re

from hydra.errors import CompactHydraException, InstantiationException, MissingConfigException, OverrideParseException

from optexp.config import search_path
from optexp.errors import ConfigError
from optexp.records.folder import refusal
from optexp.schema import suggest

OVERRIDE = re.compile(r"([\w.]+)=(.*)", re.DOTALL)
STACK = re.compile(r"\[[^]]*\]|[\w/-]+(?:\+[\w/-]+)+")


COMMAND = "regression.on_alert"  # a command of a shell, which Hydra's grammar is not for


def rewrite(arguments: list[str]) -> list[str]:
    """Arguments as Hydra reads them.

    `strategy=amp+fusion` becomes a list, an option may belong to a strategy that is not chosen, and a command is text.
    """
    return [_rewrite(argument) for argument in arguments]


def _rewrite(argument: str) -> str:
    if argument.startswith("+experiments="):
        return argument.removeprefix("+")  # a study is a choice that is there already
    match = OVERRIDE.fullmatch(argument)
    if match is None:
        return argument
    key, value = match.groups()
    if key in ("strategy", "baseline"):
        return f"{key}={STACK.sub(_as_list, value)}"
    if key == COMMAND and value not in ("", "null") and value[:1] not in ("'", '"'):
        argument = f"{key}={_as_text(value)}"
    if "." in key and not key.startswith("hydra."):
        # Added even where it does not exist: the dataclass that it is meant for says better what is allowed, and
        # in a sweep some jobs may have it and others not.
        return f"++{argument}"
    return argument


def _as_text(value: str) -> str:
    """A quoted string of Hydra's, in which nothing is special."""
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + (found[2] and "\\'"), value).replace("${", "\\${")
    return f"'{escaped}'"


def _as_list(match: re.Match[str]) -> str:
    names = match[0].replace("+", ",")
    return names if names.startswith("[") else f"[{names}]"


def explain(error: BaseException) -> str | None:
    """One sentence about a mistake in the arguments; None for an error of another kind."""
    if isinstance(error, ConfigError):
        return str(error)
    if sentence := refusal(error):
        return sentence
    if isinstance(error, OverrideParseException):
        given = (error.override or "").removeprefix("++")
        return (
            f"cannot read {given!r}: write key=value, a stack as strategy=[amp,fusion], "
            "and quote what has brackets or spaces, as in 'workload.inputs=[{shape: [32, 128]}]'"
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return f"{group}={name} is not a choice{suggest(name, search_path.options(group))}"
    if isinstance(error, ValueError) and "Config group override must be" in str(error):
        return "null is not a choice: name one, as in workload=mlp; the empty stack is strategy=[]"
    if not isinstance(error, CompactHydraException) or isinstance(error, InstantiationException):
        return None
    text = "\n".join(str(e) for e in (error, error.__cause__) if e is not None and str(e))
    if match := re.search(r"(?:Ambiguous value for argument|Sweep parameters) '([^']*)'", text):
        key, _, value = match[1].partition("=")
        return f"{match[1]} names several: write {key}=[{value}] for all of them together, or add -m to try one by one"
    if match := re.search(r"merging override \+*(\S+?)=(.*)\n.*Cannot merge DictConfig with ListConfig", text):
        return f"{match[1]}={match[2]} is not allowed: it must be a list, as in {match[1]}=[{match[2]}]"
    if match := re.search(r"Could not override '([^']*)'", text):
        known = [key for key in search_path.compose([]) if key != "hydra"]
        where = " (--cfg hydra shows them all)" if match[1].startswith("hydra") else suggest(match[1], known)
        return f"{match[1]}: there is no such key{where}"
    return " ".join(line.strip() for line in text.splitlines() if line.strip())
