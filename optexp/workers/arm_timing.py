"""ARM: blocks of steps under the clock, and steps that show what a feed or a program does outside of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import log
from random import Random

import torch
from torch import Tensor

from optexp.equivalence import process_state
from optexp.equivalence.checksums import LARGE, checksum
from optexp.equivalence.missed import LOOKS, End
from optexp.equivalence.step_digest import Digest, left_behind
from optexp.measurement import clock, openmp, persisting
from optexp.program import Batch, Outputs, Program, tensors_of
from optexp.support import sparse
from optexp.support.card_memory import l2_bytes
from optexp.support.pausing import pauses
from optexp.support.reading import read
from optexp.support.wrapped import parts
from optexp.workers.arm_setup import Built
from optexp.workers.messages import WarmUp
from optexp.workers.transfer import bytes_of

COPIED = 2**20  # bytes: a smaller tensor of a card is copied to the host for its digest
SIZES_MET = 16  # batches of a loader whose sizes are looked at
NOVEL = 5  # sets of batches that an arm has not met; two where they take longer than
NOVEL_S = 4.0
COLD_STEPS = 99  # of a block with emptied caches, which take longer to empty than most steps; no multiple of batches


@dataclass(frozen=True)
class Kept:
    """The end of one timed block, and a digest of every tensor after its last step."""

    end: End
    left: Digest


class Timing(Built):
    """Timed blocks, and digests of the state after some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.random = 0, Random()  # not seeded, so that the kept blocks cannot be predicted
        self.kept: dict[int, Kept] = {}
        self.outputs: Outputs = {}  # of the last step of the first kept block
        self.given: Batch = ()  # to the last step of a block
        self.ahead = self.misgiven = 0

    def one_step(self) -> tuple[float, float]:
        """Seconds of a step, and of the same without its feed, when other arms have been set up."""
        self.restore()
        began = clock.now()
        batch = self.program.feed.next()
        given = clock.now()
        self.program.step(self.program, batch)
        clock.synchronize(self.device)
        end = clock.now()
        self.program.feed.pause()
        return end - began, end - given

    def turn_s(self, rounds: int) -> list[float]:
        """Seconds of each step of one turn of the batches, each waited for; the shortest of `rounds` turns after one
        that is not timed."""
        self.restore()
        run, count = self.runner(), len(self.batches)
        turns = [[clock.time_block(run, 1, self.device).wall_s for _ in range(count)] for _ in range(1 + rounds)]
        self.program.feed.pause()
        return [min(seconds) for seconds in zip(*turns[1:], strict=True)]

    def warm_up(self, limit_s: float) -> WarmUp:
        """Run until steady, for at most `limit_s` seconds."""
        self.restore()
        alone = clock.warm_up(self.runner(), self.device, limit_s)
        self.program.feed.pause()
        timer_s, queue = clock.empty_timer_s(self.device), self.program.feed.queue
        return WarmUp(list(alone), timer_s, queue, constant(self.batches))

    def period(self, limit_s: float) -> int:
        """After how many steps batches come again; 1 where a loader's are of one size, else 0: unknown, also where
        it takes longer than `limit_s` to tell."""
        feed = self.program.feed
        self.restore()
        if feed.period is not None:
            return feed.period
        end, sizes = clock.now() + limit_s, set[object]()
        for _ in range(SIZES_MET):
            sizes.add(tuple((name, tensor.shape) for name, tensor in tensors_of(feed.next()).items()))
            if len(sizes) > 1 or clock.now() > end:
                sizes.add(None)
                break
        feed.pause()
        return int(len(sizes) == 1)

    def has_loader(self) -> bool:
        """Whether a DataLoader makes the batches: the core's own are of one size, or take turns by kind."""
        feed = self.program.feed
        while hasattr(feed, "feed"):
            feed = feed.feed
        return hasattr(feed, "loader")

    def block(
        self, steps: int, lead_in: int, cold: bool = False, anywhere: bool = False, first: int = 0
    ) -> clock.Timing:
        """Time `steps` steps from the restored state, after `lead_in` unmeasured ones.

        cold:      each step finds the L2 cache filled with something else
        anywhere:  it may end at any step, and may be kept
        first:     the batch that the cycle begins with
        """
        self.restore(first)
        first %= len(self.batches)
        run, last = self.runner(), self.runner(keep=True)
        for _ in range(lead_in):
            run()
        count, paused = steps_of_scale(self.program), pauses()
        steps = min(steps, COLD_STEPS) if cold else steps
        keep = partial(self._keep, End(lead_in + steps, first), anywhere)
        if cold:
            timing = clock.time_cold_block(run, steps, self.device, self.flush, keep, last)
        else:
            timing = clock.time_block(run, steps, self.device, keep, last)
        self._taken_ahead()
        self.given = ()
        self.program.feed.pause()
        clock.synchronize(self.device)  # what it left there would run while another arm is timed
        done = steps_of_scale(self.program)
        skipped = count is not None and done is not None and abs(done - count - timing.steps) > 0.5
        return replace(timing, skipped=skipped, paused=pauses() - paused)

    def _keep(self, end: End, anywhere: bool, outputs: Outputs) -> None:
        """Keep a digest of every tensor after a block, for some blocks picked at random that could end anywhere."""
        self.unlike |= set(process_state.unlike(outputs, self.program))
        place = 0
        if anywhere:
            self.blocks += 1
            place = self.blocks - 1 if self.blocks <= LOOKS else self.random.randrange(self.blocks)
            self.misgiven += not self._given_as_offered(self.given)
        elif self.kept:
            return
        if place < LOOKS:
            self.kept[place] = Kept(end, left_behind(self.program, outputs, self.initial.values))
        if place == 0:
            self.outputs = {name: read(tensor).clone() for name, tensor in outputs.items()}

    def _given_as_offered(self, given: Batch) -> bool:
        """Whether a step was given the batch that was its turn; True of a feed that takes none of the core's."""
        assert self.offered is not None, "setup comes first"
        return self.offered.ahead < 0 or same_values(tensors_of(given), tensors_of(self.offered.current))

    def _taken_ahead(self) -> None:
        """Remember how many batches a feed took before their steps, beyond those that it declares."""
        assert self.offered is not None, "setup comes first"
        self.ahead = max(self.ahead, self.offered.ahead - self.program.feed.queue)

    def taken_ahead(self) -> int:
        """The most batches, beyond those that it declares, that the feed took before the steps that they are for."""
        return self.ahead

    def queue(self) -> int:
        return self.program.feed.queue

    def wrongly_given(self) -> int:
        """How many blocks ended on a step that was not given the batch whose turn it was."""
        return self.misgiven

    def delivered(self) -> tuple[bool | None, list[int]]:
        """Whether the feed gives each of the core's batches in its turn, for two rounds (None: it takes none of them,
        as a loader makes its own); and for each batch, which one had the same values first."""
        self.restore()
        assert self.offered is not None
        digests, right, rounds = list[bytes](), True, 1
        while len(digests) < rounds * len(self.batches):
            self.offered.due += 1
            batch = self.program.feed.next()
            right = right and self._given_as_offered(batch)
            digests.append(digest_of(batch))
            rounds = 2 if self.offered.ahead >= 0 else 1
        self.program.feed.pause()
        return (right if rounds == 2 else None), [digests.index(digest) for digest in digests]

    def restart_s(self) -> float:
        """Seconds for each batch that the feed takes to begin again, which no block times."""
        seconds = []
        for _ in turns():
            self.restore()
            clock.synchronize(self.device)
            start = clock.now()
            self.begin(self.program.feed)
            clock.synchronize(self.device)
            seconds.append(clock.now() - start)
        self.program.feed.pause()
        return min(seconds) / len(self.batches)

    def moved(self) -> tuple[int, int]:
        """Bytes of a step's inputs, outputs and parameters, each counted once, and those that the L2 cache holds."""
        self.restore()
        batch = self.program.feed.next()
        outputs = self.program.step(self.program, batch)
        given = (*tensors_of(batch).values(), *outputs.values(), *self.program.model.parameters())
        tensors = [part for t in given for part in parts(t).values() if not part._is_zerotensor()]
        sizes = {t.untyped_storage().data_ptr(): min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors}
        on_gpu = self.device.type == "cuda"
        return sum(sizes.values()), l2_bytes(self.device) if on_gpu else 0

    def work(self, steps: int) -> float:
        """Steps while the parent reads the card; seconds that each of them took, about."""
        self.restore()
        clock.synchronize(self.device)
        begin, run = clock.now(), self.runner()
        for _ in range(steps):
            run()
        clock.synchronize(self.device)
        seconds = clock.now() - begin
        self.program.feed.pause()
        return seconds / steps

    @cached_property
    def flush(self) -> Callable[[], object]:
        """Writes twice the L2 cache: nothing that a step reads is left in it, nor in a part that was set aside."""
        size = 2 * l2_bytes(self.device)
        write = torch.empty(size, dtype=torch.uint8, device=self.device).zero_

        def flush() -> None:
            persisting.give_up()
            write()

        return flush

    def dismiss(self) -> None:
        """Let go of threads that only look out for work: one that runs now works."""
        openmp.dismiss()


