"""Your own second implementation in the model's place: hand-written against library, before against after."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optexp.config import ConfigError, suggest
from optexp.lookup import find, spelled
from optexp.program import Alias, Program, placed, preserved, to_device
from optexp.strategy import Counters, Evidence, Notes, Stage, Strategy
from optexp.takehome.ownlisting import spelled_model
from optexp.usermodel.usercode import Function, maker

if TYPE_CHECKING:
    from optexp.insight.trace import Trace

KEY = "strategy.replace.target"
Pairs = dict[str, tuple[str, bool]]  # the baseline's names: what the new model calls it, and whether it is transposed


@dataclass
class Replace(Strategy):
    """`target` is called as the baseline's model is, and starts from its parameters and buffers.

    target:        file.py:ModelNew or package.module:ModelNew: a class, a factory, a function or an instance
    args, kwargs:  what it is made with; empty: what workload=module made the baseline's with
    names:         {old: new} where parameters or buffers are called otherwise; `*` is any text, and `.T` after the new
                   name says that it holds the transpose, as in {*.weight: layers.*.w.T}
    """

    stage = Stage.MODEL

    target: str | None = None
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def unsupported(self, program: Program, device: torch.device) -> str | None:
        if self.target is None:
            return f"name your second implementation, as in {KEY}=file.py:ModelNew or {KEY}=package.module:ModelNew"
        return None

    def apply(self, program: Program) -> tuple[Program, Notes]:
        assert self.target is not None
        args, kwargs = (self.args, self.kwargs) if self.args or self.kwargs else program.made_with
        old, new = program.model, maker(find(self.target, KEY), args, kwargs, f"{KEY}={self.target}")()
        dtypes = {p.dtype for p in old.parameters() if p.is_floating_point()}
        placed(new, program.device, dtypes.pop() if len(dtypes) == 1 else None)
        pairs = pair(old, new, self.names)
        take_over(old, new, pairs, program.optimizer)
        aliases = {name: Alias(theirs, turned) for theirs, (name, turned) in pairs.items()}
        optimized = replace(program, model=new, forward=None, aliases=aliases)
        calls: list[None] = []
        hook = new.register_forward_hook(lambda *_: calls.append(None))
        with preserved(optimized), torch.set_grad_enabled(program.trains):
            batch = to_device(program.feed.next(), program.device)
            optimized.predict(batch) if program.memory is None else optimized.step(optimized, batch)
            stepped = program.memory is not None  # by the user, who may call other methods than forward
        hook.remove()
        made = {"args": args, "kwargs": kwargs, "function": isinstance(new, Function)}
        return optimized, {"calls": len(calls) or int(stepped), "old": type(old).__name__, "pairs": pairs, **made}

    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        loaded = f"{len(notes['pairs'])} parameters and buffers taken over"
        return Evidence(notes["calls"] > 0, f"{self.target} called in place of {notes['old']}, {loaded}")

    def recipe(self, notes: Notes) -> str:
        assert self.target is not None
        lines, name = spelled(self.target, "second")
        made = spelled_model(maker(find(self.target, KEY), notes["args"], notes["kwargs"]), f"second.{name}")
        if notes["function"]:
            lines, made = f"from optexp.usermodel.usercode import Function\n{lines}", f"Function({made})"
        lines = f"from functools import partial\n{lines}" if "partial(" in made else lines
        take = f"take_over(model, replacement, {notes['pairs']!r}, optimizer)"
        return f"{lines}\nreplacement = {made}.to(device, dtype)\n{take}\nmodel = forward = replacement"


def pair(old: nn.Module, new: nn.Module, names: Mapping[str, str]) -> Pairs:
    """What the new model calls each parameter and buffer of the old one; a `ConfigError` says what does not fit."""
    everything = [*dict(old.named_parameters()), *dict(old.named_buffers())]
    for pattern in names:
        if not any(re.fullmatch(as_regex(pattern), name) for name in everything):
            raise ConfigError(f"strategy.replace.names: the baseline has no {pattern}{suggest(pattern, everything)}")
    pairs: Pairs = {}
    for ours, theirs in (
        (dict(old.named_parameters()), dict(new.named_parameters())),
        (dict(old.named_buffers()), dict(new.named_buffers())),
    ):
        called = {name: translated(name, names) for name in ours}
        missing = [(name, other) for name, (other, _) in called.items() if other not in theirs]
        used = {other for other, _ in called.values()}
        left = [name for name, t in theirs.items() if name not in used and (missing or isinstance(t, nn.Parameter))]
        if missing or left:
            raise ConfigError(mismatch(missing, left))
        for name, (other, turned) in called.items():
            fits(name, ours[name], other, theirs[other], turned)
        pairs |= called
    return pairs


def translated(name: str, names: Mapping[str, str]) -> tuple[str, bool]:
    for old, new in names.items():
        if found := re.fullmatch(as_regex(old), name):
            for text in found.groups():
                new = new.replace("*", text, 1)
            return new.removesuffix(".T"), new.endswith(".T")
    return name, False


def as_regex(pattern: str) -> str:
    return "(.*)".join(map(re.escape, pattern.split("*")))


def mismatch(missing: list[tuple[str, str]], left: list[str]) -> str:
    if not missing:
        return f"{KEY} has {', '.join(left)}, which the baseline has not: both must learn the same parameters"
    wanted = ", ".join(name if name == other else f"{name} (as {other})" for name, other in missing)
    found = f", and {', '.join(left)} beside" if left else ""
    example = f"'strategy.replace.names={{{missing[0][0]}: {left[0] if left else 'its_name'}}}'"
    return f"{KEY} has nothing for the baseline's {wanted}{found}: say what it is called, as in {example}"


def fits(name: str, ours: Tensor, other: str, theirs: Tensor, turned: bool) -> None:
    shape, found = list(ours.shape), list(theirs.shape)
    if (found[::-1] if turned and len(found) == 2 else found) != shape:
        hint = f": if it is the transpose, add 'strategy.replace.names={{{name}: {other}.T}}'"
        hint = hint if found[::-1] == shape and len(shape) == 2 else ""
        turn = ".T" if turned else ""
        raise ConfigError(f"{KEY}: {other}{turn} has shape {found}, and the baseline's {name} has {shape}{hint}")


def take_over(old: nn.Module, new: nn.Module, pairs: Pairs, optimizer: Optimizer | None) -> None:
    """Values, `requires_grad`, and the optimizer with its state go from the old model's parameters to the new one's."""
    new.train(old.training)
    ours, theirs = (dict(m.named_parameters()) | dict(m.named_buffers()) for m in (old, new))
    new_of = {}
    for name, (other, turned) in pairs.items():
        parameter = theirs[other]
        parameter.data.copy_(ours[name].t() if turned else ours[name])
        parameter.requires_grad_(ours[name].requires_grad)
        new_of[ours[name]] = parameter, turned
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        group["params"] = [new_of[p][0] for p in group["params"]]
    for p, state in list(optimizer.state.items()):
        parameter, turned = new_of[p]
        del optimizer.state[p]
        optimizer.state[parameter] = {
            key: value.t().contiguous() if turned and isinstance(value, Tensor) else value
            for key, value in state.items()
        }
