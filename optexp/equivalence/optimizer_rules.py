"""The numbers that an optimizer computes with, of each parameter, beside those of the baseline's optimizer.

A learning rate that is 0.01 % off moves parameters by less than they are rounded, and no gate over tensors shows it.
The numbers lie in `param_groups`, and are compared themselves.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isclose
from typing import Any

import torch
from torch import Tensor

from optexp.program import NotCalled, Program
from optexp.program.counters import PREFIX, still
from optexp.records.verification import Finding, broken

OF_GROUPS = "optimizer/group"  # prefix of a changed hyperparameter's name
RULE = "rule"  # prefix of an observation's name, and a finding's: of hyperparameters that a step leaves
CALLED = f"{RULE} called"  # of those that its optimizer was called with, where that is known
HOW = {"foreach", "fused", "capturable", "differentiable"}  # options of the implementation, and of no result
WITHOUT_DECAY, WITHOUT_MOMENTUM = {"decoupled_weight_decay"}, {"dampening", "nesterov"}  # that these have a meaning
EXACT = 1e-12  # relative: schedules compute one rate in other orders
ROUNDINGS = 64.0  # in u of a tensor's dtype: a rate that a schedule has multiplied many times
LATER = "rates of later steps"  # of a schedule
LEFT = "the step leaves it; the baseline changes it in Python, which no captured graph repeats"
DECAY = "weight_decay"
IN_THE_LOSS = " (a decay in the loss in place of the optimizer's changes gradients: keep it in one place in both files)"
SHOWN = 4  # numbers
CLOSE = 0.02  # relative: numbers of two classes that lie closer together are taken for one number, written wrongly


@dataclass(frozen=True)
class Number:
    """One hyperparameter of one parameter.

    unit: u of the dtype, where it is a tensor; 0 of a Python number
    """

    value: Any
    unit: float = 0.0

    @classmethod
    def of(cls, value: Any) -> Number | None:
        """None of a value that is neither a number nor a text."""
        if isinstance(value, Tensor):
            if value.numel() != 1 or value.is_complex():
                return None
            unit = torch.finfo(value.dtype).eps / 2 if value.is_floating_point() else 0.0
            return cls(value.detach().item(), unit)
        return cls(value) if isinstance(value, (int, float, str, type(None))) else None


Numbers = Mapping[str, list[tuple[Any, float]]]
Pair = tuple[list[tuple[Any, float]], list[tuple[Any, float]]]


@contextmanager
def calls(program: Program) -> Iterator[list[Mapping[str, Any]]]:
    """Inside, hyperparameters by group that the optimizer of a user's own step was last called with: the step may set
    those of the next one afterwards. Empty where nobody calls it, as where a graph is replayed, and where its code is
    compiled, which a hook would have compiled again."""
    found: list[Mapping[str, Any]] = []
    optimizer = program.optimizer
    if not program.own_step or not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, NotCalled):
        yield found
        return
    if hasattr(optimizer.step, "_torchdynamo_orig_callable"):
        yield found
        return

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found[:] = map(dict, optimizer.param_groups)

    handle = optimizer.register_step_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()


def rule(program: Program, called: Sequence[Mapping[str, Any]] = ()) -> Tensor:
    """Class and hyperparameters of a program's optimizer, by parameter, as bytes of shape (n,), uint8.

    Beside them those of other optimizers and of schedules that a user's step names, by group.

    called: hyperparameters that it was called with, in place of the present ones
    """
    assert program.optimizer is not None
    aliases = {parameter: alias.name for alias, parameter in program.parameters()}
    groups = [
        ([aliases[p] for p in group["params"] if p in aliases], _numbers(group))
        for group in called or program.optimizer.param_groups
    ]
    others = {} if program.step_state is None else program.step_state.rules()
    beside = {name: (kind, [*map(_numbers, held)]) for name, (kind, held) in others.items()}
    known = [key for key in program.optimizer.defaults if key not in HOW]
    counters = [program.counted().keys(), still(program.optimizer)]
    text = json.dumps([type(program.optimizer).__qualname__, known, groups, beside, *map(sorted, counters)])
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def shown(seen: Mapping[str, Tensor]) -> set[str]:
    """Names of hyperparameters that the program's own optimizer was called with, where that is known."""
    groups = json.loads(bytes(seen[CALLED].tolist()))[2] if CALLED in seen else ()
    return {f"{OF_GROUPS}{index}/{key}" for index, (_, numbers) in enumerate(groups) for key in numbers}


