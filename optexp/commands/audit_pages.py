"""`python -m optexp.audit --pages`: do the figures of the README and the result pages follow from what they rest on?

A page whose records are in experiments/results/data is derived again from them. Most pages have no record here; of
those only what their figures say of each other can be held: a verdict follows from its interval, the README repeats the
page of the main job, and the index repeats its pages. The output names each page that has no record.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from optexp.config.search_path import CONF
from optexp.measurement.settings import MeasurementSettings
from optexp.support.units import ratio

ROOT = CONF.parent
MIN_EFFECT = MeasurementSettings().min_effect  # share of a step; pages are measured by the presets, which keep it
INTERVAL = re.compile(r"([\d.]+)× \(([\d.]+) to ([\d.]+)\)")
NUMBER = re.compile(r"\d[\d,.]*\d|\d")
MEASURED = ("FASTER", "SLOWER", "SAME", "INCONCLUSIVE")
ALARMS, APART = ("NOT_EQUIVALENT", "INVALID", "ERROR"), ("UNSUPPORTED", "NOT_ENGAGED")
HALVES = {"a, H100": ("a", False), "b, H100": ("b", False), "a, CPU": ("a", True), "b, CPU": ("b", True)}
STRATEGIES = {"replace by an identical model": "replace", "an equal program": "baseline"}

Row = Mapping[str, str]


@dataclass
class Page:
    """Findings on a page.

    record:   file that it is derived from; empty where there is none
    checked:  figures that were derived or compared
    """

    name: str
    record: str = ""
    checked: int = 0
    problems: list[str] = field(default_factory=list)

    def hold(self, what: str, said: object, given: object) -> None:
        """Count a figure, and note one that does not follow."""
        self.checked += 1
        if said != given:
            self.problems.append(f"{what} is {said}, and {given} follows")

    def __str__(self) -> str:
        basis = f"from {self.record}" if self.record else "no record; figures that were held against others"
        return f"{self.name}: {basis}: {self.checked}"


def audit(root: Path = ROOT) -> list[Page]:
    """Every result page, and the README where it is there."""
    results = root / "experiments" / "results"
    pages = [_page(path) for path in sorted(results.glob("*.md")) if path.stem != "index"]
    pages.append(_index(results))
    readme = root / "README.md"
    return [*([_readme(readme, results / "main_job.md")] if readme.is_file() else []), *pages]


def tables(text: str) -> Iterator[list[Row]]:
    """The tables of a Markdown text, as rows by heading."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        heads, _, *rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block.splitlines()]
        yield [dict(zip(heads, row, strict=False)) for row in rows]


def _page(path: Path) -> Page:
    page, text = Page(path.name), path.read_text()
    derive = DERIVED.get(path.stem)
    if derive is not None:
        name, function = derive
        page.record = f"data/{name}"
        function(page, text, _records(path.parent / page.record))
    for row in (row for table in tables(text) for row in table):
        _verdict(page, row)
    return page


def _records(path: Path) -> Any:
    """The content of a JSON file, or the lines of a .jsonl file."""
    text = path.read_text()
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


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


def _readme(path: Path, main_job: Path) -> Page:
    """The README's result is a row of the main job's page, and its ratios follow from its figures."""
    page, text = Page(path.name), path.read_text()
    shown = re.search(r"^\$ python -m optexp (.*)\n.*?at least ([\d.]+)× \(best estimate ([\d.]+)×, 99% interval "
                      r"([\d.]+) to ([\d.]+), (\d+) processes\)", text, re.MULTILINE)  # fmt: skip
    times = re.search(r"time/step +([\d.]+ \S+) +([\d.]+ \S+) +([\d.]+)× faster", text)
    rows = [row for table in tables(main_job.read_text()) for row in table]
    row = next((row for row in rows if shown and row.get("command") == f"`{shown[1]}`"), None)
    if shown is None or times is None or row is None:
        page.problems.append("its result is no row of main_job.md")
        return page
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
    return page


def _index(results: Path) -> Page:
    """Every number of an answer stands on the page that it is about, or rounds one that does."""
    page = Page("index.md")
    for row in (row for table in tables((results / "index.md").read_text()) for row in table):
        link = re.search(r"\]\(([\w.]+)\)", row.get("page", ""))
        if link is None:
            continue
        known = set(NUMBER.findall((results / link[1]).read_text()))
        for number in NUMBER.findall(row["answer"]):
            page.checked += 1
            if not any(number in (other, _rounded(other, number)) for other in known):
                page.problems.append(f"{link[1]} has no {number}, of {row['answer']!r}")
    return page


def _decimals(number: str) -> int:
    return len(number.partition(".")[2])


def _rounded(number: str, like: str) -> str:
    """A number with as many decimals as another."""
    return f"{float(number.replace(',', '').rstrip('.')):.{_decimals(like)}f}" if number.count(".") < 2 else number


# --- pages with records ----------------------------------------------------------------------------------------


