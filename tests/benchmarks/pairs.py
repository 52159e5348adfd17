"""Which two strategies go together: what they declare, and what comes out where both run.

    python tests/benchmarks/pairs.py run FOLDER [processes]   every pair that may be stacked, on this machine
    python tests/benchmarks/pairs.py write [FOLDER]           docs/strategies.md; with FOLDER, the second table too

`run` asks whether both engage and the result is right, not how fast it is: several jobs share the GPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path

from optexp.config import search_path
from optexp.errors import Unsupported
from optexp.result import Result, Verdict
from optexp.schema import build, plain
from optexp.strategy import Strategy, compose
from optexp.workloads.branches import Branches

PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"
DECLARED, RAN = ("<!-- declared -->", "<!-- /declared -->"), ("<!-- ran -->", "<!-- /ran -->")
SHORT = [
    "replay=benchmarks",
    "verify=only",
    "measurement=quick",
    "measurement.verification_seeds=1",
    "tracking.enabled=false",
]
SHORT += ["environment.allow_foreign=true"]
TOWERS = {"batch_size": 128, "dim": 2048}
SECOND = f"{Path(__file__).resolve()}:second_towers"  # for `replace`, on branches


def second_towers() -> object:
    return Branches(dim=TOWERS["dim"]).model()


def strategies() -> dict[str, Strategy]:
    """All of conf/strategy in the order of their stages, with their default options."""
    names = [name for name in search_path.options("strategy") if name != "baseline"]
    nodes = plain(search_path.compose([f"strategy=[{','.join(names)}]"]).strategy)
    found = [build(nodes[name], f"strategy.{name}") for name in names]
    return {s.name: s for s in sorted(found, key=lambda s: (s.stage, s.name))}


def refusals() -> dict[tuple[str, str], str]:
    """Pairs that the strategies themselves refuse, and why."""
    found = {}
    for pair in combinations(strategies().values(), 2):
        try:
            compose(pair)
        except Unsupported as reason:
            found[pair[0].name, pair[1].name] = str(reason)
    return found


# --- running them ------------------------------------------------------------------------------------------------


def work(pair: tuple[str, str]) -> list[str]:
    """A workload on which both members have something to do, if there is one."""
    workload, second = ("branches", SECOND) if "streams" in pair else ("lenet5", "optexp.workloads.lenet5:lenet5")
    mode = "forward" if "inference_mode" in pair else "train"
    more = [f"strategy.replace.target={second}"] if "replace" in pair else []
    if "streams" in pair:  # kernels that take longer than their launch, and half of the card
        more += [f"workload.{name}={value}" for name, value in TOWERS.items()]
    if "cpu_affinity" in pair:
        more.append("measurement.cpus=all")
    return [f"workload={workload}", f"workload.mode={mode}", "workload.source=host", *more]


def run(folder: Path, processes: int) -> None:
    """Sweeps, so many side by side, each over its share of the pairs of one workload."""
    refused, groups = refusals(), dict[tuple[str, ...], list[tuple[str, str]]]()
    for pair in combinations(strategies(), 2):
        if pair not in refused:
            groups.setdefault(tuple(work(pair)), []).append(pair)
    share = -(-sum(map(len, groups.values())) // processes)
    folder.mkdir(parents=True, exist_ok=True)
    sweeps = [
        (overrides, pairs[first : first + share])
        for overrides, pairs in groups.items()
        for first in range(0, len(pairs), share)
    ]

    def sweep(number: int) -> None:
        overrides, pairs = sweeps[number]
        stacks = ",".join(f"[{first},{second}]" for first, second in pairs)
        place = f"hydra.sweep.dir={folder.resolve() / str(number)}"
        command = [sys.executable, "-m", "optexp", "-m", *overrides, f"strategy={stacks}", *SHORT, place]
        with open(folder / f"{number}.log", "w") as log:
            subprocess.run(command, stdout=log, stderr=log, check=False)

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(sweep, range(len(sweeps))))


# --- telling -----------------------------------------------------------------------------------------------------


def outcome(result: Result) -> tuple[str, str]:
    """A sign for a pair that ran, and the reason where it is not ✓."""
    if result.verdict in (Verdict.ERROR, Verdict.UNSUPPORTED):
        return ("×" if result.verdict is Verdict.UNSUPPORTED else "E"), result.headline.partition(": ")[2]
    if idle := [f"{e.strategy}: {e.text}" for e in result.evidence if not e.engaged]:
        return "○", "; ".join(idle)
    if not (result.equivalence and result.equivalence.ok):
        return "!", result.headline
    return "✓", ""


def table(names: Iterable[str], cells: Mapping[tuple[str, str], tuple[str, str]]) -> str:
    """A triangle of signs, and the reasons below, each once."""
    names, reasons = list(names), list(dict.fromkeys(reason for _, reason in cells.values() if reason))
    lines = ["| | " + " | ".join(f"`{name}`" for name in names[1:]) + " |", "|---|" + ":-:|" * (len(names) - 1)]
    for row, first in enumerate(names[:-1]):
        row_cells = []
        for column, second in enumerate(names[1:], 1):
            sign, reason = cells.get((first, second), ("", "")) if column > row else ("", "")
            row_cells.append(f"{sign} {reasons.index(reason) + 1}" if reason else sign)
        lines.append(f"| `{first}` | " + " | ".join(row_cells) + " |")
    return "\n".join([*lines, "", *(f"{i}. {reason}" for i, reason in enumerate(reasons, 1))]).rstrip()


def declared(names: Collection[str] | None = None) -> str:
    """The table of refusals among these strategies; None for all."""
    shown = [name for name in strategies() if names is None or name in names]
    refused = {pair: ("×", reason) for pair, reason in refusals().items() if {*pair} <= {*shown}}
    pairs = {pair: refused.get(pair, ("·", "")) for pair in combinations(shown, 2)}
    return table(shown, pairs)


def ran(folder: Path) -> str:
    cells = dict.fromkeys(refusals(), ("×", ""))
    results = [Result.read(path) for path in sorted(folder.rglob("result.json"))]
    order = list(strategies())
    for result in results:
        names = sorted((name.partition("[")[0] for name in result.strategy), key=order.index)
        cells[names[0], names[1]] = outcome(result)
    where = results[0].environment.get("gpu") or results[0].environment.get("cpu")
    return f"On {where}, torch {results[0].environment.get('torch')}.\n\n{table(order, cells)}"


def replaced(text: str, marks: tuple[str, str], content: str) -> str:
    before, rest = text.split(marks[0])
    return f"{before}{marks[0]}\n{content}\n{marks[1]}{rest.split(marks[1])[1]}"


def main() -> None:
    command, *rest = sys.argv[1:] or ["help"]
    if command == "run" and rest:
        run(Path(rest[0]), int(rest[1]) if rest[1:] else 8)
    elif command == "write":
        text = replaced(PAGE.read_text(), DECLARED, declared())
        PAGE.write_text(replaced(text, RAN, ran(Path(rest[0]))) if rest else text)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