def hyperparameters(seen: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
    """Those of the program's own optimizer, by name."""
    groups = json.loads(bytes(seen[RULE].tolist()))[2] if RULE in seen else ()
    for index, (_, numbers) in enumerate(groups):
        for key, held in numbers.items():
            yield from ((f"{OF_GROUPS}{index}/{key}/{place}", value) for place, (value, _) in enumerate(held))


def _numbers(group: Mapping[str, Any]) -> Numbers:
    found = {key: _of(value) for key, value in group.items() if key != "params" and key not in HOW}
    return {key: [(number.value, number.unit) for number in held] for key, held in found.items() if held}


def _of(value: Any) -> list[Number]:
    """Numbers of a hyperparameter; none where it holds something else."""
    if isinstance(value, Counter):  # milestones
        value = sorted(value.elements())
    found = [Number.of(part) for part in (value if isinstance(value, (tuple, list)) else (value,))]
    return [] if None in found else [number for number in found if number is not None]


def unlike_rules(seen: Mapping[str, Tensor], baseline: Mapping[str, Tensor]) -> Iterator[Finding]:
    """G0 of hyperparameters that both arms have, one finding of each key that differs.

    Of optimizers of two classes, numbers that nearly agree are unseen: they may mean the same, or be wrong by little.
    """
    if RULE not in seen or RULE not in baseline:
        return
    known = CALLED if CALLED in seen and CALLED in baseline else RULE  # a replayed or compiled step tells no call
    ours, theirs = (json.loads(bytes(arm[known].tolist())) for arm in (seen, baseline))
    yield from _of_optimizers(ours, theirs)
    yield from _of_other_names(ours, theirs)
    for name, (kind, groups) in ours[3].items():
        other, expected = theirs[3].get(name, ("", []))
        if kind != other:
            continue
        differing = [_differing(*pair) for pair in zip(groups, expected, strict=False)]
        named = {key: pair for found in differing for key, pair in found.items()}
        for key, pair in named.items():
            if key == LATER and len(named) > 1:
                continue  # the others say why
            one, two = _first_differing(pair)
            values = f"{key} of {name} is {_shown(one)}, the baseline's {_shown(two)}"
            yield _other(f"{name}/{key}", values)


def _of_other_names(ours: Any, theirs: Any) -> Iterator[Finding]:
    """Switches of an optimizer that a step makes, where the other program has its class by other names alone."""
    for (kind, _, groups, one, *_), other, whose in (
        (ours, theirs[3], "the baseline"),
        (theirs, ours[3], "the second program"),
    ):
        for name in sorted(other.keys() - one.keys()):
            made, expected = other[name]
            alike = [numbers for _, numbers in groups] * (kind == made)
            alike += [numbers for its, held in one.values() if its == made for numbers in held]
            for key, values in ((key, values) for numbers in expected for key, values in numbers.items()):
                known = [numbers[key] for numbers in alike if key in numbers]
                if known and values not in known and isinstance(values[0][0], bool):
                    yield _other(f"{name}/{key}", f"{key} of {name} is {values[0][0]} in {whose}, and not in the other")


def _of_optimizers(ours: Any, theirs: Any) -> Iterator[Finding]:
    """Of the program's own, by parameter."""
    (kind, _, groups, _, moved, left), (other, keys, others, _, expected_moves, _) = ours, theirs
    for name in sorted({*left} & {*expected_moves}):
        yield broken(f"{RULE}/{name.removeprefix(PREFIX)}", LEFT)
    counts = {*moved} & {*expected_moves}  # which are compared as state
    keys = set(keys) - {name.rpartition("/")[2] for name in counts}
    known = [(names, {key: numbers[key] for key in keys if key in numbers}) for names, numbers in others]
    expected, met = {name: numbers for names, numbers in known for name in names}, set[str]()
    for name, numbers in ((name, numbers) for names, numbers in groups for name in names):
        for key, pair in _differing(numbers, expected.get(name, {})).items():
            if key in met:
                continue
            met.add(key)
            values = f"{key} of {name} is {_shown(pair[0])} where the baseline's optimizer has {_shown(pair[1])}"
            if key == DECAY and 0 in (value for held in pair for value, _ in held) and not _is_decoupled(numbers):
                values += IN_THE_LOSS
            if kind == other:
                yield _other(key, values)
            elif _close(*pair):
                why = f"{values}, and the optimizers are of two classes, {kind} and {other}: make both equal"
                yield Finding(f"{RULE}/{key}", error_rms=0.0, unseen=why)


def _is_decoupled(numbers: Numbers) -> bool:
    """Whether the decay is no part of the gradient, as AdamW's."""
    return any(value for value, _ in numbers.get("decoupled_weight_decay", ()))


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
    return all(value == 0 for value, _ in numbers.get(key, [(1, 0.0)]))


def _same(ours: tuple[Any, float], theirs: tuple[Any, float]) -> bool:
    """Equal but for rounding: to float32, which fused optimizers do, or to the dtype of a tensor."""
    (a, coarse), (b, other) = ours, theirs
    if a == b or (a != a and b != b):
        return True
    if not (_real(a) and _real(b)):
        return False
    unit = max(coarse, other)
    if isclose(a, b, rel_tol=max(EXACT, ROUNDINGS * unit)):
        return True
    return a in _roundings(b) or b in _roundings(a)


def _roundings(number: float) -> set[float]:
    return {torch.tensor(number, dtype=torch.float32).item()}


def _real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _close(ours: list[tuple[Any, float]], theirs: list[tuple[Any, float]]) -> bool:
    """Whether numbers nearly agree; flags and texts do not."""
    pairs = [(a, b) for (a, _), (b, _) in zip(ours, theirs, strict=False)]
    return len(ours) == len(theirs) and all(_real(a) and _real(b) and isclose(a, b, rel_tol=CLOSE) for a, b in pairs)


def _first_differing(pair: Pair) -> Pair:
    """Of many numbers, the first ones that are not the same; none behind the end of one."""
    if len(pair[0]) <= SHOWN:
        return pair
    both = enumerate(zip(*pair, strict=False))
    at = next((place for place, (one, other) in both if not _same(one, other)), min(map(len, pair)))
    return pair[0][at : at + 1], pair[1][at : at + 1]


def _shown(numbers: list[tuple[Any, float]]) -> str:
    values = [value for value, _ in numbers]
    return str(values[0] if len(values) == 1 else tuple(values))
