"""`python -m optexp.audit --pages`: do the figures of the README and the result pages follow from what was measured?

A block of a page is printed again from its record in experiments/results/data (see `optexp.pages`) and compared line by
line. Figures in the prose of a page with records must stand in its blocks. A page without a record is listed; of it
only what its figures say of each other is checked: a verdict follows from its interval, the README repeats the page of
the main job, and the index repeats its pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path

from optexp.commands.audit import follows, says
from optexp.config.search_path import CONF
from optexp.measurement.settings import MeasurementSettings
from optexp.pages import jobs
from optexp.pages.blocks import MARK, blocks, path_of, records
from optexp.pages.record import Record, block_of

ROOT = CONF.parent
MIN_EFFECT = MeasurementSettings().min_effect  # share of a step; pages are measured by the presets, which keep it
INTERVAL = re.compile(r"([\d.]+)× \(([\d.]+) to ([\d.]+)\)")
NUMBER = re.compile(r"\d[\d,.]*\d|\d")
FIGURE = re.compile(r"(?<![\w.\-/])(\d[\d,.]*\d|\d)")  # a number that is no part of a name, as in LeNet-5
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
TABLE = re.compile(r"(?:^\|.*\n?)+", re.MULTILINE)
MACHINE = re.compile(r"^\*\*Machine\.\*\*.*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
TARGET = re.compile(r"\]\([^)]*\)")  # target of a Markdown link
MEASURED = ("FASTER", "SLOWER", "SAME", "INCONCLUSIVE")
COMPARISONS = (
    "study",
    "comparisons",
    "terminal",
)  # rules whose rows are comparisons: their verdicts are derived again, too

Row = Mapping[str, str]


@dataclass
class Page:
    """Findings on a page.

    records:   files in data/ that blocks were derived from
    derived:   figures of these blocks
    compared:  figures that were held against others of the pages
    underived: tables with figures that no record confirms
    repeats:   it has no figures of its own, as the index
    """

    name: str
    records: list[str] = field(default_factory=list)
    derived: int = 0
    compared: int = 0
    underived: int = 0
    repeats: bool = False
    problems: list[str] = field(default_factory=list)

    def hold(self, what: str, said: object, given: object) -> None:
        """Count a compared figure, and note one that does not follow."""
        self.compared += 1
        if said != given:
            self.problems.append(f"{what} is {said}, and {given} follows")

    def __str__(self) -> str:
        parts = [f"{self.derived} figures derived from {', '.join(self.records)}"] if self.records else []
        parts += ["not derived: no record"] if not self.records and not self.repeats else []
        parts += [f"not derived: {self.underived} tables without a record"] if self.records and self.underived else []
        parts += [f"{self.compared} figures agree with others"] if self.compared and not self.problems else []
        return f"{self.name}: {'; '.join(parts)}"


def audit(root: Path = ROOT) -> list[Page]:
    """The README where it is there, every result page, and the index."""
    results = root / "experiments" / "results"
    names = ["README"] * (root / "README.md").is_file()
    names += [path.stem for path in sorted(results.glob("*.md")) if path.stem != "index"]
    pages = [_page(name, results) for name in names]
    for path in sorted((results / "data").glob("*")):
        if path.suffix != ".json" or block_of(path)[0] not in names:
            pages.append(Page(f"data/{path.name}", problems=["it is the record of no page"]))
    return [*pages, _index(results)]


def tables(text: str) -> Iterator[list[Row]]:
    """The tables of a Markdown text, as rows by heading."""
    for block in TABLE.findall(text):
        heads, _, *rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block.splitlines()]
        yield [dict(zip(heads, row, strict=False)) for row in rows]


def _page(name: str, results: Path) -> Page:
    page, text = Page("README.md" if name == "README" else f"{name}.md"), path_of(name, results).read_text()
    said, printed = blocks(text), dict[str, str]()
    for block, path in records(results, name):
        page.records.append(f"data/{path.name}")
        try:
            record = Record.read(path)
            printed[block] = record.text()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
            page.problems.append(f"data/{path.name} cannot be printed ({type(error).__name__}: {error})")
            continue
        page.derived += len(NUMBER.findall(printed[block]))
        page.problems += _differences(block, said.get(block), printed[block])
        page.problems += _verdicts(record) if record.rule in COMPARISONS else []
    rest = MARK.sub(lambda found: "" if found[1] in printed else found[0], text)
    page.underived = sum(bool(FIGURE.search(CODE.sub("", table))) for table in TABLE.findall(rest))
    for row in (row for table in tables(rest) for row in table):
        _verdict(page, row)
    if name == "README":
        _readme(page, text, results / "main_job.md")
    elif page.records:
        page.problems += _prose(MARK.sub("", rest), "\n".join(printed.values()))
    return page


# --- a page and its records --------------------------------------------------------------------------------------


def _differences(block: str, said: str | None, printed: str) -> Iterator[str]:
    """Lines of a block that its record does not give."""
    if said is None:
        yield f"there is no block {block}: <!-- {block} --> and <!-- /{block} -->"
        return
    before, after = said.splitlines(), printed.splitlines()
    for kind, i, j, k, n in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind != "equal":
            stands, follow = (" / ".join(lines) or "nothing" for lines in (before[i:j], after[k:n]))
            yield f"{block}: {stands} stands there, and {follow} follows"


def _verdicts(record: Record) -> Iterator[str]:
    """Comparisons whose verdict or speedup does not follow from their pairs."""
    for row in record.rows:
        result = jobs.result(row)
        found = [*follows(result, jobs.ROUNDING), *(says(result) if record.rule == "terminal" else ())]
        yield from (f"{result.workload} {result.label} {row.get('typed', '')}: {problem}" for problem in found)


def _prose(text: str, printed: str) -> Iterator[str]:
    """Figures in sentences that stand neither in a derived block nor in code: a setting, a command.

    A paragraph about the machine has versions, and no figures.
    """
    known = set(NUMBER.findall(printed)) | {number for code in CODE.findall(text) for number in NUMBER.findall(code)}
    plain = TARGET.sub("]", CODE.sub("`code`", TABLE.sub("", MACHINE.sub("", text))))
    for sentence in re.split(r"(?<=[.:!?])\s+|\n\n+", plain):
        for number in FIGURE.findall(sentence):
            if not _stands(number, known):
                yield f"{number} of {' '.join(sentence.split())!r} stands in no block"


def _stands(number: str, known: set[str]) -> bool:
    """Whether these hold a number, exactly or before rounding."""
    return any(number in (other, _rounded(other, number)) for other in known)


# --- figures beside others ---------------------------------------------------------------------------------------


def _verdict(page: Page, row: Row) -> None:
    """A verdict that a row names follows from the interval beside it."""
    verdict = next((word for word in MEASURED if row.get("verdict", "").startswith(word)), None)
    found = INTERVAL.search(row.get("speedup", "")) or INTERVAL.search(f"{row.get('estimate')} ({row.get('interval')})")
    if verdict is None or found is None:
        return
    estimate, low, high = map(float, found.groups())
    what = f"{' '.join(filter(None, list(row.values())[:2]))}: {verdict} with {found[0]}"
    half = 0.5 * 10.0 ** -_decimals(found[1])  # rounding error of the shown estimate
    page.hold(f"{what}: estimate in its interval", low - half <= estimate <= high + half, True)
    above, below = low > 1 + MIN_EFFECT, high < 1 / (1 + MIN_EFFECT)
    if verdict in ("FASTER", "SLOWER"):
        page.hold(what, verdict, "FASTER" if above else "SLOWER" if below else "another")


def _readme(page: Page, text: str, main_job: Path) -> None:
    """The README's result is a row of the main job's page, and its ratios follow from its figures."""
    shown = re.search(r"^\$ python -m optexp (.*)\n.*?at least ([\d.]+)× \(best estimate ([\d.]+)×, 99% interval "
                      r"([\d.]+) to ([\d.]+), (\d+) processes\)", text, re.MULTILINE)  # fmt: skip
    times = re.search(r"time/step +([\d.]+ \S+) +([\d.]+ \S+) +([\d.]+)× faster", text)
    rows = [row for table in tables(main_job.read_text()) for row in table]
    row = next((row for row in rows if shown and row.get("command") == f"`{shown[1]}`"), None)
    if shown is None or times is None or row is None:
        page.problems.append("its result is no row of main_job.md")
        return
    _, low, estimate, begin, end, processes = shown.groups()
    page.hold("at least", f"{low}×", row["at least"])
    page.hold("the estimate", f"{estimate}×", row["estimate"])
    page.hold("the interval", f"{begin} to {end}", row["interval"])
    page.hold("processes", processes, row["processes"])
    page.hold("the baseline's time", times[1], row["baseline"])
    page.hold("the candidate's time", times[2], row["candidate"])
    page.hold("the ratio of times", times[3], estimate)
    page.hold("the lower end", low, begin)
    memory = re.search(r"peak memory +(\d+) MiB +(\d+) MiB +([\d.]+)× more", text)
    if memory:
        page.hold("the ratio of memory", memory[3], f"{int(memory[2]) / int(memory[1]):.2f}")


def _index(results: Path) -> Page:
    """Every number of an answer stands on the page that it is about, or rounds one that does."""
    page = Page("index.md", repeats=True)
    for row in (row for table in tables((results / "index.md").read_text()) for row in table):
        link = re.search(r"\]\(([\w.]+)\)", row.get("page", ""))
        if link is None:
            continue
        known = set(NUMBER.findall((results / link[1]).read_text()))
        for number in NUMBER.findall(row["answer"]):
            page.compared += 1
            if not _stands(number, known):
                page.problems.append(f"{link[1]} has no {number}, of {row['answer']!r}")
    return page


def _decimals(number: str) -> int:
    return len(number.partition(".")[2])


def _rounded(number: str, like: str) -> str:
    """A number with as many decimals as another."""
    return f"{float(number.replace(',', '').rstrip('.')):.{_decimals(like)}f}" if number.count(".") < 2 else number
