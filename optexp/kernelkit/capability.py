"""The CUDA compute capability that a kernel needs, and whether a card has it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Capability:
    """A compute capability: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities

    minimum:  (major, minor)
    exact:    whether only cards of exactly this capability will do, for instructions of one architecture (`sm_90a`)
    """

    minimum: tuple[int, int]
    exact: bool = False

    def __str__(self) -> str:
        return "{}.{}".format(*self.minimum)

    def met_by(self, device: torch.device) -> bool:
        """Whether a CUDA device has the capability."""
        found = torch.cuda.get_device_capability(device)
        return found == self.minimum if self.exact else found >= self.minimum

    def targets(self) -> list[str] | None:
        """The architectures to compile for, such as "9.0a"; None where any architecture will do."""
        return [f"{self}a"] if self.exact else None


TRITON = Capability((7, 0))
PDL = Capability((9, 0))  # programmatic dependent launch
TMA = Capability((9, 0))  # the tensor memory accelerator: tiles are copied by descriptors
WGMMA = Capability((9, 0), exact=True)  # tensor cores of a whole warpgroup, on Hopper alone
