"""Your own second implementation in the model's place: hand-written against library, before against after."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optexp.errors import ConfigError, NotCovered
from optexp.program import (
    Alias,
    NotCalled,
    Program,
    is_training,
    pass_on,
    placed,
    preserved,
    set_training,
    take_modes,
    to_device,
)
from optexp.python_state.slots import tensors_in
from optexp.schema import suggest
from optexp.strategy import (
    REASSOCIATES,
    Contract,
    Counters,
    Evidence,
    Notes,
    Stage,
    Strategy,
    Unsupported,
    UserFile,
    precision,
)
from optexp.support.wrapped import is_wrapped, parts
from optexp.user_code.adapters import Function, Maker, maker
from optexp.user_code.aliasing import holdings, listed, partners, with_names
from optexp.user_code.importing import require_file
from optexp.user_code.listing import spelled_model
from optexp.user_code.lookup import find, require_place, spelled
from optexp.user_code.objects import with_objects, written
from optexp.user_code.of_model import Contents, failing, made_of, takes_model
from optexp.user_code.same_start import own_generators, renamed, same_values
from optexp.user_code.trial_runs import size_lazy_layers
from optexp.user_code.workload import UserWorkload

if TYPE_CHECKING:
    from optexp.trace import Trace
    from optexp.workload import Workload

KEY = "strategy.replace.target"
NO_TARGET = f"name your second implementation, as in {KEY}=file.py:ModelNew or {KEY}=package.module:ModelNew"
Pairs = dict[str, tuple[str, bool]]  # the baseline's names: what the new model calls it, and whether it is transposed


@dataclass
class Replace(Strategy):
    """`target` is called as the baseline's model is, and starts from its parameters and buffers.

    target:        file.py:ModelNew or package.module:ModelNew: a class, a factory, a function or an instance
                   file.py alone puts the whole file in the place of the workload's: its model, loss, optimizer, loader
                   and train_step, with the same settings. The model's constructor must draw the same values
    args, kwargs:  what it is made with, objects by `_target_` too; empty: what workload=module made the baseline's with
    names:         {old: new} where parameters or buffers are called otherwise; `*` is any text, and `.T` after the new
                   name says that it holds the transpose, as in {*.weight: layers.*.w.T}. Without it, other names are
                   found where both constructors draw the same values from one seed, as KernelBench asks
    of_model:      `target(model, *args, **kwargs)` makes it of the baseline's model, as quantizing does, or edits that
                   model and returns nothing; null: it does where its only required parameter is called `model` or is
                   annotated as an nn.Module. What only infers may then hold other parameters, packed ones too
    precision:     bfloat16, float16, tf32 or int8, where it computes in that: results are judged by its limits
    """

    stage = Stage.MODEL

    target: str | None = None
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    of_model: bool | None = None
    precision: str | None = None

    def __post_init__(self) -> None:
        self.first_names: dict[str, str] = {}
        if self.precision is not None:
            precision(self.precision)  # refuses others

    @property
    def contract(self) -> Contract:
        return REASSOCIATES if self.precision is None else precision(self.precision)

    def check_options(self) -> None:
        if self.target is None:
            raise ConfigError(f"replace: {NO_TARGET}")
        if self.whole_file:
            require_file(Path(self.target).expanduser(), KEY)
        else:
            require_place(self.target, KEY)

    @property
    def whole_file(self) -> bool:
        """Whether `target` names a file and nothing in it."""
        return self.target is not None and self.target.endswith(".py")

    def rebuild(self, workload: Workload) -> Workload:
        if not self.whole_file:
            return workload
        require_file(Path(self.target or "").expanduser(), KEY)
        if getattr(workload, "path", None) is None:
            raise Unsupported(
                f"{self.asked} is a whole file, which takes the place of another: give workload=module workload.path=,"
                f" or name a model in it, as in {self.asked}:ModelNew"
            )
        rebuilt: Workload = replace(workload, path=self.target)  # type: ignore[call-arg]
        self.first_names = other_names(workload, rebuilt)
        return rebuilt

    def unsupported(self, program: Program, device: torch.device) -> str | None:
        if self.target is None:
            return NO_TARGET
        if self.whole_file and (self.args or self.kwargs or self.names or self.of_model is not None):
            return f"args, kwargs, names and of_model are for one name of a file: write {self.asked}:ModelNew"
        return None

    @property
    def asked(self) -> str:
        return f"{KEY}={self.target}"

    def apply(self, program: Program) -> tuple[Program, Notes]:
        assert self.target is not None
        if self.whole_file:
            aliases = {theirs: Alias(name) for name, theirs in self.first_names.items()}
            return replace(program, aliases=aliases or program.aliases, apart=True), {"file": self.target}
        old, found, by_values = program.model, find(self.target, KEY), False
        ours = with_objects(self.args, "strategy.replace.args"), with_objects(self.kwargs, "strategy.replace.kwargs")
        given = ours if self.args or self.kwargs else program.made_with
        of_model = self.of_model if self.of_model is not None else takes_model(found, *given)
        args, kwargs = ours if of_model else given
        keeps_dtypes = of_model
        first = Contents.of(old) if of_model else None
        if of_model:
            optimized, pairs = self.made_of_model(program, found, args, kwargs)
        else:
            made_anew = maker(found, args, kwargs, self.asked)
            new = made_anew()
            some: list[Tensor] = [*old.parameters()] or [*old.buffers()]  # a quantized model may have buffers alone
            dtypes = {tensor.dtype for tensor in some if tensor.is_floating_point()}
            keeps_dtypes = len(dtypes) != 1
            placed(new, program.device, None if keeps_dtypes else dtypes.pop())
            size_lazy_layers(replace(program, model=new, forward=None))
            pairs, by_values = self.paired(program, new, made_anew)
            take_over(old, new, pairs, program.optimizer)
            aliases = {
                theirs: Alias(name, turned)
                for name, (theirs, turned) in pairs.items()
                if kind(tensors_in(old)[name]) == kind(tensors_in(new)[theirs])
            }
            optimized = with_names(replace(program, model=new, forward=None), aliases)
        unchanged = first is not None and optimized.model is old and Contents.of(old).same_as(first)
        if of_model:  # any other is met by the first step, which must be like all others (FIRST)
            naming = failing(f"the model that {self.asked} makes failed on a batch")
            with naming, preserved(optimized), torch.set_grad_enabled(program.trains):
                batch = to_device(program.feed.next(), program.device)
                optimized.step(optimized, batch) if program.own_step else optimized.predict(batch)
        made = {"args": args, "kwargs": kwargs, "function": isinstance(optimized.model, Function)}
        made |= {"of_model": of_model, "edited": optimized.model is old, "unchanged": unchanged}
        made |= {"taken": program.trains or not of_model, "by_values": by_values, "keeps_dtypes": keeps_dtypes}
        return optimized, {"old": type(old).__name__, "pairs": pairs, **made}

    def paired(self, program: Program, new: nn.Module, made_anew: Maker) -> tuple[Pairs, bool]:
        """The new model's names of parameters and buffers, and whether their first values say so.

        Raises:
            ConfigError: neither names nor values fit
        """
        try:
            return pair(program.model, new, self.names, program.trains), False
        except ConfigError:
            names = {} if self.names else renamed(program.model, made_anew, *program.made_with)
            if not names:
                raise
            return pair(program.model, new, names, program.trains), True

    def made_of_model(
        self, program: Program, found: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Program, Pairs]:
        """The program with a model that the user made of its own, and which tensors are the same or have the same name.

        Raises:
            ConfigError: training has no parameter or buffer to compare one of the baseline's with
            UserFailure: the user's function raises
        """
        held, training = holdings(program), is_training(program.model)
        new = made_of(program.model, found, args, kwargs, self.asked)
        if is_training(new) is not training:
            set_training(new, training)
        known = partners(held, new)
        pairs = {one.name: (name, False) for name, one in known.items()}
        missing = [one.name for one in held.all if one.name not in pairs]
        if missing and program.trains:
            raise ConfigError(
                f"{self.asked} makes a model that holds nothing for the baseline's {listed(missing)}: training is"
                " compared tensor by tensor; packed or fused copies are for workload.mode=forward"
            )
        tensors = tensors_in(new)
        hand_over(program.optimizer, {one.tensor: (tensors[name], False) for name, one in known.items()})
        return replace(program, model=new, forward=None), pairs

    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        if self.whole_file:
            return Evidence(True, f"the program was built from {self.target}")
        loaded = f"{len(notes['pairs'])} parameters and buffers taken over"
        loaded += ", told by the values that both constructors draw from one seed" * notes["by_values"]
        if notes["unchanged"] and same_work(before, after):
            text = f"{self.target} left the baseline's model as it was: it must return a model, or edit the one given"
            return Evidence(False, text)
        if notes["edited"]:
            return Evidence(True, f"{self.target} edited {notes['old']}")
        loaded = f"made of it, {len(notes['pairs'])} parameters and buffers kept" if notes["of_model"] else loaded
        return Evidence(True, f"{self.target} called in place of {notes['old']}, {loaded}")

    def recipe(self, notes: Notes) -> str:
        assert self.target is not None
        if self.whole_file:
            return ""
        if notes["edited"] and notes["taken"]:
            raise NotCovered(f"{self.target} edits a model whose optimizer exists")
        lines, name = spelled(self.target, "second")
        if notes["of_model"]:
            given = [written(value, "an argument of the model") for value in notes["args"]]
            given += [f"{key}={written(value, f'the argument {key}')}" for key, value in notes["kwargs"].items()]
            made = f"second.{name}({', '.join(['model', *given])})"
        else:
            made = spelled_model(maker(find(self.target, KEY), notes["args"], notes["kwargs"]), f"second.{name}")
        if notes["function"]:
            lines, made = f"from optexp.user_code.adapters import Function\n{lines}", f"Function({made})"
        lines = f"from functools import partial\n{lines}" if "partial(" in made else lines
        if not notes["of_model"]:
            made += ".to(device)" if notes["keeps_dtypes"] else ".to(device, dtype)"
        take = f"take_over(model, replacement, {notes['pairs']!r}, optimizer)\n" if notes["taken"] else ""
        if notes["edited"]:
            return f"{lines}\n{made}\nforward = model"
        return f"{lines}\nreplacement = {made}\n{take}model = forward = replacement"

    def patch(self, notes: Notes, file: UserFile) -> str:
        raise NotCovered(f"{self.target} is a file already")


def other_names(first: Workload, second: Workload) -> dict[str, str]:
    """Another file's names of the first model's tensors, by their values; empty where the names fit."""
    if not isinstance(first, UserWorkload) or not isinstance(second, UserWorkload):
        return {}  # a script makes its model once, by its own seed
    one, other = first.anew().parts.model, second.anew().parts.model
    with suppress(Exception), own_generators(), torch.device("meta"):  # names need no values
        if tensors_in(one()).keys() == tensors_in(other()).keys():
            return {}
    return same_values(one, other)


def same_work(before: Trace, after: Trace) -> bool:
    """Whether the steps of two traces run the same operators and kernels."""

    def work(trace: Trace) -> dict[str, float]:
        named = Counter([op.name for op in trace.ops] + [kernel.name for kernel in trace.kernels])
        return {name: count / len(trace.steps) for name, count in named.items()}

    return work(before) == work(after)


def pair(old: nn.Module, new: nn.Module, names: Mapping[str, str], learns: bool = False) -> Pairs:
    """The new model's names of the old one's parameters and buffers; a `ConfigError` names those that do not fit."""
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
        called = {name: to for name, to in called.items() if not dispensable(name, to, ours, theirs)}
        missing = [(name, other) for name, (other, _) in called.items() if other not in theirs]
        used = {other for other, _ in called.values()}
        left = [name for name, t in theirs.items() if name not in used and (missing or isinstance(t, nn.Parameter))]
        if missing or left:
            raise ConfigError(mismatch(missing, left))
        for name, (other, turned) in called.items():
            fits(name, ours[name], other, theirs[other], turned, learns)
        pairs |= called
    return pairs


def dispensable(name: str, to: tuple[str, bool], ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Whether the new model does without a buffer, such as a mask or a table: no buffer of its own has that size and
    that kind of numbers, as a table of complex numbers is no other name of one of real numbers.

    Verification shows whether results need it, and whether a step changes it.
    """
    tensor, (other, _) = ours[name], to
    if isinstance(tensor, nn.Parameter) or other != name or other in theirs:
        return False
    sizes = sorted(tensor.shape)
    return not any(
        key not in ours and sorted(held.shape) == sizes and numbers(held) == numbers(tensor)
        for key, held in theirs.items()
    )


