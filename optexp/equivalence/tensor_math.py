"""Sizes, errors and bits of large tensors, in fp64 and a chunk of elements at a time.

A 16384² tensor needs little memory beside itself. g is the fp64 reference, c the candidate, s = RMS(g).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import frexp, inf, isfinite, sqrt

import torch
from torch import Tensor

from optexp.support import sparse
from optexp.support.tolerances import SMALL

CHUNK = 2**24  # elements: enough to keep a GPU busy
CACHED = 2**18  # on a CPU: larger intermediates leave its caches, and are new pages every time (3.5 times slower)
FETCHED = 2**15  # elements on a GPU: smaller tensors are copied to the CPU, where an operation costs less than a launch
BLOCK = 4096  # elements of a block of G3
SPREAD = (-18.0, 2.0, 80)  # of a histogram: first and last power of ten, number of bins
FILL = 2.0**10  # numbers that fill masks are larger; probabilities and normalized values are not
FILL_OCTAVES, FILL_GAP = 3, 6  # they lie this close together (two may be added), and this far above all else


def name_of(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Error:
    """Error of a tensor against its reference.

    rms:  RMS(c−g)
    peak: maxᵢ |cᵢ−gᵢ| · s/(|gᵢ|+s): the quantity of G2 times s, so that it also means something beside another g
          and where fp64 gives (almost) zero, as for a bias before a BatchNorm
    index, candidate, reference: of the element with the peak (None for an empty tensor)
    blocks: RMS(c−g) of each block of `BLOCK` elements, float64 on the CPU; None for a tensor of one block
    lost:   number of elements that are not finite in one of both; the other figures leave them out
    """

    rms: float = 0.0
    peak: float = 0.0
    index: tuple[int, ...] | None = None
    candidate: float = 0.0
    reference: float = 0.0
    lost: int = 0
    blocks: Tensor | None = field(default=None, compare=False, repr=False)


def rms(tensor: Tensor) -> float:
    """Root mean square of the finite elements of a tensor of any shape; 0 where there are none."""
    if tensor.is_floating_point() and tensor.numel():
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for _, (part,) in chunks(tensor)]
        if isfinite(size := float(torch.stack(norms).norm())):  # and so is every element
            return size / sqrt(tensor.numel())
    sums = []
    for _, (part,) in chunks(tensor):
        wide = part.to(torch.float64)
        finite = wide.isfinite()
        sums.append(torch.stack([torch.where(finite, wide, 0.0).square_().sum(), finite.sum()]))
    total, count = torch.stack(sums).sum(0).tolist() if sums else (0.0, 0.0)
    return sqrt(total / count) if count else 0.0


def filled(reference: Tensor, dtype: torch.dtype) -> float | None:
    """The least magnitude of numbers that fill a mask, as −1e9; None where the tensor has no such numbers.

    Numbers that fill a mask have few values, far above all others. They would determine s, and any error of the other
    elements would pass for rounding.

    dtype: of the candidate; magnitudes that it cannot hold as normal numbers do not count as others
    """
    if largest(reference) < FILL:
        return None
    counts, limit = _exponents(reference), None
    sizes = [size for size in sorted(counts, reverse=True) if size >= frexp(torch.finfo(dtype).tiny)[1]]
    while sizes:
        fill = [size for size in sizes if size > sizes[0] - FILL_OCTAVES]
        others, lowest = sizes[len(fill) :], 2.0 ** (fill[-1] - 1)
        near = not others or fill[-1] - others[0] <= FILL_GAP
        if lowest < FILL or near or sum(counts[size] for size in others) < SMALL:
            break
        sizes, limit = others, lowest
    return limit


def largest(tensor: Tensor) -> float:
    """The largest finite magnitude."""
    peaks = [part.abs().nan_to_num(0, 0, 0).max() for _, (part,) in chunks(tensor)]
    return float(torch.stack(peaks).max()) if peaks else 0.0


def _exponents(tensor: Tensor) -> dict[int, int]:
    """Number of finite elements by exponent e, with magnitudes from 2^(e−1) up to 2^e."""
    low = -1100  # below float64's smallest; here also what is 0
    counts = torch.zeros(0, dtype=torch.int64)
    for _, (part,) in chunks(tensor):
        mantissa, exponent = torch.frexp(part.to(torch.float64).nan_to_num(0, 0, 0))
        places = torch.where(mantissa == 0, 0, exponent - low)
        here = torch.bincount(places, minlength=1025 - low).cpu()
        counts = counts + here if len(counts) else here
    return {at + low: count for at, count in enumerate(counts.tolist()) if at and count}


def sizes(tensors: Sequence[Tensor]) -> list[float]:
    """`rms` of each tensor, with one wait for all."""
    norms = zip(tensors, _norms(tensors, 2), strict=True)
    return [norm / sqrt(_flat(t).numel() or 1) if isfinite(norm) else rms(t) for t, norm in norms]


def peaks(tensors: Sequence[Tensor]) -> list[float]:
    """`largest` of each tensor, with one wait for all."""
    return [peak if isfinite(peak) else largest(t) for t, peak in zip(tensors, _norms(tensors, inf), strict=True)]


def finite(tensors: Mapping[str, Tensor]) -> set[str]:
    """Names of the tensors without NaN and Inf."""
    return {name for name, peak in zip(tensors, _norms([*tensors.values()], inf), strict=True) if isfinite(peak)}


def _norms(tensors: Sequence[Tensor], order: float) -> list[float]:
    """The norm of each tensor, with one wait for all: 0 of an empty tensor, not finite where an element is not."""
    flat = {place: vector for place, vector in enumerate(map(_flat, tensors)) if len(vector)}
    real = [vector if vector.is_floating_point() else vector.to(torch.float64) for vector in flat.values()]
    if not real:
        return [0.0] * len(tensors)
    found = torch.empty(len(real), dtype=torch.float64, device=real[0].device)
    torch._foreach_copy_([*found], torch._foreach_norm(real, order, dtype=None if order == inf else torch.float64))
    known = dict(zip(flat, found.tolist(), strict=True))
    return [known.get(place, 0.0) for place in range(len(tensors))]


def error(candidate: Tensor, reference: Tensor, scale: float) -> Error:
    """Error of the elements that are finite in both; `optexp.equivalence.gates.structure` compares the others.

    candidate, reference: of one shape;  scale: s
    """
    return errors([(candidate, reference, scale)])[0]


def errors(compared: Sequence[tuple[Tensor, Tensor, float]]) -> list[Error]:
    """`error` of each candidate beside its reference and scale."""
    if not compared:
        return []
    candidates, references, scales = zip(*compared, strict=True)

    def facts(owners: Mapping[int, int], c: Tensor, g: Tensor) -> Tensor:
        s = torch.tensor([[scales[owner]] for owner in owners], dtype=torch.float64).to(c.device)
        if len(owners) > 1:
            s = s.repeat_interleave(torch.tensor([*owners.values()], device=c.device), 0, output_size=len(c))
        difference = (c - g).abs_()
        finite = difference.isfinite()
        weighted = (s / g.abs().add_(s)).mul_(difference)
        if not all(scales[owner] for owner in owners):
            weighted = torch.where(s == 0, difference, weighted)
        lost = torch.zeros(len(c), 1, dtype=torch.float64, device=c.device)
        if not finite.all():
            weighted, difference = (torch.where(finite, each, 0.0) for each in (weighted, difference))
            lost = finite.logical_not_().sum(1, keepdim=True)
        peak, at = weighted.max(1, keepdim=True)
        square = torch.linalg.vector_norm(difference, dim=1, keepdim=True).square_()
        return torch.cat([square, lost, peak, at, c.gather(1, at), g.gather(1, at)], 1)

    found = []
    for candidate, table in zip(candidates, by_rows(facts, candidates, references), strict=True):
        if not len(table):
            found.append(Error())
            continue
        count, worst = _flat(candidate).numel(), int(table[:, 2].argmax())
        total, lost = table[:, :2].sum(0).tolist()
        _, _, peak, at, c, g = table[worst].tolist()
        index = index_of(worst * BLOCK + int(at), candidate)
        blocks = (table[:, 0] / BLOCK).sqrt_() if count > BLOCK else None
        found.append(Error(sqrt(total / max(count - lost, 1.0)), peak, index, c, g, int(lost), blocks))
    return found


def histogram(candidate: Tensor, reference: Tensor, scale: float) -> list[float]:
    """Distribution of |c−g|/s: the share of elements without error, then the share in each bin of `SPREAD`.

    candidate, reference: of one shape;  scale: s
    """
    low, high, parts = SPREAD
    counts, total = torch.zeros(parts + 1, dtype=torch.float64), 0
    for _, (c, g) in chunks(candidate, reference):
        off = (c.to(torch.float64) - g.to(torch.float64)).abs_().div_(scale or 1.0)
        off = off[off.isfinite()]
        places = (off[off > 0].log10_() - low).mul_(parts / (high - low)).long().clamp_(0, parts - 1)
        counts[0] += float((off == 0).sum())
        counts[1:] += torch.bincount(places, minlength=parts).cpu()  # histc is not deterministic
        total += len(off)
    return (counts / max(total, 1)).tolist()


def identical(a: Tensor, b: Tensor) -> bool:
    """The same dtype, shape and bits (so NaN equals NaN, and 0 is not −0)."""
    if a.shape != b.shape or a.dtype != b.dtype or a.layout is not b.layout:
        return False
    if sparse.is_sparse(a):
        return sparse.equal(a, b, identical)
    return all(bool((_bits(x) == _bits(y)).all()) for _, (x, y) in chunks(a, b))


def alike(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> set[str]:
    """Names of tensors that are `identical` in both."""
    pairs = {name: (tensor, theirs[name]) for name, tensor in ours.items() if name in theirs}
    pairs = {n: (a, b) for n, (a, b) in pairs.items() if (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)}
    alone = {name for name, pair in pairs.items() if any(map(sparse.is_sparse, pair)) or pair[0].numel() > CHUNK}
    found = {name for name in alone if identical(*pairs[name])}
    pairs = {name: pair for name, pair in pairs.items() if name not in alone}
    for device in {tensor.device for tensor, _ in pairs.values()}:
        bits = {n: [_flat(t).view(torch.uint8) for t in pair] for n, pair in pairs.items() if pair[0].device == device}
        differ = by_rows(_unequal, *zip(*bits.values(), strict=True), dtype=torch.uint8)
        found |= {name for name, rows in zip(bits, differ, strict=True) if not rows.any()}
    return found


def _unequal(_: Mapping[int, int], a: Tensor, b: Tensor) -> Tensor:
    return (a.view(torch.int64) != b.view(torch.int64)).any(1)


def chunks(*tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Equal pieces of all tensors as vectors, with the offset of the first element; complex numbers as pairs."""
    flat = [_flat(tensor) for tensor in tensors]
    if flat[0].numel() <= FETCHED:
        flat = [vector.cpu() for vector in flat]
    chunk = min(CHUNK, CACHED) if flat[0].device.type == "cpu" else CHUNK
    for start in range(0, flat[0].numel(), chunk):
        yield start, tuple(vector[start : start + chunk] for vector in flat)


