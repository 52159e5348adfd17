"""ARM: torch.compile's structured log of this process, and compiled code of the kernels that ran."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from optexp.profiling.occupancy import resident_blocks
from optexp.records.compiler import DeviceLimits
from optexp.workers.arm_program import Holder
from optexp.workers.messages import KernelCode


class Compiled(Holder):
    """Compilations in this process."""

    logs = False

    def keep_compiler_log(self, folder: str) -> None:
        """Keep the structured log from now on, before anything is compiled; nothing for ""."""
        if folder:
            from optexp.kernelkit import structured_log

            structured_log.keep(Path(folder))
            self.logs = True

    def logging_s(self) -> float:
        """Seconds that the structured log took so far; they are not the program's."""
        if not self.logs:
            return 0.0
        from optexp.kernelkit import structured_log

        return structured_log.overhead_s()

    def code(self, folder: str, ran: list[tuple[str, int]], most_sass: int | None = None) -> list[KernelCode]:
        """Write compiled code of the Triton kernels that ran, and of our libraries.

        Args:
            folder: Of the files; it is made where there are any.
            ran: Name and warps of each kernel of the trace, those with most time first.
            most_sass: Kernels of others whose machine code is written; None: all.
        """
        if self.device.type != "cuda":
            return []
        from optexp.kernelkit import triton_code

        ours = dict[tuple[str, int], str]()
        if "optexp.kernelkit.kernel" in sys.modules:
            from optexp.kernelkit import assembly

            ours = assembly.write(Path(folder), set(ran))
        found = list(triton_code.variants())
        others = [variant for variant in found if variant.key not in ours]
        rows = triton_code.write(Path(folder), ran, most_sass, others)
        rows += [
            (variant, {kind: f"{ours[variant.key]}.{kind}" for kind in ("ptx", "sass")})
            for variant in found
            if variant.ours and variant.key in ours
        ]
        return [KernelCode(v.name, v.origin, v.warps, v.registers, v.spills, v.shared, files) for v, files in rows]

    def device_limits(self) -> DeviceLimits | None:
        """Limits that bound occupancy; None without a CUDA device, or for one that this version does not know."""
        if self.device.type != "cuda":
            return None
        card: Any = torch.cuda.get_device_properties(self.device)  # torch's stub lacks the registers
        blocks = resident_blocks((card.major, card.minor))
        if blocks is None:
            return None
        return DeviceLimits(
            card.multi_processor_count,
            card.max_threads_per_multi_processor,
            card.regs_per_multiprocessor,
            card.shared_memory_per_multiprocessor,
            blocks,
            card.warp_size,
        )
