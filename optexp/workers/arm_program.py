"""ARM: a program in a worker, and the restored state from which any step of it can be taken."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from optexp.equivalence import input_families
from optexp.equivalence.dropout import NoDropout
from optexp.equivalence.perturbation import turn_parameters
from optexp.equivalence.trajectory import Rates
from optexp.errors import ConfigError
from optexp.export.repro import Script
from optexp.program import Batch, Feed, Outputs, Program, Snapshot, tensors_of
from optexp.program.offered import Offered, Place
from optexp.records.patch import Patch
from optexp.strategy import Notes
from optexp.support import random_state, sparse
from optexp.support.memory_plan import LEAST, PLANS, give_back
from optexp.user_code import texts
from optexp.workers.messages import Identity, WorkloadInfo
from optexp.workers.peer import Peer
from optexp.workers.transfer import Tensors, Transfer
from optexp.workload import Workload


class Holder(Peer):
    """One program on one device, the state that its steps start from, and the batches that they are timed on.

    `optexp.workers.arm_setup.Built` fills it in.
    """

    program: Program
    initial: Snapshot
    rates: Rates
    workload: Workload
    part: Identity
    seed: int
    draws: int
    dropout: bool
    dtype: str

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Batch] = []  # that are timed; none while an arm rests, and others need the memory
        self.fresh: list[Batch] = []  # delivered by the reference
        self.plan, self.family = 0, input_families.NORMAL
        self.sharing = 1  # comparisons that share the device's memory
        self.brought: Batch | None = None
        self.offered: Offered | None = None
        self.laid_out: list[Batch] = []  # the batches that are offered

    @property
    def in_turns(self) -> bool:
        return PLANS[self.plan].in_turns

    @property
    def distinct(self) -> int:
        """How many batches are timed. At least two of each kind, where there are several: a block that ends on the
        batch it began after tells little (see `_keep`)."""
        variety = self.workload.variety
        return max(2 if variety > 1 else 1, -(-PLANS[self.plan].batches // variety)) * variety

    def drawn_batches(self, count: int) -> list[Batch]:
        """The first batches that every arm with the same seed is timed on."""
        return draw(self.workload, self.device, getattr(torch, self.dtype), self.draws, count)

    @property
    def reuses_input_memory(self) -> bool:
        """Whether a batch that is delivered is copied to where the one before was, although this arm rested meanwhile:
        what remembers results by addresses shows there."""
        return self.family == input_families.ONE_BY_ONE and self.in_turns and self.plan < LEAST

    def send(self, tensors: Tensors) -> Transfer:
        """Announce tensors to the reference, which needs the memory that a step's intermediate results took, as other
        comparisons do."""
        if self.in_turns or self.sharing > 1:
            give_back(self.device)
        return super().send(tensors)

    def rest(self, keep_fresh: bool = False) -> None:
        """Give back memory that another arm may need: cached blocks, what is sent, and batches, which are drawn or
        delivered again when they are needed.

        keep_fresh: the next message is about the fresh batches that are here
        """
        self.inbox.clear()
        if self.outbox is not None:
            self.outbox.empty()
        if not keep_fresh:
            self.fresh = []
        if not self.reuses_input_memory:
            self.brought = None
        self.batches = []
        self.begin(self.program.feed)
        give_back(self.device)

    def turn_parameters(self) -> None:
        """Steps begin with other values from now on, at the same place; again, and they are what they were."""
        turn_parameters(self.initial.values)
        self.restore()

    def restore(self, first: int = 0, fresh: bool = False) -> None:
        """Put everything a step changes back to where it began, in place; the cycle of batches begins with the
        `first`.

        fresh: steps on delivered batches follow, beside which the arm's own need not be held
        """
        self.initial.restore(self.program)
        self.rates.set(1.0)
        if self.offered is not None and self.offered.written:
            self.batches = []  # steps that write to their inputs begin with the same values again
        if not (self.batches or (fresh and self.in_turns)):
            self.batches = self.drawn_batches(self.distinct)
        random_state.seed(self.draws)
        self.begin(self.program.feed, first)

    def identity(self) -> Identity:
        """The part that this arm has in the comparison, its strategies, and the files that it has run."""
        return replace(self.part, texts=dict(texts.run))

    def imported_below(self, folder: str) -> list[str]:
        """Files below a folder that this process has imported, without installed packages and optexp itself."""
        return process_files(Path(folder))

    def begin(self, feed: Feed, first: int = 0) -> None:
        """Let a feed start again, on batches that lie where it wants them."""
        place = getattr(feed, "place", Place(self.device))
        if self.offered is None or self.offered.place != place or self.laid_out is not self.batches:
            self.offered, self.laid_out = Offered(self.batches, place), self.batches
        self.offered.begin(first)
        feed.reset(self.offered)

    def runner(self, keep: bool = False) -> Callable[[], Outputs]:
        """One step on the next batch of the feed, which the source of batches knows of.

        keep: What the step was given stays in `given`. (Of every step it would take memory.)
        """
        assert self.offered is not None, "setup comes first"
        program, source = self.program, self.offered
        step, take = program.step, program.feed.next

        def run() -> Outputs:
            source.due += 1
            return step(program, take())

        def run_and_keep() -> Outputs:
            source.due += 1
            self.given = take()
            return step(program, self.given)

        return run_and_keep if keep else run

    def run(self) -> Outputs:
        return self.runner()()

    def repro(self, packed: bytes, notes: Mapping[str, Notes]) -> dict[str, bytes]:
        """`repro.py`, and what must lie beside it, of this arm's plain program and the packed specification's stack."""
        stack = cloudpickle.loads(packed).strategies
        batch = (self.batches or self.drawn_batches(1))[0]
        script = Script(self.workload, self.program, batch, self.dtype, self.seed, stack, notes)
        return script.files()

    def patch(self, packed: bytes, notes: Mapping[str, Notes]) -> Patch | None:
        """The packed specification's stack as a patch of the user's file; None where the program comes from no file."""
        return self.workload.patch(self.program, cloudpickle.loads(packed).strategies, notes)

    def quiet(self) -> AbstractContextManager[Any]:
        """Around whatever calls the program, where dropout is to drop nothing."""
        return nullcontext() if self.dropout else NoDropout()


def process_files(folder: Path) -> list[str]:
    """Files of this process's modules below a folder; an environment may lie there, too."""
    modules = [module for name, module in sys.modules.copy().items() if name.partition(".")[0] != "optexp"]
    files = {Path(file) for module in modules if (file := getattr(module, "__file__", None))}
    installed = ("site-packages", "dist-packages")
    own = (file for file in files if file.is_relative_to(folder) and not file.is_relative_to(sys.prefix))
    return sorted(str(file) for file in own if not set(installed) & set(file.parts))


def draw(workload: Workload, device: torch.device, dtype: torch.dtype, seed: int, count: int) -> list[Batch]:
    """The same batches in every arm that asks with the same seed."""
    generator = torch.Generator(device).manual_seed(seed)
    drawn = workload.batches(generator, count)
    if odd := [type(batch).__name__ for batch in drawn if not isinstance(batch, (tuple, Mapping))]:
        raise ConfigError(f"{workload.name}: a batch is a tuple of tensors, or a dict of them by name, and no {odd[0]}")
    return [workload.in_dtype(batch, dtype) for batch in drawn]


def nbytes(batch: Batch) -> int:
    """Of all its tensors."""
    return sum(map(sparse.nbytes, tensors_of(batch).values()))


def workload_info(workload: Workload, state: Mapping[str, Tensor]) -> WorkloadInfo:
    """Properties that only a process which has built the workload knows."""
    real = {name: t for name, t in state.items() if name.startswith(("param/", "buffer/")) and t.is_floating_point()}
    built = {name: repr(tensor.sum(dtype=torch.float64).item()) for name, tensor in real.items()}
    return WorkloadInfo(workload.samples, list(workload.notes()), built, workload.kept_modes)
