"""Whether two runs changed a value that Python keeps likewise: what each of them held before, and after.

Counts and texts must be equal. Real numbers may differ as far as rounding, and noise in the baseline, move them.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from math import inf, isfinite
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import MappingKey, is_namedtuple, tree_flatten, tree_flatten_with_path, tree_map

from optexp.python_state.slots import DEPTH, HOW, MADE, PLAIN, SIMPLE, WITH_STATE, tensors_in
from optexp.python_state.variables import users
from optexp.support.sparse import equal as of_parts
from optexp.support.sparse import is_sparse
from optexp.support.tolerances import SMALL, TOLERANCES

# How far real numbers may differ, of what a step changes them by:
COARSE = 0.1  # two runs of one arm, and single numbers in lower precision, which flips what an accuracy counts
FINE = 2.0**-10  # others: what a fused optimizer holds in float32 moves updates by less
NOISE = 3.0  # times as far as noise moves the baseline's
SEEN = 0.02  # of a change: a larger error has to show
ROUNDINGS, FEW = 16.0, 4.0  # of the number itself, which may be a long sum; of many numbers' size
MOST_PRODUCTS = 2**28  # of rows that are looked for and elements that they are compared with
OPTIONS: tuple[Any, ...] = (MappingKey("param_groups"), MappingKey(MADE))  # of an optimizer that a step makes


Pair = Sequence[Any]  # before and after
Orders = dict[frozenset[str], list[str]]  # by a network's set of tensor names: their order in the first such network


def apart(ours: Pair, theirs: Pair) -> list[float]:
    """How far two runs are from having changed each number likewise; infinitely, where they must be equal."""
    return [_distance(*leaf) for leaf in _leaves(ours, theirs)]


def drift(ours: Pair, theirs: Pair) -> list[float]:
    """How far they are `apart` by noise of earlier steps, where that is little beside the change itself; else 0, since
    nothing wrong would show beside it."""
    return [_drift(*leaf) for leaf in _leaves(ours, theirs)]


def same_start(ours: Pair, theirs: Pair) -> bool:
    """Whether two runs began with the same counts and texts; real numbers may differ."""
    orders: Orders = {}
    (one, shape), (other, as_well) = (tree_flatten(_sorted(_opened(pair[0], orders))) for pair in (ours, theirs))
    return shape == as_well and all(_real(b) or _distance(0.0, a, 0.0, b) == 0 for a, b in zip(one, other, strict=True))


def alike(
    ours: Pair, theirs: Pair, unit: float = 0.0, noise: Sequence[float] | None = None, drifted: bool = False
) -> bool:
    """Whether two arms changed something likewise: counts and texts exactly, real numbers as closely as the noisy
    runs of the baseline say, since an average may show in no result.

    unit:    u of the arithmetic
    noise:   how far those are `apart`; None: two runs of one arm, of which a time is told by being another each time
    drifted: many steps lie before, which each arm made by itself: counts may have parted by rounding, and real numbers
             change as differently as what they were
    """
    return not [*_unlike(ours, theirs, unit, noise, drifted)]


def unseen(ours: Pair, theirs: Pair, unit: float, noise: Sequence[float]) -> bool:
    """Whether all that is not `alike` are numbers that noise moves by so much of the change that nothing wrong would
    show beside it."""
    unlike = [*_unlike(ours, theirs, unit, noise, drifted=False)]
    return bool(unlike) and all(
        _real(other) and isfinite(by) and by > SEEN * float(_change(_wide(other), started).norm())
        for started, other, by in unlike
    )


def _unlike(
    ours: Pair, theirs: Pair, unit: float, noise: Sequence[float] | None, drifted: bool
) -> Iterator[tuple[Any, Any, float]]:
    """Before and after of the second's values that are not `alike`, and how far noise moves them."""
    leaves = _leaves(ours, theirs)
    blurred = [*(noise or ()), *[0.0] * len(leaves)]
    for (before, one, started, other), by in zip(leaves, blurred, strict=False):
        allowed = _allowed(unit, noise is not None, started, other)
        if drifted and (off := _distance(0.0, before, 0.0, started)):
            allowed += NOISE * off
        if _distance(before, one, started, other) > allowed + NOISE * by:
            yield started, other, by