def numbers(tensor: Tensor) -> tuple[bool, bool]:
    """The kind of numbers that a tensor holds, of whatever width."""
    return tensor.is_floating_point(), tensor.is_complex()


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
    return (
        f"{KEY} has nothing for the baseline's {wanted}{found}: say what it is called, as in {example}; or name a"
        " function of one argument, model, that makes it of the baseline's model, as quantizing does"
    )


def fits(name: str, ours: Tensor, other: str, theirs: Tensor, turned: bool, learns: bool) -> None:
    if ours.layout is not theirs.layout and (learns or theirs.layout is not torch.strided):
        text = f"{KEY}: {other} is {theirs.layout}, and the baseline's {name} is {ours.layout}: give both one layout"
        raise ConfigError(text + " (what only infers may hold a dense one)" * (theirs.layout is torch.strided))
    shape, found = list(ours.shape), list(theirs.shape)
    if (found[::-1] if turned and len(found) == 2 else found) != shape:
        hint = f": if it is the transpose, add 'strategy.replace.names={{{name}: {other}.T}}'"
        hint = hint if found[::-1] == shape and len(shape) == 2 else ""
        turn = ".T" if turned else ""
        raise ConfigError(f"{KEY}: {other}{turn} has shape {found}, and the baseline's {name} has {shape}{hint}")


