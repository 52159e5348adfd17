"""Theoretical occupancy: how many blocks a multiprocessor holds at once, by registers, shared memory and threads."""

from __future__ import annotations

from dataclasses import dataclass

from optexp.records.compiler import DeviceLimits

REGISTERS_STEP = 256  # a warp's registers are handed out in units of so many (compute capability 3.5 and later)
SHARED_STEP = 128  # bytes: a block's shared memory is handed out in units of so many (8.0 and later)
SHARED_SYSTEM = 1024  # bytes of each block's shared memory that the driver reserves (8.0 and later)
BLOCKS = {(7, 0): 32, (7, 2): 32, (7, 5): 16, (8, 0): 32, (8, 6): 16, (8, 7): 16, (8, 9): 24, (9, 0): 32, (10, 0): 32,
          (10, 3): 32, (11, 0): 24, (12, 0): 24, (12, 1): 24}  # fmt: skip


def resident_blocks(capability: tuple[int, int]) -> int | None:
    """Blocks that a multiprocessor of this compute capability holds at most (CUDA programming guide)."""
    return BLOCKS.get(capability)


@dataclass(frozen=True)
class Occupancy:
    """share: resident warps over the most that a multiprocessor holds;  limited_by: the scarcest resource"""

    share: float
    blocks_per_sm: int
    limited_by: str


def occupancy(limits: DeviceLimits, threads: int, registers: int, shared_bytes: int) -> Occupancy | None:
    """The theoretical occupancy of a kernel.

    Args:
        threads: Threads of a block.
        registers: Registers of a thread.
        shared_bytes: Shared memory of a block, static and dynamic.

    Returns:
        None for a block that cannot run there.
    """
    warps = -(-threads // limits.warp)
    per_warp = _up(registers * limits.warp, REGISTERS_STEP)
    fitting = {
        "threads": limits.threads // (warps * limits.warp),
        "registers": limits.registers // per_warp // warps if per_warp else limits.blocks,
        "shared memory": limits.shared_bytes // _up(shared_bytes + SHARED_SYSTEM, SHARED_STEP),
        "blocks": limits.blocks,
    }
    limiting = min(fitting, key=lambda name: fitting[name])
    blocks = fitting[limiting]
    return Occupancy(blocks * warps * limits.warp / limits.threads, blocks, limiting) if blocks else None


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
