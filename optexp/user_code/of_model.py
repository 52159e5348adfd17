"""A user's function of a model: it returns another model, or edits the one that it is given."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from optexp.equivalence.step_digest import Digest, digest
from optexp.errors import ConfigError, NoReference, Unsupported, UserFailure, first_line
from optexp.python_state.slots import tensors_in
from optexp.support.shortage import is_shortage
from optexp.support.wrapped import parts
from optexp.user_code.adapters import Function, kind, maker
from optexp.user_code.objects import made


def takes_model(found: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether something makes a model of another: what it needs is called `model`, or annotated as one."""
    if isinstance(found, nn.Module) or not callable(found):
        return False
    try:
        parameters = inspect.signature(found, eval_str=True).parameters.values()
    except (TypeError, ValueError, NameError):  # no Python function, or annotations that are only for type checkers
        return False
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p for p in parameters if p.default is p.empty and p.kind not in variadic and p.name not in kwargs]
    if not needed or len(needed) > 1 + len(args) or needed[0].kind is inspect.Parameter.KEYWORD_ONLY:
        return False
    annotated = needed[0].annotation
    return (
        issubclass(annotated, nn.Module)
        if isinstance(annotated, type) and annotated is not inspect.Parameter.empty
        else (needed[0].name == "model")
    )


def made_of(model: nn.Module, found: Any, args: Sequence[Any], kwargs: Mapping[str, Any], asked: str) -> nn.Module:
    """The model that a function returns; where it returns nothing, the one that it was given.

    Args:
        model: The function's first argument.
        found: The function.
        args: Its other positional arguments.
        kwargs: Its keyword arguments.
        asked: Subject of messages.

    Raises:
        ConfigError: it takes other arguments, or returns no model.
        UserFailure: it raises.
    """
    maker(found, [model, *args], kwargs, asked).check_arguments()
    given, options = made(list(args)), made(dict(kwargs))
    with failing(f"{asked} failed on the baseline's model"):
        result = found(model, *given, **options)
    if result is None:
        return model
    if not callable(result):
        raise ConfigError(
            f"{asked} returned {kind(result)}: a function of a model must return a model, or edit the one that it is"
            " given and return nothing"
        )
    return result if isinstance(result, nn.Module) else Function(result)


@contextmanager
def failing(what: str) -> Iterator[None]:
    """Name the user's function in an error of it.

    Raises:
        UserFailure: "`what` (type and first line of the error)". Errors that have a sentence pass unchanged.
    """
    try:
        yield
    except (ConfigError, Unsupported, NoReference, UserFailure):
        raise
    except Exception as error:
        if is_shortage(error):
            raise
        raise UserFailure(f"{what} ({type(error).__name__}: {first_line(error)})") from error


@dataclass(frozen=True)
class Contents:
    """All that a model's modules and their classes hold, by name, and mean and RMS of each tensor."""

    held: Mapping[str, object]
    values: Digest

    @classmethod
    def of(cls, model: nn.Module) -> Contents:
        held: dict[str, object] = {}
        kinds = set[type]()
        for path, module in model.named_modules():
            held[path] = module
            kinds.update(type(module).__mro__)
            for name, value in vars(module).items():
                held[f"{path}.{name}"] = value
                entries = value if isinstance(value, dict) else {}  # hooks, parameters, modules
                held |= {f"{path}.{name}[{key}]": entry for key, entry in entries.items()}
        held |= {f"{one.__module__}.{one.__qualname__}.{name}": v for one in kinds for name, v in vars(one).items()}
        tensors = [parts(tensor, f"param/{name}") for name, tensor in tensors_in(model).items()]
        return cls(held, digest({name: part for found in tensors for name, part in found.items()}))

    def same_as(self, other: Contents) -> bool:
        """Whether each name holds the same object, and each tensor the same values."""
        if self.held.keys() != other.held.keys() or self.values != other.values:
            return False
        return all(other.held[name] is value for name, value in self.held.items())