def fill(tensor: Tensor, value: Tensor) -> None:
    """Values into a dense tensor; a sparse one gets the indices, too, and one around others what those hold."""
    if is_wrapped(tensor) and type(value) is type(tensor):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            fill(getattr(tensor, name), getattr(value, name))
    elif tensor.layout is torch.strided:
        tensor.data.copy_(value if value.layout is torch.strided else value.to_dense())
    else:
        with torch.no_grad():
            tensor.resize_as_sparse_(value).copy_(value)


def kind(tensor: Tensor) -> tuple[torch.layout, list[str]]:
    """Layout and names of its parts: tensors of two kinds have no values to compare."""
    return tensor.layout, list(parts(tensor))


def take_over(old: nn.Module, new: nn.Module, pairs: Pairs, optimizer: Optimizer | None) -> None:
    """Modes, values, `requires_grad`, and the optimizer with its state go from the old model to the new one."""
    take_modes(old, new)
    ours, theirs = (dict(m.named_parameters()) | dict(m.named_buffers()) for m in (old, new))
    new_of = {}
    for name, (other, turned) in pairs.items():
        parameter = theirs[other]
        fill(parameter, ours[name].t() if turned else ours[name])
        parameter.requires_grad_(ours[name].requires_grad)
        new_of[ours[name]] = parameter, turned
    hand_over(optimizer, new_of)


def hand_over(optimizer: Optimizer | None, new_of: Mapping[Tensor, tuple[Tensor, bool]]) -> None:
    """The optimizer goes on with other tensors, some of them transposed, and its state with it.

    It may hold tensors outside the model, such as a loss's own: those stay.
    """
    if optimizer is None or isinstance(optimizer, NotCalled):
        return
    for group in optimizer.param_groups:
        group["params"] = [new_of[p][0] if p in new_of else p for p in group["params"]]
    pass_on(optimizer, new_of)
    for p in [p for p in optimizer.state if p in new_of]:
        (parameter, turned), state = new_of[p], optimizer.state[p]
        del optimizer.state[p]
        optimizer.state[parameter] = {
            key: value.t().contiguous() if turned and isinstance(value, Tensor) else value
            for key, value in state.items()
        }
