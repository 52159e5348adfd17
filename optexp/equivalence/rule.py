"""Class and hyperparameters of a program's optimizer, and of other optimizers and schedules that its step names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from optexp.program import NotCalled, Program
from optexp.program.counters import computed, still
from optexp.python_state.slots import HOW

RULE = "rule"  # prefix of an observation's name, and a finding's: of hyperparameters that a step leaves
CALLED = f"{RULE} called"  # of those that its optimizer was called with, where that is known
LARGEST = 2**63  # integers from here on are told as texts


@dataclass(frozen=True)
class Number:
    """One hyperparameter, or one of several that a key has.

    unit: u of the dtype, where it is a tensor; 0 of a Python number
    """

    value: bool | int | float | str | None
    unit: float = 0.0

    @classmethod
    def of(cls, value: Any) -> Number | None:
        """None of a value that is neither a number nor a text."""
        if isinstance(value, Tensor):
            if value.numel() != 1 or value.is_complex():
                return None
            unit = torch.finfo(value.dtype).eps / 2 if value.is_floating_point() else 0.0
            return cls(value.detach().item(), unit)
        match value:  # of subclasses, as NumPy's and enumerations are, the plain value
            case None | bool():
                return cls(value)
            case int():
                return cls(int(value) if abs(value) < LARGEST else str(value))
            case float() | str():
                return cls(float(value) if isinstance(value, float) else str(value))
        return None


Numbers = dict[str, list[Number]]  # by key


@dataclass(frozen=True)
class Group:
    """One of the optimizer's groups; `parameters` are names."""

    parameters: list[str]
    numbers: Numbers


@dataclass(frozen=True)
class Beside:
    """Another optimizer or a schedule: its class, and numbers by group."""

    kind: str
    groups: list[Numbers]


@dataclass(frozen=True)
class Rule:
    """Constants that an optimizer computes with.

    kind:    its class
    keys:    of its defaults
    groups:  its groups
    beside:  by name, other optimizers and schedules that a user's step names
    counted: names of the numbers that it keeps beside its parameters' state, and that steps change
    still:   names of those that no step has changed
    """

    kind: str
    keys: list[str]
    groups: list[Group]
    beside: dict[str, Beside]
    counted: list[str]
    still: list[str]

    @classmethod
    def of(cls, program: Program, called: Sequence[Mapping[str, Any]] = ()) -> Rule:
        """The rule of a program that has an optimizer.

        called: hyperparameters by group that it was called with, in place of the present ones
        """
        optimizer = program.optimizer
        assert optimizer is not None
        names = {parameter: alias.name for alias, parameter in program.parameters()}
        groups = called or optimizer.param_groups
        others = {} if program.step_state is None else program.step_state.rules()
        return cls(
            kind=type(optimizer).__qualname__,
            keys=[key for key in optimizer.defaults if key not in HOW],
            groups=[Group([names[p] for p in group["params"] if p in names], numbers(group)) for group in groups],
            beside={name: Beside(kind, [*map(numbers, held)]) for name, (kind, held) in others.items()},
            counted=sorted(program.counted().keys()),
            still=sorted(still(optimizer)),
        )

    def packed(self) -> Tensor:
        """Bytes of shape (n,), uint8."""
        return torch.frombuffer(bytearray(msgspec.msgpack.encode(self)), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, seen: Mapping[str, Tensor], name: str = RULE) -> Rule | None:
        """The rule that an observation holds; None where it holds none.

        Raises:
            msgspec.ValidationError: An arm wrote something else.
        """
        return msgspec.msgpack.decode(bytes(seen[name].tolist()), type=cls) if name in seen else None


def numbers(group: Mapping[str, Any]) -> Numbers:
    """Hyperparameters of a group that are numbers or texts."""
    found = {str(key): _of(value) for key, value in group.items() if key != "params" and key not in HOW}
    return {key: held for key, held in found.items() if held}


def _of(value: Any) -> list[Number]:
    """Numbers of a hyperparameter; none where it holds something else."""
    if isinstance(value, Counter):  # milestones
        value = sorted(value.elements())
    found = [Number.of(part) for part in (value if isinstance(value, (tuple, list)) else (value,))]
    return [] if None in found else [number for number in found if number is not None]


@contextmanager
def calls(program: Program) -> Iterator[list[dict[str, Any]]]:
    """Inside, hyperparameters by group that the optimizer of a user's own step was last called with: the step may set
    those of the next one afterwards. Empty where it is not called, as where a graph is replayed, and where its code is
    compiled, which a hook would have compiled again.

    Without numbers that the call computes from tensors, as Prodigy's `d`: they are compared as the step's state, whose
    changes rounding may move."""
    found: list[dict[str, Any]] = []
    optimizer = program.optimizer
    if not program.own_step or not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, NotCalled):
        yield found
        return
    if hasattr(optimizer.step, "_torchdynamo_orig_callable"):
        yield found
        return

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found[:] = map(dict, optimizer.param_groups)

    def leave_out(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        known = computed(optimizer)
        for before, after in zip(found, optimizer.param_groups, strict=False):
            known |= {key for key, value in before.items() if _computes(key, value, after.get(key))}
        found[:] = [{key: value for key, value in group.items() if key not in known} for group in found]

    handles = [optimizer.register_step_pre_hook(note), optimizer.register_step_post_hook(leave_out)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _computes(key: str, before: Any, after: Any) -> bool:
    """Whether an optimizer's step changes this real number of its group. `lr` does not count: it is always compared."""
    return key != "lr" and isinstance(before, float) and isinstance(after, float) and before != after
