"""ARM: whether steps take longer on batches that a program has not met, as one that remembers results would, and
whether their results are right there, where steps follow each other without a pause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from operator import truediv

import torch
from torch import Tensor

from optexp.equivalence.distance import farthest
from optexp.measurement import clock
from optexp.program import Batch, Outputs, gradients, map_batch, tensors_of
from optexp.program.offered import Offered
from optexp.support.reading import read
from optexp.workers.arm_program import draw
from optexp.workers.arm_timing import Timing, digest_of, turns

KEPT = 2**30  # most bytes of a batch and of its results that are kept beside what timing needs


class Batches(Enum):
    """The batches of a block: those that are timed, others for the first time, the same others again."""

    TIMED = auto()
    FRESH = auto()
    REPEATED = auto()


Seconds = Mapping[Batches, float]  # of a step, by the batches of its block


class Novelty(Timing):
    """Blocks of steps on new batches, beside blocks on those that were met before."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: dict[int, list[str]] = {}  # digests of batches that were met for the first time, by turn
        self.in_a_row: tuple[Batch, dict[str, Tensor]] | None = None  # the last such batch, and what its step left

    def novelty(self, seed: int) -> tuple[float, float] | None:
        """How many times longer a step takes on batches that it meets for the first time than on the same ones again,
        or than on those that it is timed on, in most turns at least; and how many times longer it takes on one kind of
        known batches than on the other in some turns, as on a busy machine.

        The batches change under a feed that goes on, at a step drawn at random: nothing tells a program when.
        None where batches are not the core's to choose.
        """
        self.restore()
        assert self.offered is not None
        eager = self.offered.ahead > self.program.feed.queue  # has copies of its own since it began
        self.run()
        if self.offered.ahead < 0:
            self.program.feed.pause()
            return None
        seconds = [self._turn(turn, seed + turn, eager) for turn in turns()]
        self.program.feed.pause()
        return _most(seconds)

    def _turn(self, turn: int, seed: int, eager: bool) -> Seconds:
        """One block of each kind. Its other batches, as large as the arm's own, are freed before the next turn."""
        assert self.offered is not None
        count, queue = len(self.batches), self.program.feed.queue
        drawn = draw(self.workload, self.device, getattr(torch, self.dtype), seed, count)
        self.drawn[turn] = [digest_of(batch).hex() for batch in drawn] if turn < 2 else []
        others, timed, seconds = Offered(drawn, self.offered.place), True, dict[Batches, float]()
        self.restore(self.random.randrange(count))
        run = self.runner()
        for _ in range(count + self.random.randrange(3 * count)):
            run()
        for kind in _order(turn):
            if timed is not (kind is Batches.TIMED):
                self.offered.exchange(others)
                timed = not timed
                if eager:
                    self.program.feed.reset(self.offered)
                for _ in range(queue if kind is Batches.FRESH else count + queue):  # timed ones: remembered again
                    run()
            watched = (self._keep_results, self.runner(keep=True)) if kind is Batches.FRESH else ()
            seconds[kind] = clock.time_block(run, count, self.device, *watched).wall_s
        if not timed:
            self.offered.exchange(others)
        return seconds

    def _keep_results(self, outputs: Outputs) -> None:
        """Of the last step of a block of new batches, where it was given the one whose turn it was."""
        assert self.offered is not None
        if not self.offered.written and self._given_as_offered(self.given):
            results = self._results(outputs)
            size = sum(tensor.nbytes for tensor in (*tensors_of(self.offered.current).values(), *results.values()))
            if size <= KEPT:
                batch = map_batch(torch.clone, self.offered.current)
                self.in_a_row = batch, {name: tensor.clone() for name, tensor in results.items()}
        self.given = ()

    def _results(self, outputs: Outputs) -> dict[str, Tensor]:
        """A step's outputs, and its gradients."""
        found = {f"out/{name}": read(tensor) for name, tensor in outputs.items()}
        return found | (gradients(self.program) if self.program.trains else {})

    def hurried(self) -> tuple[float, float]:
        """How far what a step on a new batch left, with steps before it, is from what a step on that batch alone
        leaves, and how far two of these are from each other; in sizes of the result."""
        if self.in_a_row is None:
            return 0.0, 0.0
        batch, left = self.in_a_row
        alone = []
        for _ in range(2):
            self.restore()
            found = self._results(self.program.step(self.program, self.program.feed.bring(batch)))
            alone.append({name: tensor.clone() for name, tensor in found.items()})
        self.program.feed.pause()
        return farthest(left, alone[0]), farthest(alone[1], alone[0])

    def met(self) -> list[list[str]]:
        """Digests of the batches of the first turns of `novelty`: those of all arms are drawn from the same seeds."""
        return [self.drawn[turn] for turn in sorted(self.drawn)[:2]]

    def reordered(self, seed: int) -> tuple[float, float]:
        """`novelty` where the batches are a loader's: another order makes others, of the same samples."""
        steps, seconds = max(len(self.batches), self.program.feed.queue), list[dict[Batches, float]]()
        for turn in turns():
            seconds.append({})
            for kind in _order(turn):
                self.restore()
                if kind is not Batches.TIMED:  # a loader's sampler draws from this one, on the CPU
                    torch.default_generator.manual_seed(seed + turn)
                run = self.runner()
                for _ in range(steps):  # until none is left that was made before the clock starts
                    run()
                seconds[-1][kind] = clock.time_block(run, steps, self.device).wall_s
                self.program.feed.pause()
        return _most(seconds)

    def permuted(self, seed: int) -> tuple[float, float]:
        """`novelty` where a loader may give the same batches whatever the seed: rows in another order make others."""
        assert self.offered is not None
        seconds = list[dict[Batches, float]]()
        for turn in turns():
            self.restore()
            timed = list[Batch]()
            for _ in self.batches:
                self.offered.due += 1
                timed.append(map_batch(torch.clone, self.program.feed.next()))
            self.program.feed.pause()
            generator = torch.Generator().manual_seed(seed + turn)
            others = [map_batch(partial(_permuted, state=generator.get_state()), batch) for batch in timed]
            seconds.append({})
            for kind in _order(turn):
                run = partial(self._step_on, iter(timed if kind is Batches.TIMED else others))
                seconds[-1][kind] = clock.time_block(run, len(timed), self.device).wall_s
        return _most(seconds)

    def _step_on(self, given: Iterator[Batch]) -> Outputs:
        return self.program.step(self.program, next(given))


