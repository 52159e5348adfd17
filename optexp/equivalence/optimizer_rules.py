"""The numbers that an optimizer computes with, of each parameter, beside those of the baseline's optimizer.

A learning rate that is 0.01 % off moves parameters by less than they are rounded, and no gate over tensors shows it.
The numbers lie in `param_groups`, and are compared themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from math import isclose
from typing import TypeGuard

import torch
from torch import Tensor

from optexp.equivalence.rule import CALLED, RULE, Number, Numbers, Rule
from optexp.program.counters import PREFIX
from optexp.records.verification import Finding, broken

OF_GROUPS = "optimizer/group"  # prefix of a changed hyperparameter's name
WITHOUT_DECAY, WITHOUT_MOMENTUM = {"decoupled_weight_decay"}, {"dampening", "nesterov"}  # that these have a meaning
EXACT = 1e-12  # relative: schedules compute one rate in other orders
ROUNDINGS = 64.0  # in u of a tensor's dtype: a rate that a schedule has multiplied many times
LATER = "rates of later steps"  # of a schedule
LEFT = "the step leaves it; the baseline changes it in Python (a captured graph repeats no Python)"
DECAY = "weight_decay"
IN_THE_LOSS = " (a decay in the loss in place of the optimizer's changes gradients: keep it in one place in both files)"
SHOWN = 4  # numbers
CLOSE = 0.02  # relative: numbers of two classes that lie closer together are taken for one number, written wrongly

Pair = tuple[list[Number], list[Number]]


def shown(seen: Mapping[str, Tensor]) -> set[str]:
    """Names of hyperparameters that the program's own optimizer was called with, where that is known."""
    called = Rule.unpacked(seen, CALLED)
    return {name.rpartition("/")[0] for name in _by_name(called)}


def hyperparameters(seen: Mapping[str, Tensor]) -> dict[str, Number]:
    """Those of the program's own optimizer, by name."""
    return _by_name(Rule.unpacked(seen))


def all_hyperparameters(seen: Mapping[str, Tensor]) -> dict[str, Number]:
    """The same with those of other optimizers that its step names."""
    rule = Rule.unpacked(seen)
    others = rule.beside.items() if rule else ()
    beside = ((f"{name}/{index}", group) for name, other in others for index, group in enumerate(other.groups))
    return _by_name(rule) | _named(beside)


def _by_name(rule: Rule | None) -> dict[str, Number]:
    return _named((f"{OF_GROUPS}{index}", group.numbers) for index, group in enumerate(rule.groups if rule else ()))


def _named(named: Iterable[tuple[str, Numbers]]) -> dict[str, Number]:
    keyed = ((f"{group}/{key}", held) for group, numbers in named for key, held in numbers.items())
    return {f"{name}/{place}": number for name, held in keyed for place, number in enumerate(held)}


def unlike_rules(
    seen: Mapping[str, Tensor], baseline: Mapping[str, Tensor], elsewhere: Set[str] = frozenset()
) -> Iterator[Finding]:
    """G0 of hyperparameters that both arms have, one finding of each key that differs.

    elsewhere: counts that the candidate's optimizer keeps by another name

    Of optimizers of two classes, numbers that nearly agree are unseen: they may mean the same, or be wrong by little.
    """
    known = CALLED if CALLED in seen and CALLED in baseline else RULE  # a replayed or compiled step tells no call
    ours, theirs = (Rule.unpacked(arm, known) for arm in (seen, baseline))
    if ours is None or theirs is None:
        return
    yield from _of_optimizers(ours, theirs, elsewhere)
    yield from _of_other_names(ours, theirs)
    for name, held in ours.beside.items():
        expected = theirs.beside.get(name)
        if expected is None or held.kind != expected.kind:
            continue
        differing = [_differing(*pair) for pair in zip(held.groups, expected.groups, strict=False)]
        named = {key: pair for found in differing for key, pair in found.items()}
        for key, pair in named.items():
            if key == LATER and len(named) > 1:
                continue  # the others say why
            one, two = _first_differing(pair)
            values = f"{key} of {name} is {_shown(one)}, the baseline's {_shown(two)}"
            yield _other(f"{name}/{key}", values)


def _of_other_names(ours: Rule, theirs: Rule) -> Iterator[Finding]:
    """Switches of an optimizer that a step makes, where the other program has its class by other names alone."""
    for one, other, whose in ((ours, theirs, "the baseline"), (theirs, ours, "the second program")):
        for name in sorted(other.beside.keys() - one.beside.keys()):
            made = other.beside[name]
            alike = [group.numbers for group in one.groups if one.kind == made.kind]
            alike += [numbers for held in one.beside.values() if held.kind == made.kind for numbers in held.groups]
            for key, held in ((key, held) for numbers in made.groups for key, held in numbers.items()):
                known = [numbers[key] for numbers in alike if key in numbers]
                if known and held not in known and isinstance(held[0].value, bool):
                    yield _other(f"{name}/{key}", f"{key} of {name} is {_shown(held)} in {whose}, and not in the other")


