"""Which tensor of a strategy's model is which of the baseline's: by identity, by memory, then by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor, nn

from optexp.equivalence.tensor_math import identical
from optexp.errors import ConfigError
from optexp.program import Alias, Program
from optexp.support import wrapped

SHOWN = 3  # names in a sentence
T = TypeVar("T")
PARAMETRIZED = "parametrizations"  # torch.nn.utils.parametrize: <module>.parametrizations.<name>.original


@dataclass(frozen=True)
class Held:
    """A parameter or buffer: its name in the model, and the baseline's name."""

    name: str
    alias: Alias
    tensor: Tensor


@dataclass(frozen=True)
class Holdings:
    """Names and addresses of a program's parameters and buffers, before a strategy is applied.

    strangers: identities of tensors that its optimizer updates outside the model
    """

    parameters: Sequence[Held]
    buffers: Sequence[Held]
    strangers: frozenset[int]

    @property
    def all(self) -> tuple[Held, ...]:
        return *self.parameters, *self.buffers


def holdings(program: Program) -> Holdings:
    """Names and addresses of a program's parameters and buffers."""

    def held(named: Iterable[tuple[str, Tensor]]) -> list[Held]:
        return [Held(name, alias, tensor) for name, tensor in named if (alias := program.alias(name))]

    parameters = held(program.model.named_parameters())
    return Holdings(parameters, held(program.model.named_buffers()), frozenset(map(id, _strangers(program))))


def matched(
    before: Holdings,
    after: Program,
    aliases: Mapping[str, Alias] | None,
    author: str,
    initial: Mapping[str, Tensor],
) -> Program:
    """The program whose parameters and buffers have the baseline's names, whatever module a strategy put them into.

    Args:
        before: what the program held before the strategy
        aliases: the program's before the strategy; where it has others now, its author has said which is which
        author: the strategy's name
        initial: the state that all programs start from

    Raises:
        ConfigError: training has nothing to compare a parameter or buffer of the baseline's with
    """
    if after.aliases is aliases:
        tensors = dict(after.model.named_parameters()) | dict(after.model.named_buffers())
        found = partners(before, after.model)
        if not after.trains:
            found = {name: one for name, one in found.items() if _unfolded(one, tensors[name], initial)}
        if len(found) < len(before.all) or any(name != one.name for name, one in found.items()):
            after = with_names(after, {name: one.alias for name, one in found.items()})
            _check_all(before, found, [name for name in tensors if name not in found], after, author)
    elif after.aliases is not None:
        after = with_names(after, after.aliases)
    _check_optimizer(before, after, author)
    return after


def with_names(program: Program, aliases: Mapping[str, Alias]) -> Program:
    """The program with the baseline's names for its model's tensors; what has none now, the baseline lacks."""
    names = [name for tensors in (program.model.named_parameters, program.model.named_buffers) for name, _ in tensors()]
    return replace(program, aliases=aliases, lacking=frozenset(names) - aliases.keys())