def _permuted(tensor: Tensor, state: Tensor) -> Tensor:
    """Rows in an order that is the same for all tensors of as many; a copy of what has none."""
    generator = torch.Generator()
    generator.set_state(state)
    if not tensor.dim() or tensor.layout is not torch.strided:
        return tensor.clone()
    return tensor[torch.randperm(len(tensor), generator=generator).to(tensor.device)]


def _most(turns: Sequence[Seconds]) -> tuple[float, float]:
    """How many times longer steps took on fresh batches than on repeated ones, or than on timed ones, the larger of
    both, in two thirds of the turns; and on timed ones than on repeated ones, or the other way round, in a third."""
    timed, fresh, repeated = ([seconds[kind] for seconds in turns] for kind in Batches)
    ratios: list[list[float]] = [sorted(map(truediv, fresh, known)) for known in (timed, repeated)]
    scatter = sorted(max(one / other, other / one) for one, other in zip(timed, repeated, strict=True))
    return max(ratio[len(turns) // 3] for ratio in ratios), scatter[2 * len(turns) // 3]


def _order(turn: int) -> Sequence[Batches]:
    """Of one turn's blocks. On a busy machine that lets others run after as much time as a turn takes, the same one of
    three would always wait for them."""
    timed, fresh, repeated = Batches
    return (timed, fresh, repeated) if turn % 2 == 0 else (fresh, repeated, timed)
