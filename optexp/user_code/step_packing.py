"""State of a training step as bytes, for another process: parts of the program go by name, and stay what they are."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from optexp.python_state.slots import tensors_in
from optexp.user_code.handed_model import Model
from optexp.user_code.handed_optimizer import Optimizer as HandedOptimizer

if TYPE_CHECKING:
    from optexp.user_code.step_state import TrackedStepState


def packed(value: Any, memory: TrackedStepState) -> bytes:
    """A value that a step keeps."""
    buffer = io.BytesIO()
    Pickler(buffer, memory).dump(value)
    return buffer.getvalue()


def unpacked(bits: bytes, memory: TrackedStepState) -> Any:
    """The value in this process, with this program's parts."""
    return Unpickler(io.BytesIO(bits), memory).load()


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Model, its tensors and the optimizer stay what they are there; other equal tensors are equal bytes."""

    def __init__(self, file: io.BytesIO, memory: TrackedStepState) -> None:
        super().__init__(file)
        self.memory, self.own = memory, {id(tensor): name for name, tensor in tensors_in(memory.present).items()}

    def persistent_id(self, value: Any) -> Any:
        if type(value) is HandedOptimizer:
            return "handed", "optimizer"
        if issubclass(type(value), Model):
            return "handed", "model"
        if isinstance(value, RemovableHandle):
            return "hook", *self.memory.hooks().of(value)
        if value is self.memory.optimizer:
            return ("optimizer",)
        if value is self.memory.model:
            return ("model",)
        if id(value) in self.own:
            return "own", self.own[id(value)]
        if isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous().view(-1)
            bits = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
            learns = value.requires_grad and value.is_leaf
            return "tensor", bits, value.dtype, tuple(value.shape), learns, value.device.type
        return None


class Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: TrackedStepState) -> None:
        super().__init__(file)
        self.memory = memory

    def persistent_load(self, token: Any) -> Any:
        kind, *facts = token
        if kind == "handed":
            return self.memory.handed[facts[0]] if self.memory.handed else getattr(self.memory, facts[0])
        if kind == "own":
            return tensors_in(self.memory.present)[facts[0]]
        if kind == "hook":
            return self.memory.hooks().handle(*facts)
        if kind != "tensor":
            return getattr(self.memory, kind)
        bits, dtype, shape, learns, device = facts
        flat = torch.frombuffer(bytearray(bits), dtype=dtype) if bits else torch.empty(0, dtype=dtype)
        there = flat.view(shape) if device == "cpu" else flat.view(shape).to(self.memory.device)
        return there.requires_grad_(learns)
