"""An input that a user describes, or that a class of Hugging Face implies: shape, dtype and range of its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


@dataclass
class Input:
    """One input of a model, drawn at random.

    Real values are normal, or uniform from `low` to `high`. Integers lie in low … high − 1; verified and
    timed batches have both ends (see `optexp.user_code.both_ends`).

    shape: sizes, or names of sizes that `shapes` gives
    name:  of a keyword argument; None is the next position
    """

    shape: list[Any] = field(default_factory=list, metadata={"words": "a list of numbers, as [32, 128]"})
    dtype: str = field(default="float32", metadata={"choices": ("float32", *INTEGERS, "bool")})
    name: str | None = None
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if wrong := [size for size in self.shape if isinstance(size, int) and size < 0]:
            raise ValueError(f"shape={self.shape}: {wrong[0]} must not be negative")
        if self.dtype in INTEGERS and self.high is None:
            raise ValueError(f"dtype={self.dtype} needs high: integers are drawn from low (0) to high − 1")
        if self.dtype == "float32" and (self.low is None) != (self.high is None):
            raise ValueError("low and high belong together; without both, values are normal")

    def spelled(self) -> str:
        """Source of an expression that draws this input; unlike `draw` it forces no ends of integers."""
        shape = f"[{', '.join(map(str, self.shape))}]"
        if self.dtype == "bool":
            return f"torch.rand({shape}, device=device) < 0.5"
        if self.high is None:
            return f"torch.randn({shape}, device=device)"
        low = self.low or 0
        if self.dtype == "float32":
            return f"{low} + {self.high - low} * torch.rand({shape}, device=device)"
        return f"torch.randint({int(low)}, {int(self.high)}, {shape}, dtype=torch.{self.dtype}, device=device)"

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


def draw(described: Sequence[Input], sizes: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
    """Tensors by the input's name or position."""
    return {name: one.draw(sizes, device) for name, one in zip(names_of(described), described, strict=True)}


def names_of(described: Sequence[Input]) -> list[str]:
    """Names of inputs; a position stands for a name that is None."""
    positions = count()
    return [one.name or str(next(positions)) for one in described]
