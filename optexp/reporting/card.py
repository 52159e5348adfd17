"""The decision card of a pull request: a stack's gain and cost, their verification, and the lines to paste.

`card.md` is for the pull request's text, `plots/card.png` is the same as a picture: of a stack that one may propose.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from textwrap import fill
from tokenize import COMMENT, generate_tokens
from typing import Any

from optexp.records import filenames
from optexp.reporting import summary
from optexp.reporting.front import Interval, TimeBar, bars, interval, proposed
from optexp.result import Result
from optexp.support.units import duration, mebibytes, microseconds

HEADING = re.compile(r"# --- (.*?) ?-*$")  # of a section of repro.py
WIDTH, LINE, LETTERS = 8.0, 0.165, 98  # of the picture in inches, of a line of text, and its letters
NAME = 24  # letters of an arm beside its bar; a longer stack stands in the title
FEW = 8  # lines to paste that have room in the picture
GREEN, GREY, INK = "#1a7f37", "#9aa3ad", "#1c2128"


@dataclass(frozen=True)
class Card:
    """title: workload, stack and device;  facts: by name, in words;  language: of the lines to paste"""

    title: str
    headline: str
    facts: list[tuple[str, str]]
    paste: str
    language: str

    @property
    def added(self) -> list[str]:
        """The lines to paste, without what surrounds them in a patch."""
        lines = self.paste.splitlines()
        if self.language != "diff":
            return lines
        return [line[1:] for line in lines if re.match(r"\+(?!\+\+ ).", line)]


def write(result: Result, folder: Path) -> None:
    """Both files; none where there is nothing to propose, also none of before a sweep corrected the verdict."""
    if not proposed(result):
        for name in (filenames.CARD, filenames.CARD_PICTURE):
            (folder / name).unlink(missing_ok=True)
        return
    found = card(result, folder)
    (folder / filenames.CARD).write_text(markdown(found))
    draw(found, bars(result), interval(result), folder / filenames.CARD_PICTURE)


def card(result: Result, folder: Path) -> Card:
    """The card of a result.

    Args:
        folder: Of the record; the patch and repro.py are read from it.
    """
    before, after = result.baseline, result.candidate
    step = [microseconds(arm.step_us) for arm in (before, after) if arm.step_us]
    memory = [mebibytes(arm.peak_mib) for arm in (before, after) if arm.peak_mib]
    facts = [
        ("Step", " → ".join(step)),
        ("Saved", saved(result)),
        ("Paid back", paid_back(result)),
        ("Peak memory", " → ".join(memory)),
        ("Verified", summary.verified(result)),
        ("Evidence", "; ".join(summary.evidence(result))),
        ("Measured", summary.measured(result)),
        ("Disturbed", "; ".join(f"{watch.name}: {watch.text}" for watch in summary.watches(result) if not watch.ok)),
    ]
    text, language = paste(result, folder)
    title = f"{result.workload} · {result.label} · {result.device_model}"
    return Card(title, result.headline, [fact for fact in facts if fact[1]], text, language)


def saved(result: Result) -> str:
    """Over `horizon_steps`, else over a million steps, set-up not counted."""
    cost, found = result.measurement.cost if result.measurement else None, result.speedup
    if cost and cost.hours_saved is not None and cost.horizon_steps:
        surely = f" (at least {duration(cost.hours_saved_at_low * 3600)})" if cost.hours_saved_at_low else ""
        return f"{duration(cost.hours_saved * 3600)}{surely} in {cost.horizon_steps:,} steps"
    before = result.baseline.step_us
    if not (found and before and found.low > 1):
        return ""
    return (
        f"{duration(before * (1 - 1 / found.estimate))} (at least {duration(before * (1 - 1 / found.low))})"
        " in 1,000,000 steps"
    )


def paid_back(result: Result) -> str:
    """When set-up has paid for itself."""
    cost = result.measurement.cost if result.measurement else None
    if cost is None or cost.break_even_steps is None:
        return ""
    steps = cost.break_even_steps
    if isinstance(steps, str):
        return "never"
    cold = cost.paid_back == "cold"
    ours = cost.cold_setup_s if cold else cost.setup_s
    theirs = cost.first_setup_s.get("baseline") if cold else cost.baseline_setup_s
    found, before = result.speedup, result.baseline.step_us
    if steps <= 0 or ours is None or theirs is None or found is None or not before:
        return f"after {steps:,} steps" if steps > 0 else "at once"
    step_s = before / 1e6 * (1 - 1 / found.estimate)
    more = f"{duration(ours - theirs)} more set-up ({duration(ours)}, the baseline's {duration(theirs)})"
    return f"after {steps:,} steps: {more}, at {duration(step_s)} saved a step by the best estimate"


def paste(result: Result, folder: Path) -> tuple[str, str]:
    """The lines that a program takes over, and their language: the patch of the user's file, else of repro.py."""
    patch, script = folder / filenames.PATCH, folder / filenames.REPRO
    if patch.is_file():
        return patch.read_text(errors="replace").strip(), "diff"
    return (recipes(script.read_text(), result), "python") if script.is_file() else ("", "python")


