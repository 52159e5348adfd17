"""Schedules of two programs that were written apart: each is known by its rates, whatever its class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from optexp.equivalence.optimizer_rules import LATER
from optexp.equivalence.rule import RULE, Rule
from optexp.records.verification import Finding, broken

STEPS = 4096  # whose rates are looked at
TOGETHER = 32  # steps that one mean of later rates is of
APART = 1e-6  # of the largest rate: two classes compute a rate in other ways, and round it at each step

Schedule = tuple[str, list[float]]  # its class; of each `TOGETHER` steps the means of the least and the largest rate


def schedules(seen: Mapping[str, Tensor]) -> dict[str, Schedule]:
    """Schedules whose later rates are known, by name."""
    rule = Rule.unpacked(seen)
    found = dict[str, Schedule]()
    for name, held in rule.beside.items() if rule is not None else ():
        numbers = held.groups[0].get(LATER, []) if held.groups else []
        if rates := [number.value for number in numbers if isinstance(number.value, (int, float))]:
            found[name] = held.kind, [*map(float, rates)]
    return found


def unlike_schedules(seen: Mapping[str, Tensor], baseline: Mapping[str, Tensor]) -> Iterator[Finding]:
    """G0 of schedules of another name or class. Of a name and class that both have, all numbers are compared."""
    ours, theirs = schedules(seen), schedules(baseline)
    same = {name for name in ours.keys() & theirs.keys() if ours[name][0] == theirs[name][0]}
    left = {name: rates for name, (_, rates) in ours.items() if name not in same}
    for name, (_, expected) in theirs.items():
        if name in same or not left:
            continue
        parts = {other: _parts_at(rates, expected) for other, rates in left.items()}
        found = next((other for other, at in parts.items() if at is None), None)
        if found is None:
            other, at = next((other, at) for other, at in parts.items() if at is not None)
            values = f"{LATER} of {other} are {left[other][at]:.6g}, those of the baseline's {name} {expected[at]:.6g}"
            text = f"{values}, from about step {at // 2 * TOGETHER} on"
            yield replace(broken(f"{RULE}/{name}/{LATER}", text), used=1.0)
        else:
            del left[found]


def _parts_at(ours: Sequence[float], theirs: Sequence[float]) -> int | None:
    """Where the rates of two schedules part; a shorter one has ended."""
    most = max(map(abs, (*ours, *theirs)), default=0.0)
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (one, other) in pairs if abs(one - other) > APART * most), None)