def alike_in_kind(ours: Pair, theirs: Pair) -> bool:
    """Whether both hold as many values, in the same places."""
    one, other = ([tree_flatten(_sorted(_opened(value, {})))[1] for value in pair] for pair in (ours, theirs))
    return one == other


def same_form(ours: Pair, theirs: Pair) -> bool:
    """Whether both are alike in kind, with tensors of equal shapes."""
    shapes = [[leaf.shape if isinstance(leaf, Tensor) else None for _, leaf in values(pair)] for pair in (ours, theirs)]
    return alike_in_kind(ours, theirs) and shapes[0] == shapes[1]


def lacking(
    ours: Sequence[Pair], theirs: Pair, unit: float = 0.0, noise: Sequence[float] = (), drifted: bool = False
) -> list[bool]:
    """Values that one arm changes, and the other changes alike nowhere: of each, whether it is a real number.

    A count is the same if it moves by as much: where it began is its program's own affair.

    ours: everything that the other arm changes
    """
    there, here = [leaf for pair in ours for leaf in values(pair)], values(theirs)
    blurred = [*noise, *[0.0] * len(here)]
    return [
        _real(leaf[1])
        for leaf, by in zip(here, blurred, strict=False)
        if not (_still(*leaf) or any(_moves_alike(one, leaf, unit, by, drifted) for one in there))
    ]


def rearranged(ours: Sequence[Pair], theirs: Pair, unit: float, noise: Sequence[float] = ()) -> bool | None:
    """Whether all rows that one arm writes are among those that the other holds then, as a ring of rows in a tensor and
    a deque of them are; None where it writes none. No word of their order, nor of how many there are.

    ours: everything that the other arm changes
    """
    there = _by_shape(after for pair in ours for _, after in values(pair))
    old = _by_shape(tree_flatten(_sorted(_opened(theirs[0], {})))[0])
    wrote, here = False, values(theirs)
    for (before, after), by in zip(here, [*noise, *[0.0] * len(here)], strict=False):
        if after is None or _still(before, after):
            continue
        options = [rows[~_among(old, rows)] for rows in _as_rows(after)]
        if options and not all(map(len, options)):
            continue  # it moves within its container
        if not any(bool(_among(there, rows, unit, by).all()) for rows in options):
            return False
        wrote = True
    return wrote or None


def _as_rows(value: Any) -> list[Tensor]:
    """A number, or a tensor, as one row, and a tensor's own rows."""
    if not isinstance(value, (bool, int, float, Tensor)) or (isinstance(value, Tensor) and value.is_complex()):
        return []
    number = _wide(value)
    return [number[None], number] if number.ndim and number.numel() else [number[None]]


def _by_shape(held: Iterable[Any]) -> dict[torch.Size, Tensor]:
    """Rows of values, by their shape."""
    found: dict[torch.Size, list[Tensor]] = defaultdict(list)
    for rows in (rows for value in held for rows in _as_rows(value)):
        found[rows.shape[1:]].append(rows)
    return {shape: torch.cat(rows) for shape, rows in found.items()}


def _among(there: dict[torch.Size, Tensor], rows: Tensor, unit: float = 0.0, by: float = 0.0) -> Tensor:
    """Of each row, whether it is there, up to rounding; by: how far noise moves them."""
    known = there.get(rows.shape[1:])
    if known is None or len(rows) * known.numel() > MOST_PRODUCTS:
        return torch.zeros(len(rows), dtype=torch.bool)
    one, other = (part.reshape(len(part), -1) for part in (rows, known))
    far = torch.cdist(one, other, compute_mode="donot_use_mm_for_euclid_dist").amin(1)
    return torch.le(far, ROUNDINGS * unit * torch.linalg.vector_norm(one, dim=1) + NOISE * by)


