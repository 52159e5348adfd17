"""Launches of kernels that need whole rows: the tiles that may be fastest, and the race between them."""

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
    """The configuration of a kernel of whole rows.

    rows:       rows of a tile
    warps:      warps of a program
    resident:   programs per multiprocessor, which loop over tiles; 0: one tile for each program
    stages:     of the loop: 1 loads a tile and waits, 3 loads two tiles ahead (2 has one buffer, and so waits too); 0:
                one tile, with the kernel's own choice of register use
    registers:  most registers of a thread; 0: the compiler's choice
    """

    rows: int
    warps: int
    resident: int = 0
    stages: int = 1
    registers: int = 0

    def constants(self, block: int) -> dict[str, int]:
        """The constexprs and compiler options of a kernel of up to `block` columns."""
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {"ROWS": self.rows, "BLOCK": block, "STAGES": self.stages, "num_warps": self.warps, **limit}


@cache
def tiles(block: int) -> list[Launch]:
    """Configs that may be fastest for tiles of up to `block` columns, the safest first."""
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
    """Launch the kernel over tiles of whole rows, in the fastest config.

    kernel:        takes args, rows and columns; it writes the last of args
    rows, columns: of the matrix
    more:          the kernel's configs besides `tiles`, as a function of the block of columns
    first:         configs before all others; without a race the first config is taken
    constants:     constexprs besides those of the config
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
    configs = list(dict.fromkeys([*first, *tiles(block), *(more(block) if more else ())]))  # no config twice
    run(fastest(kernel.__name__, (*dtypes, columns, bucket(rows)), configs, run, result.device))