def _of_optimizers(ours: Rule, theirs: Rule, elsewhere: Set[str]) -> Iterator[Finding]:
    """Of the program's own, by parameter."""
    for name in sorted(({*ours.still} & {*theirs.counted}) - elsewhere):
        yield broken(f"{RULE}/{name.removeprefix(PREFIX)}", LEFT)
    counts = {*ours.counted} & {*theirs.counted}  # which are compared as state
    keys = {*theirs.keys} - {name.rpartition("/")[2] for name in counts}
    expected, met = dict[str, Numbers](), set[str]()
    for group in theirs.groups:
        known = {key: held for key, held in group.numbers.items() if key in keys}
        expected |= dict.fromkeys(group.parameters, known)
    for name, numbers in ((name, group.numbers) for group in ours.groups for name in group.parameters):
        for key, pair in _differing(numbers, expected.get(name, {})).items():
            if key in met:
                continue
            met.add(key)
            values = f"{key} of {name} is {_shown(pair[0])} where the baseline's optimizer has {_shown(pair[1])}"
            absent = any(number.value == 0 for held in pair for number in held)
            if key == DECAY and absent and not _is_decoupled(numbers):
                values += IN_THE_LOSS
            if ours.kind == theirs.kind:
                yield _other(key, values)
            elif _close(*pair):
                why = f"{values}, and the optimizers are of two classes, {ours.kind} and {theirs.kind}: make both equal"
                yield Finding(f"{RULE}/{key}", error_rms=0.0, unseen=why)


def _is_decoupled(numbers: Numbers) -> bool:
    """Whether the decay is no part of the gradient, as AdamW's."""
    return any(number.value for number in numbers.get("decoupled_weight_decay", ()))


def _other(key: str, values: str) -> Finding:
    """A failure; the error that it makes in a tensor comes first, where that fails too."""
    return replace(broken(f"{RULE}/{key}", values), used=1.0)


def with_rules(findings: Iterable[Finding], rules: Sequence[Finding]) -> Iterator[Finding]:
    """Findings of updates that fail name the hyperparameters that differ."""
    words = "; ".join(rule.message for rule in rules if not rule.ok)
    for finding in findings:
        of_update = not finding.ok and finding.tensor.startswith(("change/", "optimizer/"))
        yield replace(finding, message=f"{finding.message}; {words}") if words and of_update else finding


def _differing(ours: Numbers, theirs: Numbers) -> dict[str, Pair]:
    """Hyperparameters that both have, with other values."""
    both = sorted((ours.keys() & theirs.keys()) - (_idle(ours) & _idle(theirs)))
    pairs = {key: (ours[key], theirs[key]) for key in both}
    return {
        key: (one, other)
        for key, (one, other) in pairs.items()
        if len(one) != len(other) or not all(map(_same, one, other))
    }


def _idle(numbers: Numbers) -> set[str]:
    """Keys without a meaning, as another one is zero."""
    idle = WITHOUT_DECAY if _zero(numbers, "weight_decay") else set()
    return idle | (WITHOUT_MOMENTUM if _zero(numbers, "momentum") else set())


def _zero(numbers: Numbers, key: str) -> bool:
    return all(number.value == 0 for number in numbers.get(key, [Number(1)]))


def _same(ours: Number, theirs: Number) -> bool:
    """Equal but for rounding: to float32, which fused optimizers do, or to the dtype of a tensor."""
    a, b = ours.value, theirs.value
    if a == b or (a != a and b != b):
        return True
    if not (_real(a) and _real(b)):
        return False
    if isclose(a, b, rel_tol=max(EXACT, ROUNDINGS * max(ours.unit, theirs.unit))):
        return True
    return a in _roundings(b) or b in _roundings(a)


def _roundings(number: float) -> set[float]:
    return {torch.tensor(number, dtype=torch.float32).item()}


def _real(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _close(ours: list[Number], theirs: list[Number]) -> bool:
    """Whether numbers nearly agree; flags and texts do not."""
    pairs = [(one.value, other.value) for one, other in zip(ours, theirs, strict=False)]
    return len(ours) == len(theirs) and all(_real(a) and _real(b) and isclose(a, b, rel_tol=CLOSE) for a, b in pairs)


def _first_differing(pair: Pair) -> Pair:
    """Of many numbers, the first ones that are not the same; none behind the end of one."""
    if len(pair[0]) <= SHOWN:
        return pair
    both = enumerate(zip(*pair, strict=False))
    at = next((place for place, (one, other) in both if not _same(one, other)), min(map(len, pair)))
    return pair[0][at : at + 1], pair[1][at : at + 1]


def _shown(numbers: list[Number]) -> str:
    values = [number.value for number in numbers]
    return str(values[0] if len(values) == 1 else tuple(values))
