"""Building blocks of Triton kernels: tiles of memory, wide arithmetic, and launches over vectors and matrices.

A mask makes Triton give up 16-byte accesses unless the length divides by 16, so only a last, partial tile has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from optexp.kernelkit.kernel import ceil_div, laid_out_like, multiprocessors, power_of_two
from optexp.kernelkit.launching import launch
from optexp.kernelkit.tuning import bucket, fastest

AT_ONCE = tl.constexpr(512)  # programs that run at once: with 4 warps a quarter of an H100, with 16 nearly all


@triton.jit
def begin(PDL: tl.constexpr, LETS_NEXT: tl.constexpr = True, LETS_SUMS: tl.constexpr = False):
    """First line of every kernel: with PDL (programmatic dependent launch) it waits until all earlier kernels end.

    PDL launches a kernel while the previous kernel still runs.

    LETS_NEXT:  trigger the next kernel's launch now, if all programs of this kernel run at once and end soon. Otherwise
                waiting programs would occupy multiprocessors, and looping programs would be distributed unevenly.
    LETS_SUMS:  trigger the next kernel's launch in any case: it adds up this kernel's partial sums
    """
    if PDL:
        if LETS_SUMS or (LETS_NEXT and tl.num_programs(0) <= AT_ONCE):
            gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wide(x):
    """x in the precision of the computation: float64 for float64, else float32."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def exp(x):
    """tl.exp in half the instructions: results below the smallest normal number become zero."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def load(pointer, start, size, BLOCK: tl.constexpr):
    """Elements start … start + BLOCK of a vector of `size`; zeros beyond its end."""
    offsets = tl.arange(0, BLOCK)
    if start + BLOCK <= size:
        tile = tl.load(pointer + start + offsets)
    else:
        tile = tl.load(pointer + start + offsets, mask=offsets < size - start, other=0.0)
    return tile


@triton.jit
def store(pointer, start, size, tile, BLOCK: tl.constexpr):
    """The counterpart of `load`; the tile is rounded to the pointer's dtype."""
    offsets = tl.arange(0, BLOCK)
    tile = tile.to(pointer.dtype.element_ty)
    if start + BLOCK <= size:
        tl.store(pointer + start + offsets, tile)
    else:
        tl.store(pointer + start + offsets, tile, mask=offsets < size - start)


@triton.jit
def left(first, rows, ROWS: tl.constexpr):
    """The number of rows from `first` on that exist, at most ROWS: an int32, though `first` may have 64 bits."""
    return tl.minimum(rows - first, ROWS).to(tl.int32)


