"""report.html: one file that holds everything a result rests on and asks nothing of the network."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape
from omegaconf import OmegaConf

from optexp.records import filenames
from optexp.reporting import card, front, summary
from optexp.reporting.range_tables import file_of
from optexp.reporting.sections import SECTIONS, Page
from optexp.result import Result
from optexp.support.units import byte_size, count, duration, microseconds, ratio, share, signed_bytes


def write(result: Result, path: Path) -> None:
    """Render `result` as a page of its own at `path`."""
    path.write_text(render(result, command(result, path.parent), card.paste(result, path.parent)[0]))


def render(result: Result, command: str = "", paste: str = "") -> str:
    """The page: its top, then every section that has something to show.

    Args:
        paste: The lines that a program takes over where the stack is worth proposing.
    """
    environment, page = templates(), Page(result, command)
    shown = ((name, data) for name, section in SECTIONS.items() if (data := section(page)) is not None)
    sections = [environment.get_template(f"sections/{name}.html.j2").render(section=data) for name, data in shown]
    return environment.get_template("report.html.j2").render(
        result=result,
        front=front.front(result),
        tone=front.tone(result.verdict),
        paste=paste if front.proposed(result) else "",
        sections=[*map(Markup, sections)],
    )


def fragment(result: Result) -> str:
    """A part of a page, for notebooks: what the terminal shows."""
    return (
        templates()
        .get_template("result.html.j2")
        .render(result=result, summary=summary, what_now=summary.what_now(result))
    )


@cache
def templates() -> Environment:
    """The folder of templates, with the units of the terminal."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "duration": duration,
        "us": microseconds,
        "ratio": ratio,
        "share": share,
        "count": count,
        "cell": cell,
        "precise": precise,
        "file": file_of,
        "bytes": byte_size,
        "signed_bytes": signed_bytes,
        "unit": lambda text: str(text).replace(" ", "\u00a0", 1),  # a number keeps its unit
        "breaking": breaking,
        "words": lambda name: str(name).replace("_", " "),
    }
    return environment


def command(result: Result, folder: Path) -> str:
    """The command of the same comparison: the job's own overrides, where Hydra wrote them down."""
    overrides = folder / filenames.HYDRA_OVERRIDES
    if not overrides.is_file():
        return str(result.environment.get("command") or "")
    typed = [str(text) for text in OmegaConf.load(overrides)]
    if "workload=script" in typed and result.config.get("workload.path"):
        return _script(typed, result)
    return shlex.join(["python", "-m", "optexp", *typed])


def _script(typed: Sequence[str], result: Result) -> str:
    """The command of a script, as `optexp.run` takes it: its own arguments stand behind it."""
    made = ("workload=script", "workload.path=", "workload.arguments=")
    before = [text for text in typed if not text.lstrip("+").startswith(made)]
    own = [str(argument) for argument in result.config.get("workload.arguments") or ()]
    path = str(result.config["workload.path"])
    return shlex.join(["python", "-m", "optexp.run", *before, path, *(["--", *own] if own else [])])


def breaking(label: str) -> Markup:
    """A stack's name that may break after a member and before its options."""
    return Markup(str(escape(label)).replace("+", "+<wbr>").replace("[", "<wbr>["))


def cell(value: object) -> str:
    """A value of any kind in a table: figures short, nested facts as `name value`."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {cell(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(cell(item) for item in value)
    return str(value)


def precise(value: object) -> str:
    """A value beside others that are almost the same."""
    return f"{value:.9g}" if isinstance(value, (int, float)) else "–"