def constant(batches: Sequence[Batch]) -> list[str]:
    """Names of real inputs that hold one value: a device computes with such data faster than with any other."""

    def one_value(tensor: Tensor) -> bool:
        low, high = tensor.aminmax()
        return bool(low == high)

    every = [tensors_of(batch) for batch in batches]
    dense = {name: first for name, first in every[0].items() if not sparse.is_sparse(first)}
    real = [name for name, first in dense.items() if first.is_floating_point() and first.numel() > 1]
    return [name for name in real if all(one_value(tensors[name]) for tensors in every)]


def steps_of_scale(program: Program) -> float | None:
    """How many clean steps a loss scale tells of: those since it was changed last, and those it takes to grow."""
    if program.scaler is None or program.optimizer is None:
        return None
    grown = log(program.scaler.get_scale(), program.scaler.get_growth_factor())
    return grown * program.scaler.get_growth_interval() + program.scaler._get_growth_tracker()


def turns() -> Iterator[int]:
    """`NOVEL` of them; where they take long, two."""
    end = clock.now() + NOVEL_S
    for turn in range(NOVEL):
        if turn < 2 or clock.now() < end:
            yield turn


def same_values(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """The same values, wherever they lie."""
    return a.keys() == b.keys() and all(sparse.equal(a[name], b[name].to(a[name].device, a[name].dtype)) for name in a)


def digest_of(batch: Batch) -> bytes:
    """Of a batch's values. Large tensors are added up where they lie: to copy and hash a GiB takes seconds.

    A card adds up at the rate of its memory, and a host slower than it hashes.
    """
    found = hashlib.blake2b(digest_size=16)
    for whole, tensor in tensors_of(batch).items():
        for name, part in sparse.parts(tensor, whole).items():
            found.update(name.encode())
            large = part.nbytes > (LARGE if part.device.type == "cpu" else COPIED)
            found.update(checksum(part).to_bytes(8, "little") if large else bytes_of(part).cpu().numpy().data)
    return found.digest()
