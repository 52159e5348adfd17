"""How kernels that need whole rows are launched: which tiles may be fastest, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from optexp.kernelkit.kernel import ceil_div, multiprocessors, power_of_two
from optexp.kernelkit.launching import launch
from optexp.kernelkit.tuning import bucket, fastest

LONGEST = 32768  # columns that the registers of one program hold


class Launch(NamedTuple):
    """rows of a tile; warps of a program; programs on a multiprocessor, which then loop (0: one tile each);
    stages of the loop: 1 loads a tile and waits, 3 loads two tiles ahead (2 would wait, too: it has one buffer),
    0 is what a kernel makes of it: one tile, of which more or less is kept in registers;
    registers that a thread may have (0: as the compiler likes)."""

    rows: int
    warps: int
    resident: int = 0
    stages: int = 1
    registers: int = 0

    def constants(self, block: int) -> dict[str, int]:
        """What a kernel of whole rows, of up to `block` columns, is compiled for."""
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {"ROWS": self.rows, "BLOCK": block, "STAGES": self.stages, "num_warps": self.warps, **limit}


@cache
def tiles(block: int) -> list[Launch]:
    """What may be fastest where each program takes one tile of up to `block` columns, the safest first."""
    if block <= 1024:
        one = 1024 // block
        return [Launch(2 * one, 4), Launch(one, 4), Launch(one, 1), Launch(2 * one, 2)]
    if block <= 8192:
        longest = [Launch(1, 32)] if block > 4096 else []
        return [Launch(1, 8), Launch(1, 4), Launch(1, 16), *longest]
    return [Launch(1, 32), Launch(1, 16), Launch(1, 32, 1, 3), Launch(1, 16, 1, 3)]


def in_rows(
    kernel: Any,
    rows: int,
    columns: int,
    *args: Any,
    more: Callable[[int], list[Launch]] | None = None,
    first: Sequence[Launch] = (),
    **constants: Any,
) -> None:
    """Run the kernel over tiles of whole rows, in the fastest config; the last of `args` is what it writes.

    more:   configs that this kernel has besides `tiles`, from the block
    first:  those that come before them: where nothing can be raced, the first is taken
    """
    if rows == 0 or columns == 0:
        return
    result = args[-1]
    block = max(power_of_two(columns), 16)

    def run(config: Launch) -> None:
        programs = ceil_div(rows, config.rows)
        if config.resident:
            programs = min(programs, config.resident * multiprocessors(result.device))
        launch(kernel, programs, *args, rows, columns, **constants, **config.constants(block))

    dtypes = [arg.dtype for arg in args if isinstance(arg, Tensor)]
    configs = list(dict.fromkeys([*first, *tiles(block), *(more(block) if more else ())]))  # none races twice
    run(fastest(kernel.__name__, (*dtypes, columns, bucket(rows)), configs, run, result.device))
