"""The user's own model, by import path or in a file: a class, a factory, a function, or an instance."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch

from optexp.errors import ConfigError, NotCovered
from optexp.export.patch import applied_at, patch
from optexp.program import Program
from optexp.records.patch import Patch
from optexp.schema import suggest, typed
from optexp.strategy import Notes, Strategy
from optexp.user_code.adapters import maker
from optexp.user_code.bound_names import init_parameters, missing
from optexp.user_code.described_input import Input, draw, names_of
from optexp.user_code.hugging_face import inputs_of, may_describe_itself, with_config
from optexp.user_code.importing import import_file, require_file
from optexp.user_code.listing import Spelled
from optexp.user_code.lookup import find, models_in, require_place, spelled
from optexp.user_code.named_files import source
from optexp.user_code.objects import with_objects
from optexp.user_code.parts import Parts
from optexp.user_code.patched import defined_in, user_file
from optexp.user_code.workload import UserWorkload

EXAMPLE = "'workload.inputs=[{shape: [32, 128]}]'"  # quoted: a shell expands braces
NO_INPUTS = f"workload=module: describe the inputs of workload.target, as in {EXAMPLE}"


FACTORY = "get_model"  # makes the model in a file that has no `Names.model`


@dataclass
class Names:
    """Names of the parts in the user's file."""

    model: str = "Model"
    init_inputs: str = "get_init_inputs"
    inputs: str = "get_inputs"
    loader: str = "get_loader"
    loss: str = "loss"
    optimizer: str = "get_optimizer"
    train_step: str = "train_step"