@triton.jit
def from_last(number, rows, ROWS: tl.constexpr):
    """First row (64 bits) of tile `number`, counted from the last tile.

    Gradients process tiles in this order: the kernel that wrote dy or read x began at the first row, so that the last
    rows are still in L2.
    """
    return tl.cast((rows - 1) // ROWS - number, tl.int64) * ROWS


@triton.jit
def tile(first, block, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The place in a matrix, rows × columns, of rows `first` … `first` + ROWS of column block `block`.

    Returns the offset of the first row (64 bits), offsets from there, a mask, and the columns.
    """
    row, column = tl.arange(0, ROWS)[:, None], block * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = column < columns
    if ROWS > 1:
        mask &= row < left(first, rows, ROWS)
    return tl.cast(first, tl.int64) * columns, row * columns + column, mask, column


@triton.jit
def place(columns, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """A program's row of tiles, and its column block (0 where tiles have WHOLE rows).

    (`tl.cdiv` would add a block to the columns first, which overflows 32 bits if they nearly fill them.)
    """
    if WHOLE:  # a division would take half of the instructions before the first load
        number, block = tl.program_id(0), 0
    else:
        across = (columns - 1) // BLOCK + 1
        number, block = tl.program_id(0) // across, tl.program_id(0) % across
    return number, block


@triton.jit
def share(columns, ALONE: tl.constexpr, BLOCK: tl.constexpr):
    """A program's column block, the group of rows that it sums, and the number of groups (1 if ALONE)."""
    if ALONE:
        block, group, count = tl.program_id(0), 0, 1
    else:
        across = (columns - 1) // BLOCK + 1
        block, group, count = tl.program_id(0) % across, tl.program_id(0) // across, tl.num_programs(0) // across
    return block, group, count


@triton.jit
def column_sums(
    sums_ptr, first_ptr, second_ptr, groups, columns, GROUPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Sum all groups for a block of columns of one result, in a fixed order, and round once.

    The kernel does not trigger the next launch early: the next kernel may loop (see `begin`).
    """
    begin(PDL, LETS_NEXT=False)
    across = (columns - 1) // BLOCK + 1
    is_second, width = 0, columns
    if second_ptr is not None:
        is_second, width = (tl.program_id(0) >= across).to(tl.int32), 2 * columns  # a division would take longer
    column = (tl.program_id(0) - is_second * across) * BLOCK + tl.arange(0, BLOCK)[None, :]
    group = tl.arange(0, GROUPS)[:, None]
    inside = column < columns
    sums = tl.load(sums_ptr + group * width + is_second * columns + column, mask=(group < groups) & inside, other=0.0)
    result = tl.sum(sums, axis=0, keep_dims=True)
    if second_ptr is None or is_second == 0:
        tl.store(first_ptr + column, result.to(first_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(second_ptr + column, result.to(second_ptr.dtype.element_ty), mask=inside)


def matrix(tensor: Tensor) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix: the last dimension is the columns, all others are rows."""
    columns = tensor.shape[-1]
    return (tensor.numel() // columns if columns else 0), columns


class Piece(NamedTuple):
    """Bytes that a program writes, and its warps."""

    bytes: int
    warps: int = 4


class Tile(NamedTuple):
    """Rows and columns that a program writes, and its warps."""

    rows: int
    block: int
    warps: int


# Fewer bytes in flight lie closer together in memory: 16 bytes per thread are fast, or 8 of each of two operands. If
# all programs fit on the card at once, this does not matter, and 64 bytes are fast. For expensive arithmetic (erf),
# many warps are fast with few elements, and 32 bytes per thread with many.
PIECES = [Piece(4096), Piece(8192, 16), Piece(2048, 8), Piece(2048), Piece(8192), Piece(4096, 8)]


@cache
def tiles_of(columns: int, element_size: int) -> list[Tile]:
    """`PIECES` as tiles. The first, which a graph uses without a race, has 1024 elements (or one row, if longer)."""
    sizes = [Piece(1024 * element_size), *PIECES]
    shapes = [(_tile_shape(columns, element_size, size, narrowest=32), warps) for size, warps in sizes]  # words of bits
    return list(dict.fromkeys(Tile(shape["ROWS"], shape["BLOCK"], warps) for shape, warps in shapes))


def is_raced(result: Tensor) -> bool:
    """Whether tile sizes are raced: if each multiprocessor gets 2 KiB or more.

    float64 has one config, because the last bits of two configs may differ.
    """
    return result.nbytes > 2048 * multiprocessors(result.device) and result.dtype != torch.float64


def over_vector(
    kernel: Any, result: Tensor, *operands: Tensor, bits: Sequence[Tensor | None] = (), **constants: Any
) -> Tensor:
    """Write `result` from operands of its shape; for a small result, programs write less, so that more take part.

    bits:  bit masks in memory order, which the kernel takes before the result
    """
    size, element_size = result.numel(), result.element_size()
    given = [*(laid_out_like(operand, result) for operand in operands), *bits]

    def run(piece: Piece) -> None:
        block = piece.bytes // element_size
        launch(kernel, ceil_div(size, block), *given, result, size, BLOCK=block, num_warps=piece.warps, **constants)

    alike = element_size * max(256, power_of_two(ceil_div(size, multiprocessors(result.device))))
    configs = PIECES if is_raced(result) else [Piece(min(4096, alike))]
    run(fastest(kernel.__name__, (*told_apart([*given, result], constants), bucket(size)), configs, run, result.device))
    return result


def over_tiles(kernel: Any, result: Tensor, *operands: Tensor | None, **constants: Any) -> Tensor:
    """Write `result`, m × n, one tile by each program; the tile is raced. Returns the result.

    kernel:    takes operands, result, rows and columns
    operands:  m × n, or rows of n; None: left out
    """
    rows, columns = matrix(result)

    def run(tile: Tile) -> None:
        across = ceil_div(columns, tile.block)
        how = {**constants, "WHOLE": across == 1, "ROWS": tile.rows, "BLOCK": tile.block, "num_warps": tile.warps}
        launch(kernel, ceil_div(rows, tile.rows) * across, *operands, result, rows, columns, **how)

    configs = tiles_of(columns, result.element_size())
    configs = configs if is_raced(result) else configs[:1]
    key = (*told_apart([*operands, result], constants), columns, bucket(rows))
    run(fastest(kernel.__name__, key, configs, run, result.device))
    return result


def told_apart(tensors: Sequence[Tensor | None], constants: dict[str, Any]) -> list[object]:
    """Properties besides sizes by which a kernel's launches differ: dtypes, missing operands, boolean constants."""
    dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
    return [*dtypes, *(value for value in constants.values() if isinstance(value, bool))]


FEW = 512  # rows up to which one program may sum all rows of its columns, so that no partial sums remain


class Grouping(NamedTuple):
    """Bytes of a tile; programs on a multiprocessor (0: one for each few columns, of all rows), stages of their loops
    (see `rows.Launch`), and their warps."""

    bytes: int
    resident: int
    stages: int
    warps: int = 4


# All programs should fit on the card at once, else the last ones run alone. One program per multiprocessor that loads
# ahead leaves few partial sums. Of two, one computes while the other waits, which pays for expensive arithmetic (erf).
GROUPINGS = [Grouping(8192, 1, 4), Grouping(4096, 2, 4), Grouping(8192, 1, 6), Grouping(8192, 2, 4)]
# For more column blocks than multiprocessors: GROUPINGS give one program per block, so two on a few multiprocessors.
BROAD = Grouping(4096, 6, 1)
# Fewer warps have less to add up among them; more warps finish expensive arithmetic (erf) sooner.
ALONE = [Grouping(8192, 0, 1, warps=4), Grouping(8192, 0, 1, warps=8)]


def sharing(tiles: int, most: int, fewest: int) -> int:
    """The number of programs that share `tiles`, at least 1, where each program leaves partial sums to add up.

    most:    programs that fit on the card at once; the result takes no more turns than this number would
    fewest:  least number of programs that keeps every multiprocessor busy
    """
    turns = max(1, ceil_div(tiles, most))
    return max(1, min(tiles, max(ceil_div(tiles, turns), fewest)))


def over_columns(
    kernel: Any, result: Tensor, dtype: torch.dtype, *operands: Tensor | None, **constants: Any
) -> tuple[Tensor, Tensor]:
    """Write `result`, m × n, in one pass with a sum over rows; returns both.

    kernel:    takes operands, result, sums, rows and columns
    dtype:     of the sum, n
    operands:  m × n, or rows of n; None: left out
    """
    return result, summed(kernel, dtype, *operands, result, **constants)


def summed(kernel: Any, dtype: torch.dtype, *operands: Tensor | None, **constants: Any) -> Tensor:
    """A sum over rows, n numbers of this dtype, by a kernel like that of `over_columns`; the last operand is m × n.

    Each program adds up a group of rows of one column block, in WIDE precision; groups are then added in a fixed order.
    """
    last = operands[-1]
    assert last is not None
    rows, columns = matrix(last)
    dtypes = [operand.dtype for operand in operands if operand is not None]
    widest = torch.promote_types(max(dtypes, key=lambda dtype: dtype.itemsize), torch.float32)
    wide_type = tl.float64 if widest == torch.float64 else tl.float32
    narrowest = 32 if torch.int32 in dtypes else 16  # columns of a tile: of bits there are whole words
    total = last.new_empty(columns, dtype=dtype)

    def run(grouping: Grouping) -> None:
        tile = _grouped_tile(grouping, rows, columns, last.element_size(), narrowest)
        blocks = ceil_div(columns, tile["BLOCK"])
        groups = _groups(grouping, ceil_div(rows, tile["ROWS"]), blocks, multiprocessors(last.device))
        sums = total if groups == 1 else last.new_empty((groups, columns), dtype=widest)
        how = {"WIDE": wide_type, "STAGES": grouping.stages, "num_warps": grouping.warps, **constants, **tile}
        how["ALONE"] = groups == 1 and columns < 2**31  # a program's number has 32 bits
        launch(kernel, groups * blocks, *operands, sums, rows, columns, **how)
        if groups > 1:
            add_up(sums, total)

    configs = GROUPINGS if columns <= 1024 * multiprocessors(last.device) else [*GROUPINGS, BROAD]
    if rows <= FEW and columns < 2**24:  # a tile's offsets are counted in 32 bits
        configs = [*ALONE, *configs] if rows >= 8 else ALONE[:1]  # of fewer rows a race is a matter of luck
    key = (*told_apart(operands, constants), columns, bucket(rows))
    run(fastest(kernel.__name__, key, configs, run, last.device))
    return total


def _grouped_tile(grouping: Grouping, rows: int, columns: int, element_size: int, narrowest: int) -> dict[str, int]:
    """The tile of each program's loop, at least `narrowest` columns wide."""
    if grouping.resident:
        return _tile_shape(columns, element_size, grouping.bytes, narrowest)
    together = min(power_of_two(rows), 128)
    return {"ROWS": together, "BLOCK": max(narrowest, 64 * grouping.warps // together)}


def _groups(grouping: Grouping, tiles: int, blocks: int, processors: int) -> int:
    """Into how many groups to divide the `tiles` of each of so many column blocks, one program for each group."""
    most = max(1, grouping.resident * processors // max(blocks, 1))
    fewest = min(most, processors // max(blocks, 1))
    return sharing(tiles, most, fewest)


def add_up(sums: Tensor, first: Tensor, second: Tensor | None = None) -> None:
    """Write to `first` (n), and to `second` (n), the sums over all groups.

    sums:  groups × n, or groups × 2 n, where the second n belong to `second`

    The number of groups is limited by the programs that fit at once, so a program can read all its operands at once.
    """
    at_once, results = power_of_two(len(sums)), 1 if second is None else 2
    block, warps = (32, 4) if at_once <= 256 and results * first.numel() > 4096 else (16, 8)
    block = max(block, 1024 // at_once)
    programs = results * ceil_div(first.numel(), block)
    tile = {"GROUPS": at_once, "BLOCK": block, "num_warps": warps}
    launch(column_sums, programs, sums, first, second, len(sums), first.numel(), **tile)


def _tile_shape(columns: int, element_size: int, size: int, narrowest: int) -> dict[str, int]:
    """A tile of `size` bytes; of one row where offsets of further rows would exceed 32 bits."""
    block = max(narrowest, min(power_of_two(columns), 1024))
    return {"ROWS": max(1, size // element_size // block) if columns < 2**24 else 1, "BLOCK": block}
