"""Curves of a plain sweep: how times and gains scale with the one number that its jobs differ in."""

from __future__ import annotations

from collections.abc import Sequence

from optexp.result import Result
from optexp.sweeps.plot import as_svg
from optexp.sweeps.study import Study, completed, points

FEWEST = 3  # values that make a curve
WIDE = 8.0  # largest over smallest value, from which on the axis is logarithmic


def curves(results: Sequence[Result]) -> list[str]:
    """Panels as SVG; none where no setting of the workload is such a number, or where other settings vary as well."""
    study = scaling(results)
    if study is None:
        return []
    jobs = [(result, "") for result in results]
    return as_svg(study, points(study, jobs)) if completed(study, jobs).x == study.x else []


def scaling(results: Sequence[Result]) -> Study | None:
    """The sweep as a study of the number that varies."""
    keys = dict.fromkeys(key for result in results for key in result.config if key.startswith("workload."))
    for key in keys:
        values = [value for result in results if isinstance(value := result.config.get(key), (int, float))]
        if len(set(values)) >= FEWEST and len(values) == len(results):
            log = "x" if min(values) > 0 and max(values) / min(values) >= WIDE else ""
            several = ["workload"] if len({result.workload for result in results}) > 1 else []
            return Study("", [key], ["step_us", "speedup"], [*several, "arm"], log=log)
    return None