def partners(held: Holdings, model: nn.Module) -> dict[str, Held]:
    """By their names in another model, tensors that were held before."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    return _pairs(held.parameters, parameters) | _pairs(held.buffers, buffers)


def _unfolded(one: Held, tensor: Tensor, initial: Mapping[str, Tensor]) -> bool:
    """Whether it has the values that it began with: what only infers may have folded another tensor into it."""
    kind = "param" if isinstance(tensor, nn.Parameter) else "buffer"
    ours = wrapped.parts(one.alias(tensor.detach()), f"{kind}/{one.alias.name}")
    return all(name in initial and identical(part, initial[name].to(part)) for name, part in ours.items())


def _pairs(held: Sequence[Held], there: Mapping[str, Tensor]) -> dict[str, Held]:
    """By their names in the new model."""
    found = {one.name: one for one in held if there.get(one.name) is one.tensor}
    for key in (lambda name, tensor: id(tensor), lambda name, tensor: _place(tensor), lambda name, tensor: name):
        ours, theirs = _open(held, there, found)
        by_key = _unique((key(one.name, one.tensor), one) for one in ours)
        for k, name in _unique((key(name, tensor), name) for name, tensor in theirs.items()).items():
            if k in by_key and _fit(by_key[k].tensor, theirs[name]):
                found[name] = by_key[k]
    for fits in (lambda short, long: long[-len(short) :] == short, _inside):
        ours, theirs = _open(held, there, found)
        options = [
            (name, one)
            for one in ours
            for name, tensor in theirs.items()
            if _fit(one.tensor, tensor) and fits(one.name.split("."), _plain(name).split("."))
        ]
        names, ones = Counter(name for name, _ in options), Counter(one.name for _, one in options)
        found |= {name: one for name, one in options if names[name] == 1 == ones[one.name]}
    return found


def _fit(ours: Tensor, theirs: Tensor) -> bool:
    """Whether they have one shape and parts of the same names: a quantised weight has others than a dense one."""
    return ours.shape == theirs.shape and wrapped.parts(ours).keys() == wrapped.parts(theirs).keys()


def _open(
    held: Sequence[Held], there: Mapping[str, Tensor], found: Mapping[str, Held]
) -> tuple[list[Held], dict[str, Tensor]]:
    """Parameters without a partner so far, of either side."""
    met = {one.name for one in found.values()}
    return [one for one in held if one.name not in met], {n: t for n, t in there.items() if n not in found}


def _unique(pairs: Iterable[tuple[object, T]]) -> dict[object, T]:
    """By key, without keys that several have."""
    every = list(pairs)
    count = Counter(key for key, _ in every)
    return {key: value for key, value in every if count[key] == 1}


def _place(tensor: Tensor) -> object:
    """The memory of a dense tensor; what has none, or is empty, is like no other."""
    try:
        start = tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse
        start = 0
    return (start, tensor.dtype, tensor.stride()) if start else object()


def _plain(name: str) -> str:
    owner, _, rest = name.partition(f"{PARAMETRIZED}.")
    return owner + rest.removesuffix(".original") if rest else name


def _inside(short: Sequence[str], long: Sequence[str]) -> bool:
    """Whether the parts of one name are among another's, in their order, and end both."""
    rest = iter(long)
    return short[-1] == long[-1] and all(part in rest for part in short)


def _check_all(before: Holdings, pairs: Mapping[str, Held], left: list[str], after: Program, author: str) -> None:
    """Inference alone may fold parameters into others; its results are compared, and nothing else changes."""
    met = {one.name for one in pairs.values()}
    missing = [one.alias.name for one in before.all if one.name not in met]
    if not missing or not after.trains:
        return
    beside = f" (it has {listed(left)} beside the others)" if left else ""
    example = f"{{{left[0] if left else 'new_name'!r}: Alias({missing[0]!r})}}"
    raise ConfigError(
        f"{author}: the model that apply() returns holds nothing that is the baseline's {listed(missing)}{beside}, and"
        " training is compared tensor by tensor: keep the baseline's nn.Parameter and buffer objects in the new model,"
        f" of which views and fused copies are others, or say which is which, as in replace(program, aliases={example})"
    )


def _check_optimizer(before: Holdings, after: Program, author: str) -> None:
    if strange := [tensor for tensor in _strangers(after) if id(tensor) not in before.strangers]:
        names = {id(parameter): name for name, parameter in after.model.named_parameters()}
        if more := [names[id(tensor)] for tensor in strange if id(tensor) in names]:
            raise ConfigError(
                f"{author}: the model trains {listed(more)}, and the baseline's has no such parameter; training is"
                " compared parameter by parameter: let it be the one that it is tied to in the baseline, or freeze it"
            )
        raise ConfigError(
            f"{author}: the optimizer that apply() returns updates {len(strange)} tensors that are none of the model's"
            " parameters as the baseline knows them: put the model's own into its param_groups, and their state with"
            " them"
        )


def _strangers(program: Program) -> list[Tensor]:
    """Tensors that the optimizer updates outside the model."""
    known = {id(parameter) for _, parameter in program.parameters()}
    groups = program.optimizer.param_groups if program.optimizer is not None else ()
    return [tensor for group in groups for tensor in group["params"] if id(tensor) not in known]


def listed(names: Sequence[str]) -> str:
    """The first of the names, and the number of all."""
    return ", ".join(names[:SHOWN]) + (f", ... ({len(names)})" if len(names) > SHOWN else "")
