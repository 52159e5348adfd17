"""The specification of a worker, which the parent sends by value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cloudpickle
import torch

from optexp.strategy import REASSOCIATES, Contract, Strategy
from optexp.workload import Workload


@dataclass(frozen=True)
class Spec:
    """The program that an arm is to hold.

    seed:      of the model's parameters
    name:      the part that it has in the comparison
    draws:     of the batches that are timed, and of the random numbers that steps draw (none: `seed`)
    cores:     what it is bound to once it is set up (none: left free)
    folders:   where its shared memory may lie, the preferred one first
    autocast:  plain autocast to this dtype: the yardstick of a PRECISION contract
    dropout:   False: every dropout has rate 0, so that what it does can be compared with fp64
    generic:   parameters that were filled with one value have others (see `equivalence.perturbation`)
    plan:      index in `memory_plan.PLANS` of the first that has not been tried
    sharing:   comparisons that share the device's memory
    compiler_log: folder of torch.compile's structured log; "" for none, as in every process that is timed
    """

    workload: Workload
    strategies: Sequence[Strategy]
    device: str
    dtype: str
    seed: int
    draws: int | None = None
    name: str = ""
    contract: Contract = REASSOCIATES  # what the reference judges by
    cores: tuple[int, ...] = ()
    folders: tuple[str, ...] = ()
    autocast: str | None = None
    dropout: bool = True
    generic: bool = False
    plan: int = 0
    sharing: int = 1
    compiler_log: str = ""

    def pack(self) -> bytes:
        """By value, so that classes of a notebook or of a script travel."""
        packed: bytes = cloudpickle.dumps(self)
        return packed

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype
