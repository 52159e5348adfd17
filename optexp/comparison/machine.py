"""PARENT: the machine that a comparison runs on. Device, cores and folders, claimed once and given back."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass

import torch

from optexp.errors import ConfigError
from optexp.kernelkit import toolchain
from optexp.measurement import placement
from optexp.measurement.gpu import Gpu
from optexp.support.scratch import Scratch
from optexp.support.tf32 import allow_tf32, tf32_allowed


@dataclass(frozen=True)
class Machine:
    """Device, cores and folders of one comparison.

    device: "cpu" or "cuda:1"
    gpu: Its sensors and processes; None on a CPU, or where the driver's library cannot be read.
    cores: Those that arms are bound to.
    scratch: Shared memory, and an ordinary folder for tensors that do not fit into it; both end with the comparison.
    own_cores, own_threads, own_tf32, own_compile_threads: This process's settings before arms ran in it.
    """

    device: str
    gpu: Gpu | None
    cores: list[int]
    scratch: tuple[Scratch, ...]
    own_cores: frozenset[int]
    own_threads: int
    own_tf32: dict[str, bool]
    own_compile_threads: int | None

    @classmethod
    def claim(cls, device: str, cpus: str) -> Machine:
        """Open the card, choose cores (`measurement.cpus`) and make folders.

        Raises:
            ConfigError: `cpus` names cores that this process may not use.
        """
        places = [place for place in ("/dev/shm", tempfile.gettempdir()) if os.path.isdir(place)]
        return cls(
            device,
            Gpu.open(torch.device(device)),
            placement.choose(cpus, torch.device(device).type),
            tuple(map(Scratch.make, places)),
            frozenset(os.sched_getaffinity(0)),
            torch.get_num_threads(),
            tf32_allowed(),
            toolchain.compile_threads(),
        )

    @property
    def folders(self) -> tuple[str, ...]:
        return tuple(scratch.path for scratch in self.scratch)

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def restore_process(self) -> None:
        """Undo the settings that arms made in this process."""
        placement.bind_process(sorted(self.own_cores))
        torch.set_num_threads(self.own_threads)
        toolchain.allow_compile_threads(self.own_compile_threads)
        if self.own_tf32 != tf32_allowed():
            allow_tf32(**self.own_tf32)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

    def release(self) -> None:
        """Remove the folders."""
        for scratch in self.scratch:
            scratch.remove()


def choose_device(setting: str) -> str:
    """The device that `device=...` means; auto is the first CUDA device, else the CPU.

    Raises:
        ConfigError: torch sees no CUDA device, and one was asked for.
    """
    if setting == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if setting.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={setting}: torch sees no CUDA device here; use device=cpu or device=auto")
    return "cuda:0" if setting == "cuda" else setting
