"""The user's own model, by import path or in a file: a class, a factory, a function, or an instance."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor, nn

from optexp.config import ConfigError, suggest, typed
from optexp.own import Own, Parts
from optexp.usercode import maker

INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


@dataclass
class Input:
    """One input of the model. Real values are normal, or uniform from `low` to `high`; integers lie in low … high − 1.

    shape:  sizes, or names of sizes that `shapes` gives
    name:   of a keyword argument; None is the next position
    """

    shape: list[Any] = field(default_factory=list)
    dtype: str = field(default="float32", metadata={"choices": ("float32", *INTEGERS, "bool")})
    name: str | None = None
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if self.dtype in INTEGERS and self.high is None:
            raise ValueError(f"dtype={self.dtype} needs high: integers are drawn from low (0) to high − 1")
        if self.dtype == "float32" and (self.low is None) != (self.high is None):
            raise ValueError("low and high belong together; without both, values are normal")

    def draw(self, sizes: Mapping[str, int], device: torch.device) -> Tensor:
        shape = [size if isinstance(size, int) else sizes[size] for size in self.shape]
        if self.dtype == "bool":
            return torch.rand(shape, device=device) < 0.5
        if self.high is None:
            return torch.randn(shape, device=device)
        low = self.low or 0
        if self.dtype == "float32":
            return low + (self.high - low) * torch.rand(shape, device=device)
        return torch.randint(int(low), int(self.high), shape, dtype=getattr(torch, self.dtype), device=device)


@dataclass
class Names:
    """What things are called in the user's file."""

    model: str = "Model"
    init_inputs: str = "get_init_inputs"
    inputs: str = "get_inputs"
    loader: str = "get_loader"
    loss: str = "loss"
    optimizer: str = "get_optimizer"
    train_step: str = "train_step"


@dataclass
class Module(Own):
    """`target` names a model in an importable module (package.module:Name), `path` a file that may hold all of `Names`.

    args, kwargs:  of the class or the factory; of a function, what is not an input
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
        if self.target is not None and not self.inputs:
            raise ConfigError("workload=module: give the inputs of target, as in workload.inputs=[{shape:[32,128]}]")
        return self

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

    def described(self) -> list[Input]:
        """The inputs that the YAML describes."""
        for index, value in enumerate(self.inputs):
            if not isinstance(value, dict):
                raise ValueError(f"inputs[{index}]={value} is no description: write {{shape: [32, 128]}}")
        return [typed(Input, value, f"workload.inputs[{index}]") for index, value in enumerate(self.inputs)]

    def load(self) -> Parts:
        drawn = partial(draw, self.described()) if self.inputs else None
        if self.target is not None:
            return Parts(maker(_by_path(self.target), self.args, self.kwargs, f"workload.target={self.target}"), drawn)
        file = _import_file(Path(self.path or "").expanduser())
        found = {key: getattr(file, name, None) for key, name in vars(self.names).items()}
        model = found["model"]
        if model is None:
            near = suggest(self.names.model, models_in(file))
            raise ConfigError(f"{self.path} has no {self.names.model}: set workload.names.model={near}")
        if drawn is None and found["inputs"] is not None:
            drawn = partial(_call_inputs, found["inputs"], file)
        if drawn is None and found["loader"] is None:
            raise ConfigError(
                f"{self.path} has neither {self.names.inputs}() nor {self.names.loader}(): define one,"
                " or describe the inputs, as in workload.inputs=[{shape:[32,128]}]"
            )
        args, kwargs = self._init(found["init_inputs"])
        return Parts(
            maker(model, args, kwargs, self.names.model),
            drawn,
            None if self.inputs else found["loader"],
            found["loss"],
            found["optimizer"],
            found["train_step"],
        )

    def _init(self, given: Callable[[], Any] | None) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """What the model is made with: the YAML's, else the file's as [args], {kwargs}, or [[args], {kwargs}]."""
        if self.args or self.kwargs or given is None:
            return self.args, self.kwargs
        values = given()
        if isinstance(values, dict):
            return [], values
        if len(values) == 2 and isinstance(values[0], (list, tuple)) and isinstance(values[1], dict):
            return values[0], values[1]
        return values, {}


def draw(described: Sequence[Input], sizes: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
    """Inputs by name, or by position where they have none."""
    named, position = {}, 0
    for one in described:
        named[one.name or str(position)] = one.draw(sizes, device)
        position += one.name is None
    return named


def _call_inputs(function: Callable[..., Any], file: ModuleType, sizes: Mapping[str, int], device: torch.device) -> Any:
    """The file's `get_inputs`. Named sizes are its arguments, or the file's own constants."""
    import inspect

    arguments = {name: size for name, size in sizes.items() if name in inspect.signature(function).parameters}
    for name in sizes.keys() - arguments.keys():
        if not isinstance(getattr(file, name, None), int):
            raise ConfigError(f"shapes: {name} is no argument of {function.__name__}() and no size in its file")
        setattr(file, name, sizes[name])
    return function(**arguments)


# --- finding it --------------------------------------------------------------------------------------------------


def _by_path(target: str) -> Any:
    """package.module:name, or package.module.name."""
    module, _, name = target.partition(":") if ":" in target else target.rpartition(".")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the user's module is there, something that it imports is not
        raise ConfigError(
            f"workload.target={target}: there is no module {error.name!r} here; start in the folder that holds it,"
            " or set PYTHONPATH"
        ) from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"workload.target={target}: {module} has no {part!r}{suggest(part, models_in(found))}")
        found = getattr(found, part)
    return found


def _import_file(path: Path) -> ModuleType:
    """A file as a module, as if its folder had been the place to start Python in."""
    if not path.is_file():
        raise ConfigError(f"workload.path={path}: there is no such file below {Path.cwd()}")
    path = path.resolve()
    name = path.stem if path.stem not in sys.modules else f"optexp_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"workload.path={path} is not a Python file")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where a DataLoader's workers find what was defined in it
    spec.loader.exec_module(module)
    return module


def models_in(place: Any) -> list[str]:
    """Models, and their classes, that a module defines."""
    return [
        name
        for name, value in vars(place).items()
        if isinstance(value, nn.Module)
        or (isinstance(value, type) and issubclass(value, nn.Module) and value.__module__.startswith(place.__name__))
    ]
