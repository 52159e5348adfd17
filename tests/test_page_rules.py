"""What each rule of result pages prints of a few rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optexp import pages
from optexp.pages.record import Record

Rows = list[dict[str, Any]]
EQUAL = {"workload": "mlp", "delay": 0.0, "verdict": "SAME", "interval": [1.0, 0.99, 1.02], "step_us": 500.0}
EQUAL |= {"going_first": 0.001, "processes": 5}
DELAYED = {**EQUAL, "delay": 0.02, "verdict": "SLOWER", "interval": [0.98, 0.97, 0.99]}
GATES = {"arithmetic": "float32", "strategy": "inplace", "verifications": 4, "alarms": 0}
CAUSE = {"program": "loop", "expected": ["python", "Python"], "found": True, "bottleneck": ["python", "it waits"]}
CAUSE |= {"cause": "Python +1 ms", "explained": 0.994}
VERSION = {"device": "cpu", "name": "a CPU", "kind": "versions", "delay": 0.1, "base_us": 1000.0, "seconds": 20.0}

EXAMPLES: dict[str, tuple[Rows, dict[str, Any], list[str]]] = {
    "false_alarms": (
        [EQUAL, {**EQUAL, "verdict": "FASTER"}, DELAYED],
        {},
        ["| mlp | 500 µs | 2 | 1 (50.0%) | 1 | 0 | 5 | 1.50% | +0.10% |", "| 2%, mlp | 1 | 1 (100%) | 1 | +2.04% |"],
    ),
    "clocks": (
        [{"kernel": "GELU", "wall": 10, "device": 9, "cupti": 8, "same_calls": 8.08, "cold": 9.9, "do_bench": 10}],
        {},
        ["| GELU | 10.00 µs | 9.00 µs | 8.00 µs | +12.5% | +1.0% | 9.90 µs | 10.00 µs | -1.0% |"],
    ),
    "throughput": (
        [{"files": "1 to 5", "at_once": 4, "seconds": 100.4, "verdicts": {"FASTER": 4, "SAME": 1}}],
        {},
        ["| 1 to 5 | 4 | 100 | 20 | 4 FASTER, 1 SAME |"],
    ),
    "gates": (
        [
            {**GATES, "used": 0.25, "of": "output, mlp", "mutants": {"scaled": [3, 4]}},
            {**GATES, "used": 0.5, "of": "grad/0, lenet5", "mutants": {"scaled": [4, 4]}},
        ],
        {"reached": [2, 3]},
        [
            "8 verifications raised 0 alarms. The nearest came to 50% of a limit. 2 of 3 combinations were reached.",
            "| float32 | inplace | 2 | 8 | 0 | 50% | grad/0, lenet5 |",
            "| scaled | 7 of 8 |",
        ],
    ),
    "causes": (
        [{**CAUSE, "named": True}, {**CAUSE, "named": False}],
        {},
        [
            "**Answer.** 1 of 2 programs, 2 of 2 pairs.",
            "| loop | python: it waits | Python +1 ms | 99 % |",
            "| loop | **missed (python):** python: it waits | Python +1 ms | 99 % |",
        ],
    ),
    "idle": (
        [
            {"trace": "a", "ours": 10.0, "theirs": 10.1},
            {"trace": "b", "ours": 9.0, "theirs": 10.0},
            {"trace": "c", "ours": 1.0, "theirs": None},
        ],
        {},
        ["| at most 0.2 points apart | 1 of 2 |", "| largest difference | 1.0 points |"],
    ),
    "phases": (
        [{"preset": "quick", "processes": 1, "seconds": {"arms": 3.0, "measurement": 5.0}, "wall_s": 10.0}],
        {},
        ["| seconds | quick (1 process) |", "| arms | 3.0 |", "| whole command | 10.0 |", "| not measuring | 50% |"],
    ),
    "verification_cost": (
        [{"command": "x=1", "verdict": "SAME", "seconds": {"gates": 1.0}, "verification_s": 3.0, "wall_s": 9.0}],
        {},
        ["| gates | 1.00 |", "| other | 2.00 |", "| verification | 3.00 |", "| whole command | 9.00 |"],
    ),
    "versions": (
        [
            {**VERSION, "verdict": "SLOWER", "speedup": {"estimate": 0.909, "low": 0.89, "high": 0.93}},
            {**VERSION, "verdict": "INVALID", "speedup": None},
        ],
        {},
        ["| a CPU | versions | 10% | 2 | 1 | 0 | 0 | 0 | 1 | 1 | 1 ms | +10.01% | 2.00% | 20 |"],
    ),
    "kernelbench": (
        [{"problem": "1_x", "verdict": "ERROR", "speedup": None, "bound": None, "phases": {"arms": 2.0}, "seconds": 3}],
        {},
        ["1 files: 1 ERROR. Seconds by phase:", "| 1_x | ERROR |  | – | 2 |  |  |  | 3 |"],
    ),
    "detections": (
        [{"noise": 0.01, "steps": [[10, 0.1], [30, -0.05]], "alarms": {"optexp.watch": [11, 90], "t-test": []}}],
        {"table": "synthetic"},
        [
            "| optexp.watch | 50 % | 50 % | 0 % | 100 % |",
            "| t-test | 100 % | 0 % | 0 % | 0 % |",
            "| 1.0 % | 0 % | 100 % |",
        ],
    ),
}
ELSEWHERE = {  # rules that a published record or another test prints
    "study", "comparisons", "terminal", "groups_of_tests", "kernels", "strategies", "bounds", "subsets", "honest",
    "problem_sizes",
}  # fmt: skip


@pytest.mark.parametrize("rule", EXAMPLES)
def test_a_rule_prints_what_its_rows_hold(rule: str, tmp_path: Path) -> None:
    """Also after the rows were in a file."""
    rows, options, lines = EXAMPLES[rule]
    Record(rule, "", rows, options).write(tmp_path / "page.json")
    printed = Record.read(tmp_path / "page.json").text().splitlines()
    assert [line for line in lines if line not in printed] == [], "\n".join(printed)


def test_every_rule_is_printed_by_a_test() -> None:
    files = {path.stem for path in (Path(pages.__path__[0]) / "rules").glob("*.py")} - {"__init__"}
    assert files == EXAMPLES.keys() | ELSEWHERE
