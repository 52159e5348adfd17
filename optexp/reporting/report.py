"""report.html: one file that holds everything a result rests on and asks nothing of the network."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from omegaconf import OmegaConf

from optexp.equivalence.gates import SPREAD
from optexp.records.measurement import Measurement
from optexp.reporting import summary, timeline
from optexp.reporting.wording import GATES
from optexp.result import Result
from optexp.support.units import duration

WIDTH, MARGIN, ROW = 720, 24, 22  # of the strip plot, in pixels
ERRORS = 180  # height of the plot of errors, in pixels
# Of a verification's facts.
SHOWN_APART = {
    "gates", "worst", "weakest", "headline", "ok", "failures", "tensors", "mutants", "visible", "distribution",
    "trajectory",
}  # fmt: skip


def write(result: Result, path: Path) -> None:
    """Render `result` as a page of its own at `path`."""
    path.write_text(render(result, command(result, path.parent)))


def render(result: Result, command: str = "") -> str:
    """The page; pictures are drawn as SVG by the template, because importing a plotting library takes a second."""
    environment, found = templates(), result.equivalence
    arms = result.profile.arms()
    breakdowns = {name: dict(summary.parts(profile.metrics)) for name, profile in arms.items()}
    terms = list(dict.fromkeys(name for parts in breakdowns.values() for name in parts))
    seconds = {k: v for k, v in result.seconds.items() if k != "total"}
    return environment.get_template("report.html.j2").render(
        result=result,
        summary=summary,
        gates=GATES,
        what_now=summary.what_now(result),
        arms=arms,
        breakdowns={arm: parts for arm, parts in breakdowns.items() if parts},
        terms=terms,
        checks={key: value for key, value in asdict(found).items() if key not in SHOWN_APART and value is not None}
        if found
        else {},
        worst=asdict(found.worst) if found and found.worst else None,
        strip=strip(result) if result.verdict.measured else None,
        axis=timeline.axis(result),
        histograms=timeline.histograms(result) if result.verdict.measured else [],
        panels=timeline.panels(result),  # without the blocks' times, where those are withheld
        errors=errors(result),
        seconds=seconds,
        total=max(result.seconds.get("total", 0.0), sum(seconds.values())),
        config=OmegaConf.to_yaml(OmegaConf.create(result.config)) if result.config else "",
        command=command,
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
        "us": summary.microseconds,
        "share": summary.share,
        "count": summary.count,
        "cell": cell,
        "precise": precise,
        "words": lambda name: str(name).replace("_", " "),
    }
    return environment


def command(result: Result, folder: Path) -> str:
    """What to type for the same comparison: the job's own overrides, where Hydra wrote them down."""
    overrides = folder / ".hydra" / "overrides.yaml"
    if not overrides.is_file():
        return str(result.environment.get("command") or "")
    return shlex.join(["python", "-m", "optexp", *map(str, OmegaConf.load(overrides))])


def cell(value: Any) -> str:
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


def precise(value: Any) -> str:
    """A value beside others that are almost the same."""
    return f"{value:.9g}" if isinstance(value, (int, float)) else "–"


# --- the distribution of errors --------------------------------------------------------------------------------


def errors(result: Result) -> dict[str, Any] | None:
    """The histograms of a tensor's errors in both arms (see `optexp.equivalence.gates.histogram`), as lines."""
    found = result.equivalence.distribution if result.equivalence else None
    if found is None:
        return None
    low, high, parts = SPREAD
    arms = {"baseline": found.baseline, "candidate": found.candidate}
    used = [index for index in range(parts) if any(shares[1 + index] for shares in arms.values())]
    if not used:
        return None
    first, last = max(used[0] - 1, 0), min(used[-1] + 1, parts - 1)
    tallest = max(max(shares[1:]) for shares in arms.values())
    bottom = ERRORS - 26

    def x(index: float) -> float:
        return round(MARGIN + (index - first) / max(last - first, 1) * (WIDTH - 2 * MARGIN), 1)

    lines = {
        name: " ".join(f"{x(i)},{bottom - shares[1 + i] / tallest * (bottom - 10):.1f}" for i in range(first, last + 1))
        for name, shares in arms.items()
    }
    per_decade = parts / (high - low)
    decades = [d for d in range(int(low), int(high) + 1) if first <= (d - low) * per_decade <= last]
    return {
        "tensor": found.tensor,
        "width": WIDTH,
        "height": ERRORS,
        "bottom": bottom,
        "lines": lines,
        "exact": {name: summary.share(shares[0]) for name, shares in arms.items() if shares[0]},
        "ticks": [(x((decade - low) * per_decade), f"1e{decade}") for decade in decades],
    }


# --- the distribution of ratios --------------------------------------------------------------------------------


def strip(result: Result) -> dict[str, Any] | None:
    """Positions, in pixels, of every pair's ratio by process, each process's mean, and the interval over them."""
    measured = result.measurement or Measurement()
    pairs, means = measured.pairs, [math.exp(process.log_ratio) for process in measured.processes]
    speedup = result.speedup
    if speedup is None or not means or len(pairs) != len(means):
        return None
    ratios = [[before / after for before, after in process] for process in pairs]
    lost = [[before / after for before, after in process] for process in measured.dropped]
    keep = [*means, *filter(math.isfinite, (speedup.low, speedup.high))]
    ends = _without_outliers([*(ratio for process in (*ratios, *lost) for ratio in process), *keep], keep)
    low, high = ends[0] - 0.04 * (ends[1] - ends[0]), ends[1] + 0.04 * (ends[1] - ends[0])

    def x(ratio: float) -> float:
        return round(MARGIN + (min(max(ratio, low), high) - low) / (high - low) * (WIDTH - 2 * MARGIN), 1)

    return {
        "width": WIDTH,
        "height": ROW * len(means) + 56,
        "bottom": ROW * len(means) + 26,
        "low": x(speedup.low),
        "high": x(speedup.high),
        "estimate": x(speedup.estimate),
        "one": x(1.0) if low <= 1 <= high else None,
        "ticks": [(x(tick), f"{tick:.{places}f}×") for tick, places in timeline.ticks(low, high)],
        "rows": [
            {
                "y": ROW * index + 20,
                "mean": x(mean),
                "dots": [x(ratio) for ratio in process],
                "dropped": [x(ratio) for ratio in dropped],
            }
            for index, (mean, process, dropped) in enumerate(zip(means, ratios, lost or [[]] * len(means), strict=True))
        ],
    }


def _without_outliers(values: Sequence[float], keep: Sequence[float]) -> tuple[float, float]:
    """The range that shows 98 % of the values and all that must be seen; single pairs beyond it sit on its edge."""
    ordered = sorted(values)
    cut = len(ordered) // 100
    low = min(ordered[cut], *keep)
    high = max(ordered[-1 - cut], *keep)
    return (low, high) if high > low else (low * 0.99, high * 1.01)