def values(pair: Pair) -> list[tuple[Any, Any]]:
    """Before and after, of each value."""
    orders: Orders = {}
    before, after = (_sorted(_opened(value, orders)) for value in pair)
    (then, shape), (now, later) = tree_flatten(before), tree_flatten(after)
    if shape == later:
        return list(zip(then, now, strict=True))
    return [(leaf if _is_option(path, leaf) else 0.0, leaf) for path, leaf in tree_flatten_with_path(after)[0]]


def _is_option(path: Sequence[Any], leaf: Any) -> bool:
    """Whether it says how an optimizer that the step made computes, or where the optimizer lies: it is no count."""
    return any(key in path for key in OPTIONS) and not _real(leaf)


def _still(before: Any, after: Any) -> bool:
    """Whether a value has not changed."""
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return equal(before, after)
    return isinstance(after, SIMPLE) and type(before) is type(after) and bool(before == after)


def _moves_alike(ours: tuple[Any, Any], theirs: tuple[Any, Any], unit: float, by: float, drifted: bool) -> bool:
    """Whether two values change alike, as `alike` has it.

    by: how far noise moves the second
    """
    (before, one), (started, other) = ours, theirs
    if int in (type(one), type(other)):  # torch's optimizers count in tensors
        moved, expected = _moved(before, one), _moved(started, other)
        return moved is not None and moved == expected
    if type(one) is not type(other) and not all(_real(value) and _wide(value).numel() == 1 for value in (one, other)):
        return False
    if (far := _distance(before, one, started, other)) == inf:  # of other shapes
        return False
    allowed, off = _allowed(unit, True, started, other) + NOISE * by, 0.0
    if drifted and _real(started) and _real(before):
        off = _distance(0.0, before, 0.0, started)
        off = off if off <= FINE * float(_wide(started).norm()) else 0.0  # else it is another thing
    return far <= allowed + NOISE * off


def _moved(before: Any, after: Any) -> int | None:
    """How far a whole number moved; None of others."""
    start, end = _whole(before), _whole(after)
    return None if start is None or end is None else end - start


def _whole(value: Any) -> int | None:
    """A whole number, whatever holds it."""
    if isinstance(value, Tensor):
        value = None if value.numel() != 1 or value.is_complex() or is_sparse(value) else value.item()
    return int(value) if type(value) in (int, float) and float(value).is_integer() else None


def _leaves(ours: Pair, theirs: Pair) -> list[tuple[Any, Any, Any, Any]]:
    """Before and after, of both, in the order of `theirs`."""
    orders: Orders = {}
    started, other, before, one = (_sorted(_opened(value, orders)) for value in (*theirs, *ours))
    leaves, shapes = zip(*map(tree_flatten, (before, one, started, other)), strict=True)
    if shapes[1] != shapes[3]:
        return [(0.0, 0.0, 0.0, inf)]
    moved = shapes[0] == shapes[1] and shapes[2] == shapes[3]
    starts = (leaves[0], leaves[2]) if moved else ([0.0] * len(leaves[1]),) * 2
    return list(zip(starts[0], leaves[1], starts[1], leaves[3], strict=True))


def _opened(value: Any, orders: Orders, depth: int = 0) -> Any:
    """Values with the contents of objects in the objects' places: a network's tensors, what an optimizer or an object
    of the user's holds. A teacher that the first call makes is one object."""
    return tree_map(lambda leaf: _contents(leaf, orders, depth), value)


