"""A workload of objects that the caller of `optexp.compare` holds; they travel to the arms as pickles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from optexp.errors import ConfigError, NotCovered
from optexp.records import filenames
from optexp.user_code.adapters import Copies, kind, maker, travelling
from optexp.user_code.listing import Spelled
from optexp.user_code.parts import Parts
from optexp.user_code.workload import UserWorkload


@dataclass(frozen=True)
class Objects:
    """The parts of a workload as `optexp.compare` takes them; `loss` and `optimizer` may be names."""

    model: Any
    inputs: Any
    loss: Any = None
    optimizer: Any = None
    train_step: Any = None

    def packed(self) -> bytes:
        """The parts as pickles, each by itself, so that a message can name a part that cannot be pickled.

        Raises:
            ConfigError: a part cannot be copied to another process.
        """
        if not (self.optimizer is None or isinstance(self.optimizer, str) or callable(self.optimizer)):
            raise ConfigError(
                f"optimizer is {kind(self.optimizer)}: give its name, or a function that makes it from a list of"
                " parameters"
            )
        parts: dict[str, Any] = {"model": maker(self.model)}
        if isinstance(self.inputs, DataLoader):
            parts["loader"] = partial(_itself, self.inputs)
        else:
            parts["inputs"] = partial(_call, self.inputs) if callable(self.inputs) else Shuffled(self.inputs)
        given = {"loss": self.loss, "optimizer": self.optimizer, "train_step": self.train_step}
        parts |= {part: value for part, value in given.items() if value is not None and not isinstance(value, str)}
        packed: bytes = cloudpickle.dumps({part: travelling(part, value) for part, value in parts.items()})
        return packed


@dataclass
class Given(UserWorkload):
    """A workload of objects; `packed` holds them, and the fields describe them in the record."""

    model_name: str = ""
    inputs: str = ""

    packed = b""

    @classmethod
    def of(
        cls, given: Objects, *, mode: str, labels: int | None, shapes: Sequence[Mapping[str, int]], name: str | None
    ) -> Given:
        """The workload of objects.

        Args:
            name: Of the model in the record; by default that of its class or function.

        Raises:
            ConfigError: a value is not allowed, or an object cannot be copied to another process.
        """
        try:
            made = cls(
                mode=mode,
                loss=given.loss if isinstance(given.loss, str) else None,
                optimizer=given.optimizer if isinstance(given.optimizer, str) else None,
                labels=labels,
                shapes=[dict(shape) for shape in shapes],
                model_name=name or _name(given.model),
                inputs=_described(given.inputs),
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        made.packed = given.packed()
        return made

    @property
    def name(self) -> str:
        return self.model_name

    def code(self) -> list[bytes]:
        return [*super().code(), self.packed]

    def load(self) -> Parts:
        parts = {part: cloudpickle.loads(packed) for part, packed in cloudpickle.loads(self.packed).items()}
        return Parts(**parts)

    def spelled(self) -> Spelled:
        parts, inputs = self.parts, self.parts.inputs
        given = {"loss": parts.loss, "optimizer": parts.optimizer, "train_step": parts.train_step}
        given["model"] = parts.model() if isinstance(parts.model, Copies) else parts.model.given
        if isinstance(parts.loader, partial):
            given["loader"] = parts.loader.args[0]
        if isinstance(inputs, (Shuffled, partial)):
            given["inputs"] = inputs.examples if isinstance(inputs, Shuffled) else inputs.args[0]
        packed = cloudpickle.dumps({name: value for name, value in given.items() if value is not None})
        if len(packed) > LARGEST:
            raise NotCovered(f"the objects that it was given take {len(packed) / 2**20:.0f} MiB")
        called = "" if isinstance(inputs, Shuffled) else "(**sizes)"
        return Spelled(
            GIVEN.format(folder=Path.cwd()),
            "user.model",
            make=f"def make(**sizes):\n    return user.inputs{called}",
            loader="(lambda: user.loader)",
            loss="user.loss",
            optimizer="user.optimizer",
            train_step="user.train_step",
            files={filenames.REPRO_OBJECTS: packed},
        )

    def notes(self) -> list[str]:
        shuffled = isinstance(self.parts.inputs, Shuffled)
        note = "inputs: the values given, in another order for every batch (a function can make others)"
        return [*super().notes(), *([note] if shuffled else [])]


LARGEST = 64 * 2**20  # bytes that are kept beside a result

GIVEN = """\
import sys
from pathlib import Path
from types import SimpleNamespace

import cloudpickle

sys.path.insert(0, "{folder}")
user = SimpleNamespace(**cloudpickle.loads(Path(__file__).with_name("repro.pkl").read_bytes()))
"""


class Shuffled:
    """Fresh inputs from examples: the values of each tensor in another order, which keeps their range.

    Sorted integers (lengths, offsets) and symmetric matrices keep their order; of a stack of matrices whole ones are
    permuted.
    """

    def __init__(self, examples: Any) -> None:
        self.examples = tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, examples)

    def __call__(self, sizes: Mapping[str, int], device: torch.device) -> Any:
        if sizes:
            raise ConfigError("shapes need a function that makes inputs, with their names as arguments")
        return tree_map(lambda leaf: shuffled(leaf.to(device)) if isinstance(leaf, Tensor) else leaf, self.examples)


def shuffled(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and values in a random order, unless the order has a meaning (see `Shuffled`)."""
    if tensor.dim() == 1 and not tensor.is_floating_point() and _ordered(tensor):
        return tensor.clone()
    if tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2] > 1 and torch.equal(tensor, tensor.mT):
        return tensor[torch.randperm(len(tensor), device=tensor.device)] if tensor.dim() > 2 else tensor.clone()
    order = torch.randperm(tensor.numel(), device=tensor.device)
    return tensor.flatten()[order].view(tensor.shape)


def _ordered(tensor: Tensor) -> bool:
    steps = tensor[1:] >= tensor[:-1], tensor[1:] <= tensor[:-1]
    return len(tensor) > 2 and any(bool(step.all()) for step in steps)


def _call(function: Callable[..., Any], sizes: Mapping[str, int], device: torch.device) -> Any:
    return function(**sizes)


def _itself(value: Any) -> Any:
    return value


def _name(model: Any) -> str:
    named = type(model) if isinstance(model, nn.Module) else model
    name = str(getattr(named, "__name__", type(model).__name__))
    return "model" if name == "<lambda>" else name


def _described(inputs: Any) -> str:
    """For the record: float32[32, 128], int64[32]."""
    if isinstance(inputs, Tensor):
        return f"{str(inputs.dtype).removeprefix('torch.')}{list(inputs.shape)}"
    if isinstance(inputs, Mapping):
        return ", ".join(f"{key}: {_described(value)}" for key, value in inputs.items())
    if isinstance(inputs, (list, tuple)):
        return ", ".join(_described(value) for value in inputs)
    return str(getattr(inputs, "__name__", type(inputs).__name__))
