"""One tensor to judge, and its error: a result, a small part of it, a gradient, a parameter's change, a state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import hypot

import torch
from torch import Tensor

from optexp.equivalence.gates import Limits
from optexp.equivalence.tensor_math import CHUNK, Error, chunks, errors, filled, name_of, peaks, rms, sizes
from optexp.support.tolerances import SMALL, TOLERANCES

EXACT_ENOUGH = 0.002  # of their size: error of a baseline that computes tiny elements by themselves, and not as a rest
POWERLESS = 0.1  # a baseline this far from fp64 (in units of s) leaves the gates nothing to see
SMALLER = 2.0**-6  # of the largest column: smaller ones are judged by their own size too,
CANCELLED = 8.0  # but for what may be rounding of the largest, in u
FAR_SMALLER = 2.0**-10  # of the largest element of a vector of few: a smaller one is judged by itself
COLUMNS = " (small columns)"  # along the last dimension
CHANNELS = " (small channels)"  # along the second
ROWS = " (small rows)"  # along the first
TINY, TINIER, TINIEST = -16, -8, -96  # powers of two of s: scattered elements of such sizes are judged by their own,
NEAR = " (elements near "  # those of 8 powers together
SAMPLED = 2**22  # elements of a result: of a larger one, at most as many tiny ones of one order of magnitude are judged
ELEMENT = " (element "  # of a vector of few elements, as of figures of different size
MOST = " (most elements)"  # of a change that no known optimizer makes, without those that are farthest off
UNMASKED = " (unmasked)"  # a result without the numbers that fill its mask (see `filled`)

_NONE = torch.empty(0)


@dataclass(frozen=True)
class Quantity:
    """One tensor to judge: what an arm got, what fp64 gets, and how much they may differ.

    spread: variance of what the reference is a mean of: a mean that cancels is known no better than its terms
    stored: what holds the value, where how finely it can do that matters
    terms:  of a sum that is zero in exact arithmetic, RMS over elements of Σ|terms|: s is theirs
    columns: which ones it has of a result, along the dimension `axis`
    within:  the shape of a result that is such a vector, of which it has elements
    scale: s;  resolution: how finely `stored` can say what it says (RMS, largest);  found: its error (see `measured`)
    """

    name: str
    value: Tensor
    reference: Tensor
    limits: Limits
    spread: Tensor | None = None
    stored: Tensor | None = None
    terms: float = 0.0
    columns: Tensor | None = None
    axis: int = -1
    within: tuple[int, ...] = ()
    scale: float = 0.0
    resolution: tuple[float, float] = (0.0, 0.0)
    found: Error = field(default_factory=Error)


def is_exact(tensor: Tensor) -> bool:
    """Integers and bools, of which each element is right or wrong."""
    return not tensor.is_floating_point() and not tensor.is_complex()


def measured(quantities: Iterable[Quantity]) -> Iterator[Quantity]:
    """Each with its error, and with what that is measured by; many small ones at a time, as `by_rows` takes them."""
    group, size = list[Quantity](), 0
    for quantity in quantities:
        group.append(quantity)
        size += quantity.value.numel()
        if size >= CHUNK:
            yield from _measured(group)
            group, size = [], 0
    yield from _measured(group)


def _measured(group: Sequence[Quantity]) -> Iterator[Quantity]:
    spreads = sizes([_NONE if q.spread is None else q.spread.sqrt() for q in group])
    references = sizes([q.reference for q in group])
    scales = [hypot(size, spread, q.terms) for size, spread, q in zip(references, spreads, group, strict=True)]
    stored = [_NONE if q.stored is None else q.stored for q in group]
    found = errors([(q.value, q.reference, scale) for q, scale in zip(group, scales, strict=True)])
    every = zip(group, stored, scales, sizes(stored), peaks(stored), found, strict=True)
    for quantity, kept, scale, size, peak, error in every:
        row = TOLERANCES.get(name_of(kept.dtype))
        unit = 0.0 if row is None else 2 * row.unit  # two roundings, as of decay and update
        yield replace(quantity, scale=scale, resolution=(unit * size, unit * peak), found=error)


def parts(quantity: Quantity) -> Iterator[Quantity]:
    """The small part of a result, which would be lost beside the large part: s is the size of the whole."""
    name, value, reference = quantity.name, quantity.value, quantity.reference
    if not name.startswith(("out/", "input/")) or not reference.is_floating_point() or is_part(quantity):
        return
    if reference.numel() < SMALL:
        yield from _small_elements(quantity)
        return
    if fill := filled(reference, value.dtype):
        masked = ~(reference.abs() < fill)
        parts = value.masked_fill(masked, 0), reference.masked_fill(masked, 0)
        yield Quantity(name + UNMASKED, *parts, quantity.limits)
        return
    limits = replace(quantity.limits, cap=None)  # which knows no sums that cancel
    for axis, kind in ((-1, COLUMNS), (1, CHANNELS), (0, ROWS)):
        if axis < reference.dim() - 1 and (few := _small(reference, axis, quantity.limits.row.unit)) is not None:
            some = value.index_select(axis, few), reference.index_select(axis, few)
            yield Quantity(name + kind, *some, limits, columns=few, axis=axis)
    yield from _tiny_elements(quantity)


def _tiny_elements(quantity: Quantity) -> Iterator[Quantity]:
    """Elements all over a result that are lost beside its RMS, as small probabilities: those of one order of magnitude
    together, and whether they are right at all."""
    value, reference, size = quantity.value, quantity.reference, rms(quantity.reference)
    finest = torch.finfo(value.dtype)
    if not size or quantity.limits.row.unit >= 2.0**TINY or value.shape != reference.shape:
        return
    flat, judged = reference.reshape(-1), value.reshape(-1)
    for power, at in _by_order(reference, size, finest.tiny / finest.eps).items():
        if len(at) >= SMALL:
            name = f"{quantity.name}{NEAR}2^{power} of its size)"
            limits = replace(quantity.limits, cap=None, gross=True)
            yield Quantity(name, judged[at], flat[at], limits, columns=at, axis=0, within=tuple(value.shape))


def _by_order(reference: Tensor, size: float, smallest: float) -> dict[int, Tensor]:
    """Places of tiny elements by order of magnitude: all of them, or of a result of more than `SAMPLED` elements evenly
    many. Half of 1.6 billion elements may be tiny.

    smallest: of the magnitudes
    """
    found: dict[int, list[Tensor]] = {power: [] for power in range(TINY, TINIEST, TINIER)}
    for start, (part,) in chunks(reference):
        tiny = ((part.abs() < 2.0**TINY * size) & (part != 0)).nonzero()[:, 0]
        if not len(tiny):
            continue
        sizes, most = part[tiny].abs(), -(-SAMPLED * len(part) // reference.numel())
        for power, places in found.items():
            at = tiny[(sizes < 2.0**power * size) & (sizes >= max(2.0 ** (power + TINIER) * size, smallest))]
            if len(at):
                places.append(at[:: -(-len(at) // most)] + start)
    return {power: torch.cat(places) for power, places in found.items() if places}


def _small_elements(quantity: Quantity) -> Iterator[Quantity]:
    """Elements of a vector of few that are lost beside its largest: a step may return its loss and a count in one."""
    if quantity.reference.dim() != 1:
        return
    sizes = quantity.reference.abs().nan_to_num(0, 0, 0)
    for index in ((sizes > 0) & (sizes < FAR_SMALLER * sizes.max())).nonzero()[:, 0]:
        at = index[None]
        value, reference = quantity.value[at], quantity.reference[at]
        name = f"{quantity.name}{ELEMENT}{int(index)})"
        yield Quantity(name, value, reference, quantity.limits, stored=value, columns=at, axis=0)


def _small(reference: Tensor, axis: int, unit: float) -> Tensor | None:
    """Columns, or whatever lies along `axis`, far below the largest, where each has enough elements to tell."""
    if reference.dim() < 2 or reference.numel() < SMALL * reference.shape[axis]:
        return None
    others = [dim for dim in range(reference.dim()) if dim != axis % reference.dim()]
    sizes = torch.linalg.vector_norm(reference, dim=others).nan_to_num(0, 0, 0)
    small = (sizes < SMALLER * sizes.max()) & (sizes > CANCELLED * unit * sizes.max())
    return small.nonzero()[:, 0] if bool(small.any()) else None


def is_part(quantity: Quantity) -> bool:
    """Whether it is some elements of a tensor that is judged as a whole, too."""
    return whole(quantity.name) != quantity.name


def is_noise(quantity: Quantity, error: float) -> bool:
    """Whether what lies below a mask's numbers is rounding: the baseline errs by all of it. Of small columns, by so
    much of it that nothing could be told. Of tiny elements, by what a sum in another order could leave."""
    if quantity.limits.gross:
        return error > EXACT_ENOUGH * quantity.scale
    if quantity.name.endswith((COLUMNS, CHANNELS, ROWS)) or ELEMENT in quantity.name:
        return error > POWERLESS * quantity.scale
    return quantity.name.endswith(UNMASKED) and error >= quantity.scale


def whole(name: str) -> str:
    """The name of the tensor that a part is of."""
    name = name.partition(ELEMENT)[0].partition(NEAR)[0]
    return next(
        (name.removesuffix(kind) for kind in (UNMASKED, MOST, COLUMNS, CHANNELS, ROWS) if name.endswith(kind)), name
    )


def source(quantity: str, when: str = "after") -> str:
    """The observation's name of a quantity."""
    quantity = whole(quantity)
    if quantity.startswith("change/"):
        return quantity.replace("change/", f"{when}/param/", 1)
    return f"{when}/{quantity}" if quantity.startswith("optimizer/") else quantity