def by_rows(
    work: Callable[..., Tensor], *columns: Sequence[Tensor], dtype: torch.dtype = torch.float64
) -> Sequence[Tensor]:
    """Results of `work` for many tensors: of each tensor, on the CPU, one entry per block of `BLOCK` elements.

    work:    called with the number of rows by the index of the tensor that they belong to, in order, and one matrix of
             shape (rows, `BLOCK`) per column; the last row of a tensor is filled up with zeros
    columns: equally many tensors each, of pairwise equal sizes
    Thousands of small tensors cost as many launches and waits on a GPU as a single one.
    """
    flat = [[_flat(tensor) for tensor in column] for column in columns]
    counts = [-(-len(vector) // BLOCK) for vector in flat[0]]
    rows, found = [*accumulate(counts, initial=0)], list[Tensor]()
    device = flat[0][0].device if rows[-1] else torch.device("cpu")
    most = max(1, (min(CHUNK, CACHED) if device.type == "cpu" else CHUNK) // BLOCK)
    for first in range(0, rows[-1], most):
        last = min(first + most, rows[-1])
        owners = range(bisect_right(rows, first) - 1, bisect_left(rows, last))
        here = {o: n for o in owners if (n := min(rows[o + 1], last) - max(rows[o], first)) > 0}
        within = {o: (max(rows[o], first) * BLOCK, min(rows[o] * BLOCK + len(flat[0][o]), last * BLOCK)) for o in here}
        full = sum(high - low for low, high in within.values()) == (last - first) * BLOCK
        packed, start, make = list[Tensor](), first * BLOCK, torch.empty if full else torch.zeros
        for column in flat:
            packed.append(make(last - first, BLOCK, dtype=dtype, device=device))
            line = packed[-1].view(-1)
            torch._foreach_copy_(
                [line[low - start : high - start] for low, high in within.values()],
                [column[o][low - rows[o] * BLOCK : high - rows[o] * BLOCK] for o, (low, high) in within.items()],
            )
        found.append(work(here, *packed))
    return torch.cat(found).cpu().split(counts) if found else [torch.empty(0)] * len(counts)


def _flat(tensor: Tensor) -> Tensor:
    """As a vector without gaps, whose signs are in its memory; complex numbers as pairs."""
    own = tensor.resolve_conj().resolve_neg()
    real = torch.view_as_real(own) if own.is_complex() else own
    return real.detach().reshape(-1).contiguous()


def index_of(flat: int, tensor: Tensor) -> tuple[int, ...]:
    shape, index = (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape), list[int]()
    for size in reversed(shape):  # torch.unravel_index takes 40 µs, and thousands of tensors are looked at
        flat, at = divmod(flat, size)
        index.append(at)
    return tuple(reversed(index))


def _bits(tensor: Tensor) -> Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()])