def recipes(script: str, result: Result) -> str:
    """The sections of repro.py that are the stack's, behind the imports that they need."""
    names = {label.partition("[")[0] for label in result.strategy}
    kept, inside, headings = list[str](), False, _headings(script)
    for number, line in enumerate(script.splitlines(), 1):
        if heading := headings.get(number):
            inside = heading.partition(":")[0] in names
            kept += [f"# {heading}"] * inside
        elif inside:
            kept.append(line)
    text = re.sub(r"\n{2,}", "\n", "\n".join(kept)).strip()
    return "\n".join([*_imports(script, text), text])


def _headings(script: str) -> dict[int, str]:
    """Titles of the sections by line number; modules that the script carries as text have headings of their own."""
    comments = (token for token in generate_tokens(StringIO(script).readline) if token.type == COMMENT)
    found = ((token.start[0], HEADING.match(token.line)) for token in comments)
    return {line: heading[1] for line, heading in found if heading}


def _imports(script: str, used_by: str) -> list[str]:
    """The imports of a script that a part of it needs; of all but torch, which every reader has."""
    used = {node.id for node in ast.walk(ast.parse(used_by)) if isinstance(node, ast.Name)} - {"torch"}
    found = list[str]()
    for line in ast.parse(script).body:
        if isinstance(line, (ast.Import, ast.ImportFrom)):
            line.names = [each for each in line.names if (each.asname or each.name) in used]
            found += [ast.unparse(line)] if line.names else []
    return found


def markdown(found: Card) -> str:
    """The card as text; long lines to paste are folded, as GitHub and GitLab show them."""
    rows = "\n".join(f"| {name} | {text} |" for name, text in ((n, t.replace("|", "\\|")) for n, t in found.facts))
    parts = [f"### {found.headline.partition(' (')[0]}", found.title, f"| | |\n|---|---|\n{rows}", found.headline]
    if found.paste:
        code = f"```{found.language}\n{found.paste}\n```"
        parts.append(f"<details><summary>Lines to paste</summary>\n\n{code}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def draw(found: Card, times: list[TimeBar], ends: Interval | None, path: Path) -> None:
    """The card as a picture."""
    from matplotlib.figure import Figure  # takes half a second to import

    told = [fill(found.title, LETTERS, subsequent_indent="    ")]
    told += [fill(f"{name}: {text}", LETTERS, subsequent_indent="    ") for name, text in found.facts]
    code = found.added
    told += ["", *code] if 0 < len(code) <= FEW else []
    below = LINE * sum(text.count("\n") + 1 for text in told)
    figure = Figure(figsize=(WIDTH, below + 1.9), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.1, below))
    figure.suptitle(found.headline.partition(" (")[0], fontsize=17, fontweight="bold", color=INK)
    axes = figure.add_subplot(grid[0, 0])
    axes.barh(
        [bar.arm if len(bar.arm) <= NAME else "candidate" for bar in times],
        [bar.share for bar in times],
        color=(GREY, GREEN),
    )
    for place, bar in enumerate(times):
        axes.annotate(bar.text, (bar.share, place), (4, 0), textcoords="offset points", va="center", fontsize=10)
    axes.invert_yaxis()
    axes.set_xlim(0, 135)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes.tick_params(length=0)
    if ends:
        _interval(figure.add_subplot(grid[0, 1]), ends)
    text = figure.add_subplot(grid[1, :])
    text.axis("off")
    text.text(0, 1, "\n".join(told), va="top", fontsize=9, color=INK, transform=text.transAxes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)


def _interval(axes: Any, ends: Interval) -> None:
    axes.set_xlim(0, ends.width)
    axes.set_ylim(-1, 1)
    axes.axis("off")
    axes.plot([ends.one, ends.one], [-0.45, 0.8], color=INK, linewidth=1, linestyle=":")
    axes.text(ends.one, 0.88, "1×", ha="center", fontsize=9, color=INK)
    axes.plot([ends.low, ends.high], [0, 0], color=GREEN, linewidth=7, solid_capstyle="butt", alpha=0.45)
    axes.plot([ends.estimate], [0], "o", color=GREEN, markersize=9)
    for at, label in ends.labels:
        axes.text(at, -0.5, label, ha="center", va="top", fontsize=9, color=INK)
    axes.text(ends.estimate, 0.3, ends.said, ha="center", fontsize=10, color=INK, fontweight="bold")
