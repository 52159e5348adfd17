"""How the elements of a random result scatter, by themselves and together: a mask that neighbours, rows or layers share
leaves each sum over a tensor nearly as it was.

Some elements of every output and gradient are kept, draw by draw, in units of their own scatter. Two draws y and y' are
alike by Σ_r (y_r · y'_r) (y_s · y'_s), where r and s are two slices of a tensor: the mean of this over draws is the
squared covariance of the slices. Masks that slices r and s share make draws of one arm more alike than draws of both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt
from statistics import NormalDist, fmean, variance

import torch
from torch import Tensor

from optexp.equivalence.tensor_math import rms
from optexp.equivalence.two_samples import alike, location
from optexp.records.verification import Finding, Scatter

MANY_S = 2.0  # more draws than `randomness.SEEDS` are made of fast steps, for so many seconds
SOME, SOME_S = 128, 10.0  # so many are made for longer: a busy machine must not hide a mask that two elements share
MANY = 384  # draws at most
WORK = 2**28.5  # elements × draws²: a second of a core
ALARM = 5e-5  # how often honest arms may differ by luck, over all tests of one comparison of draws
MISSED = 0.1  # of the differences in variance that `Scatter.visible` names
SIDES = (64, 32, 16, 8)  # elements along a dimension of a matrix that are kept, so that
MOST = 2**17  # in all are not more
LEAST_SIDE = 4
ABOVE = 4.0  # times rounding: elements that scatter less are left out
EMPTY = 1e-9  # of the largest eigenvalue: a smaller one is zero
LAYERS = "random numbers"

Test = tuple[float, str, str]  # p, the result's name, and what differs
Draws = Mapping[str, Tensor]  # by result, draws × elements


@dataclass
class Elements:
    """Some elements of each random result, draw by draw: the first along each dimension, and the first of its second
    half.

    shapes: of the whole results, in at most three dimensions
    wanted: draws, as many as can be compared in a second
    """

    drawn: dict[str, list[Tensor]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    side: int = 0
    wanted: int = MANY

    def add(self, results: Mapping[str, Tensor]) -> None:
        """results: of one draw, of floating-point numbers"""
        flat = {name: _flat(tensor.detach()) for name, tensor in results.items()}
        if not self.side:
            self.shapes = {name: tuple(tensor.shape) for name, tensor in flat.items()}
            total = {side: sum(_some(tensor, side).numel() for tensor in flat.values()) for side in SIDES}
            self.side = next((side for side in SIDES if total[side] <= MOST), SIDES[-1])
            self.wanted = min(MANY, int(sqrt(WORK / max(1, total[self.side]))))
        for name, tensor in flat.items():
            self.drawn.setdefault(name, []).append(_some(tensor, self.side).to(torch.float32, copy=True))

    def stacked(self) -> dict[str, Tensor]:
        """By result, draws × elements; without those that some draws lack, or that have no one shape."""
        most = max(map(len, self.drawn.values()), default=0)
        return {
            name: torch.stack(draws)
            for name, draws in self.drawn.items()
            if len(draws) == most and len({tensor.shape for tensor in draws}) == 1
        }


def _flat(tensor: Tensor) -> Tensor:
    """In at most three dimensions: those behind the second as one."""
    return tensor.flatten(2) if tensor.dim() > 3 else tensor


def _some(tensor: Tensor, side: int) -> Tensor:
    """As many elements of three dimensions as of two."""
    most = {0: 1, 1: 2 * side, 2: side, 3: max(LEAST_SIDE, side // 4)}[tensor.dim()]
    for dim, size in enumerate(tensor.shape):
        if size > most:
            halves = tensor.narrow(dim, 0, most // 2), tensor.narrow(dim, size - size // 2, most // 2)
            tensor = torch.cat(halves, dim)
    return tensor


def compare(
    candidate: Draws,
    baseline: Draws,
    shapes: Mapping[str, Sequence[int]],
    gate: str,
    unit: float,
    left_out: Collection[str] = (),
) -> tuple[list[Finding], Scatter]:
    """Findings of `gate`, and figures of the tests.

    shapes:   of the whole results
    unit:     of rounding, which becomes √u/4 of a size on the way, and u of the largest gradient where terms cancel
    left_out: results that are rounding alone
    """
    names = [name for name in baseline if name in candidate and name not in left_out]
    names = [name for name in names if candidate[name].shape[1:] == baseline[name].shape[1:]]
    draws = min((len(arm[name]) for arm in (candidate, baseline) for name in names), default=0)
    pairs = {name: torch.cat((candidate[name][:draws], baseline[name][:draws])) for name in names}
    cancelled = unit * max((rms(pairs[name]) for name in names if name.startswith("grad/")), default=0.0)
    tests, apart, layers = list[Test](), list[float](), dict[tuple[int, int], _Layers]()
    for name, values in pairs.items():
        own = _Own.of(values.reshape(2 * draws, -1), unit, cancelled * name.startswith("grad/"))
        if own is None:
            continue
        squares = own.values.square()
        totals = (squares.sum(1) / own.kept).tolist()
        ours, theirs = totals[:draws], totals[draws:]
        size = fmean(theirs) or inf
        text = f"elements have a variance of {fmean(ours) / size:.3g} times the baseline's"
        tests.append((location(ours, theirs, own.rounding), name, text))
        apart.append(sqrt((variance(ours) + variance(theirs)) / draws) / size)
        tests.append((alike(squares @ squares.mT), name, "elements have other variances, some larger, some smaller"))
        tests += [(p, name, text) for p, text in _slices(_levelled(own.values).view_as(values), shapes[name], layers)]
    for together in layers.values():
        if together.count > 1:
            text = "layers scatter together otherwise than the baseline's (is a mask shared?)"
            tests.append((alike(together.kernel()), LAYERS, text))
    found = [(p, name, text) for p, name, text in sorted(tests) if p * len(tests) < ALARM]
    smallest = min((p for p, _, _ in tests), default=1.0)
    findings = [
        Finding(name.removeprefix("out/"), gate, False, (gate,), used=inf, message=_message(p, text, draws, len(tests)))
        for p, name, text in found
    ]
    return findings, Scatter(draws, len(tests), smallest, _visible(apart, len(tests)))


def _message(p: float, text: str, draws: int, tests: int) -> str:
    return f"its {text}, over {draws} seeds of each arm (p < {max(p, 1e-99):.0e} in each of {tests} tests)"


def _visible(apart: Sequence[float], tests: int) -> float | None:
    """apart: standard error of the relative difference of variances, by result"""
    errors = [error for error in apart if error and isfinite(error)]
    normal = NormalDist()
    far = normal.inv_cdf(1 - ALARM / 2 / max(1, tests)) + normal.inv_cdf(1 - MISSED)
    return min(errors) * far if errors else None


@dataclass(frozen=True)
class _Own:
    """A result's elements in units of their own scatter, draws × elements: 0 where that may be rounding.

    kept:     elements that are not
    rounding: its share of their variance
    """

    values: Tensor
    kept: int
    rounding: float

    @classmethod
    def of(cls, values: Tensor, unit: float, least: float) -> _Own | None:
        """None where all may be rounding, which is at least `least`."""
        wide = values.to(torch.float64)
        spread = wide.std(0)
        size = rms(wide[:, spread > 0])  # without what fills a mask
        noise = max(sqrt(unit) / 4 * size, least)
        kept = spread > ABOVE * noise
        if not kept.any():
            return None
        own = torch.where(kept, (wide - wide.mean(0)) / spread, 0.0)
        share = (noise / spread[kept]).square().mean()
        return cls(own.to(torch.float32), int(kept.sum()), float(share))


def _levelled(values: Tensor) -> Tensor:
    """Draws × elements whose strongest common movements are shrunk to the size of the median one: the noise of all
    masks together, as in the slope of the loss, hides pairs of them. Both arms' draws count alike."""
    wide = values.to(torch.float64)
    sizes, directions = torch.linalg.eigh(wide @ wide.mT)
    real = sizes > EMPTY * sizes[-1]  # the mean of all draws is taken away
    usual = sizes[real].median()
    factors = torch.where(real, (usual / (sizes.clamp_min(0) + usual)).sqrt(), 0.0)
    level: Tensor = (directions * factors) @ (directions.mT @ wide)
    return level.to(torch.float32)


