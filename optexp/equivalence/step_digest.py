"""Digest of every tensor after a timed step, in two numbers each: it is held against repetitions of the same steps.

Outputs alone may be right where gradients and parameters were not computed; and where steps draw random numbers, or do
not repeat bit for bit, no other arm can tell what they should have been. The same arm can.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import sqrt

import torch
from torch import Tensor

from optexp.equivalence.observation import carried
from optexp.equivalence.sight import SEEN, SEEN_UNITS
from optexp.equivalence.tensor_math import chunks
from optexp.program import Outputs, Program, gradients
from optexp.support.reading import read
from optexp.support.tolerances import ZERO_UNITS

MOST = 8  # repetitions, where the first ones differ from what was timed
FACTOR = 10.0  # how much farther from a repetition than those from each other: of hundreds of tensors one is lucky
FLOOR = 2.0**-20  # of a tensor's RMS: a last bit that rarely differs
DISTURBED = 4  # runs of the baseline from parameters with a little noise, where a candidate does not repeat itself
STRAY = 3.0  # how much farther from a repetition than those
BY_ROUNDING = 256.0  # how much farther from each other than those, and in u of a tensor's RMS: rounding does no more
NO_ZEROS: Mapping[str, float] = {}  # a program without gradients that are zero but for rounding
PARTS = ("out/", "grad/", "buffer/", "param/", "after/")  # of an observation

Digest = dict[str, tuple[float, float]]  # mean and RMS of each tensor, by name


def left_behind(program: Program, outputs: Outputs, initial: Mapping[str, Tensor]) -> Digest:
    """After a step, by the names that an observation of it has (see `optexp.equivalence.observation`).

    initial: state that the first step began with
    """
    tensors = {f"out/{name}": tensor for name, tensor in outputs.items()}
    tensors |= gradients(program) if program.trains else {}
    tensors |= {f"buffer/{name}": tensor for name, tensor in program.buffers().items()}
    if program.optimizer is not None:
        tensors |= {f"after/{name}": t for name, t in program.state().items() if not name.startswith("buffer/")}
    else:
        held = {name: tensor for name, tensor in program.state().items() if name.startswith("param/")}
        tensors |= carried(held, initial)
    return digest(tensors)


def digest(tensors: Mapping[str, Tensor]) -> Digest:
    return {name: _numbers(read(tensor)) for name, tensor in tensors.items() if name.startswith(PARTS)}


def astray(
    timed: Digest,
    again: Sequence[Digest],
    moved: Sequence[Digest] = (),
    unit: float = 2.0**-24,
    zeros: Mapping[str, float] = NO_ZEROS,
) -> dict[str, str]:
    """By name, what is farther from the first repetition than the others explain, in words.

    With `moved` they explain no more than rounding does: a fault of one step in four shows in some repetitions, too.

    moved: what the baseline leaves after the same steps, and after them from parameters with a little noise (what a
           candidate leaves there is whatever it likes). What rounds at random flips a ReLU now and then, and all
           repetitions may have flipped another: without these, of LeNet-5 disturbed in the last bit 9 of 100 honest
           blocks of 11 training steps were astray, with them none of 300 (and none of blocks of 60 and 150)
    unit:  u of the promised arithmetic
    zeros: by name of a gradient that is zero but for rounding, the size of its terms. What is computed of it, as Adam's
           mean of squares, has no size that its repetitions tell: of a U-Net's biases one was ten times another
    """
    first = again[0]
    found = {}
    for name in sorted(timed.keys() | first.keys()):
        if name.startswith("after/optimizer/") and f"grad/{_owner(name)}" in zeros:
            continue
        if name not in timed or name not in first:
            found[name] = f"the timed step {'leaves' if name in timed else 'does not leave'} it, its repetition does"
            found[name] += " not" if name in timed else ""
            continue
        for what, at in (("mean", 0), ("RMS", 1)):
            here, there = timed[name][at], first[name][at]
            own, noise, size = _spread(again, name, at), _spread(moved, name, at), first[name][1]
            own = min(own, BY_ROUNDING * max(noise, unit * size)) if moved else own
            rounding = ZERO_UNITS * unit * zeros.get(name, 0.0)
            allowed = max(FACTOR * own + FLOOR * size, STRAY * noise, rounding)
            if abs(here - there) > allowed:
                found[name] = f"its {what} is {here:.6g}, and {there:.6g} where the same steps are repeated"
    return found


def unsteady(
    runs: Sequence[Digest], unit: float, scales: Mapping[str, float], zeros: Collection[str] = ()
) -> dict[str, float]:
    """How far the same steps leave a tensor apart, as a share of its size, where one that far off would be unseen.

    unit:   u of the promised arithmetic
    scales: by name, the s of gates: a gradient that is zero but for rounding has the size of its terms
    zeros:  such gradients. Adam divides one by its own size: updates and state follow from rounding alone
    """
    least = max(SEEN, SEEN_UNITS * unit)
    told = [name for name in runs[0] if f"grad/{_owner(name)}" not in zeros]
    apart = {name: max(_spread(runs, name, 0), _spread(runs, name, 1)) for name in told}
    sizes = {name: max(runs[0][name][1], scales.get(name, 0.0)) for name in told}
    shares = {name: far / sizes[name] for name, far in apart.items() if sizes[name]}
    return {name: share for name, share in shares.items() if share > least}


def _owner(name: str) -> str:
    """The parameter that a tensor after an update belongs to; empty where it is no parameter and no state of one."""
    if name.startswith("after/optimizer/"):
        return name.removeprefix("after/optimizer/").rpartition("/")[0]
    return name.removeprefix("after/param/") if name.startswith("after/param/") else ""


def _spread(runs: Sequence[Digest], name: str, at: int) -> float:
    """How far runs are from the first of them."""
    numbers = [run[name][at] for run in runs if name in run]
    return max((abs(number - numbers[0]) for number in numbers), default=0.0)


def _numbers(tensor: Tensor) -> tuple[float, float]:
    """NaN counts as 0: what diverges does so in every repetition."""
    sums = torch.zeros(2, dtype=torch.float64)
    count = 0
    for _, (part,) in chunks(tensor if tensor.layout is torch.strided else tensor.to_dense()):
        wide = part.to(torch.float64)
        sums += torch.stack([wide.sum(), wide.square().sum()]).cpu()
        count += wide.numel()
    total, squares = (sums / max(count, 1)).nan_to_num(0.0).tolist()
    return total, sqrt(squares)
