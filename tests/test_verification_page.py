"""The page about verification holds the constants of the code, and a word on every gate."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from optexp.equivalence.input_families import FAMILIES
from optexp.equivalence.mutants import MUTANTS
from optexp.reporting.wording import GATES
from optexp.support.tolerances import INT8, TOLERANCES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "verification.md").read_text()


def table(heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, by cell."""
    section = re.split(rf"^#+ {heading}\n", PAGE, flags=re.MULTILINE)[1]
    lines = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert lines
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[0].splitlines()[2:]]


def number(text: str) -> float:
    base, _, exponent = text.partition("^")
    return float(base) ** float(exponent) if exponent else float(base)


def test_every_dtype_has_its_row() -> None:
    rows = {name: [*map(number, cells)] for name, *cells in table("Constants by dtype")}
    code = {
        name: [row.unit, row.warn, row.fail, row.floor, row.peak_fail, row.peak_floor]
        for name, row in {**TOLERANCES, "int8": INT8}.items()
    }
    assert rows == code


@pytest.mark.parametrize(("name", "value"), [row[:2] for row in table("Other constants")])
def test_constants_are_those_of_the_code(name: str, value: str) -> None:
    module, _, constant = name.strip("`").rpartition(".")
    assert getattr(import_module(f"optexp.{module}"), constant) == number(value)


def test_every_gate_family_and_mutant_is_there() -> None:
    assert {*GATES} == {row[0] for row in table("Gates")}
    assert all(f"`{family}`" in PAGE for family in FAMILIES)
    assert {mutant.__name__ for kind in MUTANTS.values() for mutant in kind} == {
        "scaled", "tile_zeroed", "last_row_dropped", "stale", "lower_precision", "without_eps", "one_element_off",
        "one_column_dropped", "not_cleared", "rate_off_by_1_percent", "no_update",
    }, "the page's paragraph on mutants names each of these"  # fmt: skip


def test_the_readme_leads_there() -> None:
    assert "docs/verification.md" in (ROOT / "README.md").read_text()
    for anchor in re.findall(r"\]\(#([\w-]+)\)", PAGE):
        assert re.search(rf"^#+ {anchor.replace('-', ' ')}$", PAGE, re.MULTILINE | re.IGNORECASE), anchor