def _honest(page: Page, text: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Rates by half and device, and by strategy; seeds of one pair."""
    ran = [record for record in records if record["half"] in ("a", "b")]
    for row in (row for table in tables(text) for row in table):
        if (half := row.get("half, device")) and "false alarms" in row:
            chosen = HALVES.get(half)
            of = [r for r in ran if chosen in (None, (r["half"], r["device"] == "cpu"))]
            _rates(page, half, row, of)
        elif (strategy := row.get("strategy")) and "false alarms" in row:
            name = STRATEGIES.get(strategy, strategy)
            _rates(page, strategy, row, [r for r in ran if r["id"].rpartition(" × ")[2] == name])
        elif (pair := row.get("pair")) and "refused" in row:
            for record in (r for r in records if r["half"] == "seeds" and r["id"] == pair):
                page.hold(f"{pair}: seeds", row["seeds"], str(record["seeds"]))
                page.hold(f"{pair}: refused", row["refused"], str(record["alarms"]))


def _rates(page: Page, name: str, row: Row, records: Sequence[Mapping[str, Any]]) -> None:
    alarms = [r for r in records if r["verdict"] in ALARMS or (r["verdict"] in APART and r["ok"] is False)]
    verdicts = Counter(r["verdict"] for r in records if r not in alarms)
    given = {
        "decided": len(alarms) + verdicts["VERIFIED"] + verdicts["UNVERIFIED"],
        "false alarms": len(alarms),
        "UNVERIFIED": verdicts["UNVERIFIED"],
        "NOT_ENGAGED": verdicts["NOT_ENGAGED"],
        "UNSUPPORTED": verdicts["UNSUPPORTED"],
        "not run": verdicts["CUT"] + verdicts["SKIPPED"],
    }
    for heading in given.keys() & row.keys():
        page.hold(f"{name}: {heading}", row[heading].partition(" ")[0], str(given[heading]))


def _kernelbench(page: Page, text: str, lines: Sequence[Mapping[str, Any]]) -> None:
    """A row of each judged problem, and their count in the answer."""
    rows = {row["problem"]: row for table in tables(text) for row in table}
    page.hold("problems", sorted(rows), sorted(line["problem"] for line in lines))
    answer = re.search(r"\*\*Answer\.\*\* (\d+) of", text)
    page.hold("files so far", answer and answer[1], str(len(lines)))
    for line in (line for line in lines if line["problem"] in rows):
        found, phases, ratio = line["speedup"], line["phases"], line["bound"]["ratio"]
        given = {
            "verdict": line["verdict"],
            "speedup": f"{found['estimate']:.2f}× ({found['low']:.2f} to {found['high']:.2f})",
            "step over its bound": f"{ratio:.1f}" if ratio else "–",
            **{name: f"{phases[name]:.0f}" for name in ("arms", "verification", "profile", "measurement")},
            "in all": f"{line['seconds']:.0f}",
        }
        for heading, figure in given.items():
            page.hold(f"{line['problem']}: {heading}", rows[line["problem"]][heading], figure)


def _kernelbench_level1(page: Page, text: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Verdicts and seconds by the size of the inputs."""
    answer = re.search(r"\*\*Answer\.\*\* (\d+) of (\d+) files are VERIFIED", text)
    verified = sum(record["verdict"] == "VERIFIED" for record in records)
    page.hold("files", answer and answer.groups(), (str(verified), str(len(records))))
    for row in (row for table in tables(text) for row in table):
        least, most = (float(size) for size in NUMBER.findall(row["inputs"]))
        chosen = [record for record in records if least <= record["input_gib"] < most]
        seconds = sorted(record["seconds"] for record in chosen)
        given = {
            "files": str(len(chosen)),
            "VERIFIED": str(sum(record["verdict"] == "VERIFIED" for record in chosen)),
            "shortest [s]": f"{seconds[0]:.0f}",
            "median [s]": f"{median(seconds):.0f}",
            "longest [s]": f"{seconds[-1]:.0f}",
        }
        for heading, figure in given.items():
            page.hold(f"{row['inputs']}: {heading}", row[heading], figure)


def _bounds(page: Page, text: str, records: Sequence[Mapping[str, Any]]) -> None:
    """A row of each measured subset that has a bound, in the section of subsets."""
    known = [r for r in records if r["kind"] == "subset" and r["speedup"] and r["predicted"]]
    section = text.partition("## Subsets of four strategies")[2].partition("\n## ")[0]
    rows = {(row["workload"], row["strategy"]): row for table in tables(section) for row in table}
    page.hold("pairs", sorted(rows), sorted((f"`{r['subject']}`", f"`{r['stack']}`") for r in known))
    for record in known:
        name = f"`{record['subject']}`", f"`{record['stack']}`"
        given = {
            "verdict": record["verdict"],
            "predicted at most": ratio(record["predicted"]),
            "measured": ratio(record["speedup"]),
            "measured/bound": f"{record['speedup'] / record['predicted']:.2f}",
        }
        for heading, figure in given.items():
            page.hold(f"{' '.join(name)}: {heading}", rows.get(name, {}).get(heading), figure)


Derive = Callable[[Page, str, Any], None]
DERIVED: Mapping[str, tuple[str, Derive]] = {
    "bounds": ("subsets.json", _bounds),
    "verdicts": ("honest.json", _honest),
    "kernelbench": ("kernelbench.jsonl", _kernelbench),
    "kernelbench_level1": ("kernelbench_level1.json", _kernelbench_level1),
}