@dataclass
class Module(UserWorkload):
    """`target` names a model in an importable module (package.module:Name), `path` a file that may hold all of `Names`.

    args, kwargs:  of the class or the factory; of a function, what is not an input. {_target_: package.module.Name,
                   ...} in them is an object. A Hugging Face class needs no config, or some options of it:
                   kwargs={config: {n_layers: 2}}
    """

    target: str | None = None
    path: str | None = None
    names: Names = field(default_factory=Names)
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    inputs: list[Any] = field(default_factory=list)

    def resolve(self, device: str) -> Self:
        if (self.target is None) == (self.path is None):
            raise ConfigError("workload=module: give workload.target=my_package.module:MyModel, or workload.path=my.py")
        if self.target is not None and not self.inputs and not may_describe_itself(self.target):
            raise ConfigError(NO_INPUTS)
        if self.path is not None:
            require_file(Path(self.path).expanduser(), "workload.path")
            file, usual = Path(self.path).expanduser(), self.names.model == Names.model
            self._require_named(file)
            no_model, no_factory = (missing(file, name, untold=frozenset()) for name in (Names.model, FACTORY))
            if usual and no_model is not None and no_factory is None:
                return replace(self, names=replace(self.names, model=FACTORY))
            if (names := missing(file, self.names.model)) is not None:
                raise ConfigError(self._no_model(names))
            self._require_inputs(Path(self.path).expanduser())
        if self.target is not None:
            require_place(self.target, "workload.target")
        self._require_known_arguments()
        return self

    def _require_named(self, file: Path) -> None:
        """Raises ConfigError where no statement of the file can bind a name that was given."""
        for part, name in vars(self.names).items():
            if part in ("model", "inputs", "loader") or name == getattr(Names, part):
                continue  # those are missed anyway, or have their usual names
            if (found := missing(file, name)) is not None:
                raise ConfigError(f"workload.names.{part}: {self.path} has no {name}{suggest(name, found)}")

    def _require_inputs(self, file: Path) -> None:
        """Raises ConfigError where no statement of the file can give batches."""
        names, loaders = missing(file, self.names.inputs), missing(file, self.names.loader)
        if not self.inputs and names is not None and loaders is not None:
            raise ConfigError(self._no_batches(names))

    def _require_known_arguments(self) -> None:
        """Raises ConfigError where the model's class takes no argument of a name that `kwargs` gives."""
        file, name = Path(self.path or "").expanduser(), self.names.model
        if self.target is not None:
            file, name = source(self.target) or file, self.target.rpartition(":" if ":" in self.target else ".")[2]
        if (known := init_parameters(file, name)) is None:
            return
        for given in self.kwargs.keys() - {*known}:
            raise ConfigError(f"workload.kwargs: {name} takes no {given}{suggest(given, known)}")

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {name for shape in self.shapes for name in shape}
        for index, described in enumerate(self.described()):
            unknown = [size for size in described.shape if not isinstance(size, int) and size not in sizes]
            if unknown:
                example = f"shapes=[{{{unknown[0]}: 32}}]"
                raise ValueError(f"inputs[{index}].shape has {unknown[0]!r}: give it a size, as in {example}")

    @property
    def name(self) -> str:
        return self.target.replace(":", ".").rpartition(".")[2] if self.target else Path(self.path or "").stem

    @property
    def inputs_key(self) -> str:
        if self.inputs:
            return "workload.inputs"
        has_loader = self.path is not None and self.parts.loader is not None
        return f"{self.names.loader if has_loader else self.names.inputs}()" if self.path else "drawn for this class"

    def code(self) -> list[bytes]:
        file = Path(self.path).expanduser() if self.path else source(self.target or "")
        return super().code() + ([file.read_bytes()] if file and file.is_file() else [])

    def described(self) -> list[Input]:
        """The inputs that the YAML describes."""
        for index, value in enumerate(self.inputs):
            if not isinstance(value, dict):
                raise ValueError(f"inputs[{index}]={value} is no description: write {{shape: [32, 128]}}")
        return [typed(Input, value, f"workload.inputs[{index}]") for index, value in enumerate(self.inputs)]

    @cached_property
    def drawn(self) -> list[Input]:
        """The inputs that the YAML describes, else those that fit a Hugging Face class."""
        if self.inputs or self.target is None:
            return self.described()
        found, sizes = find(self.target, "workload.target"), [name for shape in self.shapes for name in shape]
        implied = inputs_of(found, self.made_with(found)[1], sizes, learns=self.mode != "forward")
        if not implied:
            raise ConfigError(NO_INPUTS)
        return implied

    def notes(self) -> list[str]:
        if self.inputs or self.target is None:
            return super().notes()
        batch = ", ".join(f"{one.name} [{', '.join(map(str, one.shape))}]" for one in self.drawn)
        return [f"batch: {batch}, because no inputs were given", *super().notes()]

    def made_with(self, found: Any) -> tuple[list[Any], dict[str, Any]]:
        """Arguments of a target, the config of a Hugging Face class included."""
        args, kwargs = self.arguments
        return args, with_config(found, args, kwargs, "workload.kwargs")

    @property
    def bounded(self) -> frozenset[str]:
        named = zip(names_of(self.drawn), self.drawn, strict=True)
        return frozenset(name for name, one in named if one.high is not None)

    def load(self) -> Parts:
        drawn = partial(draw, self.drawn) if self.inputs or self.target else None
        if self.target is not None:
            found = find(self.target, "workload.target")
            return Parts(maker(found, *self.made_with(found), f"workload.target={self.target}"), drawn)
        file = import_file(Path(self.path or "").expanduser(), "workload.path", anew=True)
        has = {key: getattr(file, name, None) for key, name in vars(self.names).items()}
        name, model = self._model(file)
        if drawn is None and has["inputs"] is not None:
            drawn = partial(_call_inputs, has["inputs"], file)
        if drawn is None and has["loader"] is None:
            raise ConfigError(self._no_batches(dir(file)))
        args, kwargs = self._init(has["init_inputs"])
        return Parts(
            maker(model, args, kwargs, name),
            drawn,
            None if self.inputs else has["loader"],
            has["loss"],
            has["optimizer"],
            has["train_step"],
        )

    def _model(self, file: ModuleType) -> tuple[str, Any]:
        """Name and value of the model: a second file may make by a function what the first one has as a class."""
        usual = (Names.model, FACTORY)
        for name in (self.names.model, *(usual if self.names.model in usual else ())):
            if (model := getattr(file, name, None)) is not None:
                return name, model
        raise ConfigError(self._no_model(models_in(file)))

    def _no_batches(self, found: Iterable[str]) -> str:
        """The sentence where the file has neither inputs nor a loader, but other names."""
        near = [
            f" (workload.names.{part}={name})"
            for part in ("inputs", "loader")
            for name in get_close_matches(getattr(self.names, part), list(found), n=1, cutoff=0.8)
        ]
        return (
            f"{self.path} has neither {self.names.inputs}() nor {self.names.loader}(): define one"
            f"{''.join(near[:1])}, or describe the inputs, as in {EXAMPLE}"
        )

    def _no_model(self, found: Sequence[str]) -> str:
        """The sentence where the file has no model of the name asked for, but `found`."""
        models = [name for name in found if name not in vars(self.names).values()]
        example = f"workload.names.model={models[0] if models else 'MyModel'}"
        others = suggest(self.names.model, models) if models[1:] else ""
        return f"{self.path} has no {self.names.model}: define it, or name another, as in {example}{others}"

    def spelled(self) -> Spelled:
        target = self.target or f"{self.path}:{self.names.model}"
        lines, name = spelled(target, "user")
        file, made = None if self.target else import_file(Path(self.path or "").expanduser(), "workload.path"), None
        if file is not None and not (self.args or self.kwargs) and hasattr(file, self.names.init_inputs):
            call = f"user.{self.names.init_inputs}()"
            values = getattr(file, self.names.init_inputs)()
            both = self._init(lambda: values)
            made = f"**{call}" if isinstance(values, dict) else f"*{call}"
            made = f"*{call}[0], **{call}[1]" if both[0] is not values and both[1] is not values else made
        given = {part: f"user.{name}" for part, name in vars(self.names).items() if hasattr(file, name)}
        return Spelled(
            lines,
            f"user.{name}",
            made,
            self._spelled_make(getattr(file, self.names.inputs, None)),
            given.get("loader"),
            given.get("loss"),
            given.get("optimizer"),
            given.get("train_step"),
        )

    def patch(self, program: Program, stack: Sequence[Strategy], notes: Mapping[str, Notes]) -> Patch | None:
        if self.path is None:
            return None
        path = Path(self.path).expanduser()
        try:
            file = user_file(self, vars(self.names), program.device.type)
        except NotCovered as reason:
            return Patch(applied_at(path), reason=str(reason))
        return patch(path, file, stack, notes, defined_in(self.parts.model, path))

    def _spelled_make(self, given: Callable[..., Any] | None) -> str:
        """`make(**sizes)`, of what the YAML describes or of the file's own function."""
        sizes = dict.fromkeys(name for shape in self.shapes for name in shape)
        described = self.drawn
        if not described and given is not None:
            taken = [name for name in sizes if name in inspect.signature(given).parameters]
            passed = ", ".join(f'{name}=sizes["{name}"]' for name in taken)
            constants = "" if len(taken) == len(sizes) else "    vars(user).update(sizes)\n"
            return f"def make(**sizes):\n{constants}    return user.{self.names.inputs}({passed})"
        named = [f'"{name}": {one.spelled()}' for name, one in zip(names_of(described), described, strict=True)]
        if not any(one.name for one in described):
            body = f"({', '.join(text.partition(': ')[2] for text in named)},)"
        else:
            body = f"{{{', '.join(named)}}}"
        return f"def make({', '.join(sizes)}):\n    return {body}"

    @property
    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """`args` and `kwargs` of the YAML; a `_target_` in them has become its object."""
        return with_objects(self.args, "workload.args"), with_objects(self.kwargs, "workload.kwargs")

    def _init(self, given: Callable[[], Any] | None) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Arguments of the model: the YAML's, else the file's as [args], {kwargs}, or [[args], {kwargs}]."""
        if self.args or self.kwargs or given is None:
            return self.arguments
        values = given()
        if isinstance(values, dict):
            return [], values
        if len(values) == 2 and isinstance(values[0], (list, tuple)) and isinstance(values[1], dict):
            return values[0], values[1]
        return values, {}


def _call_inputs(function: Callable[..., Any], file: ModuleType, sizes: Mapping[str, int], device: torch.device) -> Any:
    """The file's `get_inputs`. Named sizes are its arguments, or the file's own constants."""
    arguments = {name: size for name, size in sizes.items() if name in inspect.signature(function).parameters}
    for name in sizes.keys() - arguments.keys():
        if not isinstance(getattr(file, name, None), int):
            raise ConfigError(f"shapes: {name} is no argument of {function.__name__}() and no size in its file")
        setattr(file, name, sizes[name])
    return function(**arguments)