@dataclass
class _Layers:
    """How alike draws are by slices of the same place in several results."""

    total: Tensor
    squares: Tensor
    count: int = 1

    def add(self, products: Tensor, squares: Tensor) -> None:
        self.total += products
        self.squares += squares
        self.count += 1

    def kernel(self) -> Tensor:
        """Over all pairs of two different results."""
        return self.total.square().sum(0) - self.squares


def _slices(
    values: Tensor, shape: Sequence[int], layers: dict[tuple[int, int], _Layers]
) -> Iterator[tuple[float, str]]:
    """Tests of how slices along each dimension scatter together; they are added to `layers`, by the dimension's size
    and their number."""
    for dim in range(1, values.dim()):
        count = values.shape[dim]
        if count < 2:
            continue
        apart = values.movedim(dim, 0).reshape(count, len(values), -1)
        apart = apart / sqrt(apart.shape[-1])
        products = apart @ apart.mT  # slices × draws × draws
        squares, half = torch.zeros_like(products[0]), count // 2
        beside, far = squares.clone(), squares.clone()
        for index in range(count):
            squares.addcmul_(products[index], products[index])
            if index:
                beside.addcmul_(products[index], products[index - 1])
            if index < half:
                far.addcmul_(products[index], products[count - half + index])
        everywhere = products.sum(0).square() - squares
        place = f"along dimension {dim - 1} scatter together otherwise than the baseline's (is a mask shared?)"
        yield alike(beside), f"neighbours {place}"
        if count > 2:
            yield alike(far), f"two halves {place}"
            yield alike(everywhere), f"elements {place}"
        if known := layers.get(key := (shape[dim - 1], count)):
            known.add(products, squares)
        else:
            layers[key] = _Layers(products, squares)
