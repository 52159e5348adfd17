"""Buffers that a step changes, and that a second implementation keeps in Python: a count as an int, a norm as a float.

Each must change there as it does in the baseline, by any name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from optexp.equivalence.attributes import NAMED, changes
from optexp.equivalence.observation import Observation, unpacked
from optexp.equivalence.step_counterparts import COUNTS
from optexp.equivalence.tensor_math import identical
from optexp.program import StepState
from optexp.python_state import likeness
from optexp.records.verification import Finding

IN_PYTHON = "buffer {}: the second program keeps it in Python, where it changes alike"


def with_buffers(
    seen: Observation, baseline: Observation, start: Mapping[str, Tensor], state: StepState | None, unit: float
) -> tuple[Observation, list[Finding]]:
    """The candidate's observation with those buffers of the baseline's, and what there is to say of them.

    start: the state that the baseline's step began with
    state: of a step of the user's own
    unit:  u of the arithmetic
    """
    if not seen["flag/another_model"] or not (missing := [*_missing(seen, baseline, start)]):
        return seen, []
    pairs = [change.pair for change in changes(seen).values()]
    pairs += state.values([*unpacked("remembers", seen).values()]) if state is not None else []
    found, told = dict(seen), list[Finding]()
    for name in missing:
        before, after = start[f"buffer/{name}"], baseline[f"buffer/{name}"]
        lacking = likeness.lacking(pairs, (before.to(after), after), unit)
        if any(lacking) or (lacking and after.numel() > 1):
            continue  # which fails G0
        keys = (f"before/buffer/{name}", f"buffer/{name}", f"changed/buffer/{name}")
        found |= {key: baseline[key] for key in keys if key in baseline}
        kept = Finding(f"{NAMED}{name}", bitwise=True, message=IN_PYTHON.format(name))
        told.append(Finding(f"buffer/{name}", error_rms=0.0, unseen=COUNTS) if lacking else kept)
    return found, told


def _missing(seen: Observation, baseline: Observation, start: Mapping[str, Tensor]) -> Iterator[str]:
    """Buffers that the baseline's step changes, and the candidate's model lacks."""
    for key, tensor in baseline.items():
        held = key.startswith("buffer/") and key not in seen and key in start
        if held and not identical(tensor, start[key].to(tensor)):
            yield key.removeprefix("buffer/")