def _contents(leaf: Any, orders: Orders, depth: int) -> Any:
    if isinstance(leaf, nn.Module):
        tensors = tensors_in(leaf)
        return [tensors[name] for name in orders.setdefault(frozenset(tensors), list(tensors))]
    if isinstance(leaf, numpy.ndarray) and leaf.dtype.kind in "biufc":  # the other program may hold it as a tensor
        with suppress(TypeError):  # torch lacks the dtype, as of long doubles
            return torch.from_numpy(leaf.copy())
    if isinstance(leaf, (*PLAIN, type)) or depth == DEPTH:
        return leaf
    if isinstance(leaf, WITH_STATE):
        return _opened(leaf.state_dict(), orders, depth + 1)
    if users(type(leaf)) and hasattr(leaf, "__dict__"):
        return _opened(dict(vars(leaf)), orders, depth + 1)
    return leaf


def _sorted(value: Any) -> Any:
    """Containers as dicts by key and as lists. A model with the same parameters in another order fills a dict
    otherwise; classes of named tuples and factories of dicts are other objects in each process. An optimizer's group
    leaves out how its update is computed."""
    if type(value) in (dict, OrderedDict, defaultdict):
        left_out = HOW if "params" in value else ()
        return {key: _sorted(value[key]) for key in sorted(value, key=repr) if key not in left_out}
    sequence = type(value) in (list, tuple, deque) or is_namedtuple(value)
    return [_sorted(entry) for entry in value] if sequence else value


def _distance(before: Any, ours: Any, started: Any, theirs: Any) -> float:
    if _real(ours) and _real(theirs):
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor) and ours.shape != theirs.shape:
            return inf
        a, b = _wide(ours), _wide(theirs)
        finite = torch.equal(a.isfinite(), b.isfinite())
        return float((_change(a, before) - _change(b, started)).norm()) if finite else inf
    if isinstance(theirs, Tensor):
        same = isinstance(ours, Tensor) and equal(ours, theirs)
    else:
        same = not isinstance(theirs, (*SIMPLE, set, frozenset)) or ours == theirs
    return 0.0 if same else inf


def _drift(before: Any, ours: Any, started: Any, theirs: Any) -> float:
    far = _distance(before, ours, started, theirs)
    return far if _real(theirs) and NOISE * far <= SEEN * float(_change(_wide(theirs), started).norm()) else 0.0


def _allowed(unit: float, closely: bool, started: Any, theirs: Any) -> float:
    if not _real(theirs):
        return 0.0
    number, share, rounding = _wide(theirs), COARSE, ROUNDINGS * unit
    many = isinstance(theirs, Tensor) and theirs.numel() >= SMALL
    if closely and (many or unit <= TOLERANCES["float32"].unit):
        share = FINE
    if closely and many and theirs.dtype is not torch.float64:
        rounding = FEW * torch.finfo(theirs.dtype).eps / 2
    return float(share * _change(number, started).norm() + rounding * number.nan_to_num(0, 0, 0).norm())


def _wide(number: Any) -> Tensor:
    held = number.detach() if isinstance(number, Tensor) else number
    held = held.to_dense() if isinstance(held, Tensor) and is_sparse(held) else held
    return torch.as_tensor(held, dtype=torch.float64, device="cpu")


def _change(now: Tensor, then: Any) -> Tensor:
    """From what was there; all of it, where that was another thing."""
    start = _wide(then) if _real(then) else torch.zeros(())
    fits = start.shape in (now.shape, ()) and bool(start.isfinite().all())
    return (now - start if fits else now).nan_to_num(0, 0, 0)


def _real(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, float)


def equal(ours: Tensor, theirs: Tensor) -> bool:
    if (ours.shape, ours.dtype, ours.device) != (theirs.shape, theirs.dtype, theirs.device):
        return False
    if is_sparse(ours) or is_sparse(theirs):
        return of_parts(ours, theirs, equal)
    if torch.equal(ours, theirs) or not ours.is_floating_point():
        return torch.equal(ours, theirs)
    return torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.nan_to_num(), theirs.nan_to_num())
