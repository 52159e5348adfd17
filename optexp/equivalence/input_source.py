"""Batches that all arms are verified on, drawn from a workload, and which of their inputs vary between draws."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from optexp.equivalence import input_families
from optexp.equivalence.asserting import Asserting
from optexp.equivalence.drawn_set import DrawnSet
from optexp.equivalence.dropout import NoDropout
from optexp.equivalence.tensor_math import alike
from optexp.errors import NoReference
from optexp.program import Batch, Program, map_batch, tensors_of
from optexp.support.float64 import InFloat64, widened
from optexp.support.sparse import parts
from optexp.support.stopwatch import Stopwatch
from optexp.workload import Workload

TRIED_S = 8.0  # seconds of steps on the host: when so many have passed there are no more


class InputSource:
    """Sets of inputs of one workload.

    device:  where batches are drawn
    dtype:   of real inputs
    targets: number of a batch's trailing tensors for the loss alone
    own_step: the step is the user's, and takes the whole batch
    anew:    the last seed gives other batches than the seed before
    varied:  names of inputs that have held several values so far
    asserts: whether a step may fail on other values; steps of small batches are not looked at
    """

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        targets: int,
        own_step: bool = False,
    ) -> None:
        self.workload, self.device, self.dtype, self.seed, self.targets = workload, device, dtype, seed, targets
        self.own_step = own_step
        self.anew = True
        self.varied: set[str] = set()
        self.asserts = Asserting()
        self._met: dict[str, Tensor] = {}  # some elements of the first batch of the seed before
        self._named = False  # a batch is tensors by name
        self._on_host: Program | None = None  # for steps that may end a process that uses the card
        self._watch = Stopwatch()

    def draw(self, seed: int, count: int, family: str) -> DrawnSet:
        """Draw `count` batches of a family; ONE_BY_ONE draws two, and exchanges their inputs one by one.

        NORMAL ends with a batch as small as an epoch's last, where that is smaller: a program may be right at the usual
        size alone.

        Raises NoReference where the family changes no input, or the model does not take its values.
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        if family == input_families.ONE_BY_ONE:
            first, *_, second = self.workload.batches(generator, self.workload.variety + 1)  # of the same kind
            drawn = input_families.exchanged(first, second)
        else:
            usual = self.workload.batches(generator, count)
            targets = 0 if self.own_step and family in input_families.WITH_TARGETS else self.targets
            drawn = [input_families.of(family, batch, targets, self.workload.bounded) for batch in usual]
            if family in input_families.FAMILIES and drawn[0] is usual[0]:
                raise NoReference("no input takes such values")
            if family in input_families.FAMILIES and self.device.type == "cuda" and self.asserts.may:
                self._try_on_host(drawn[0])
        batches = [self.workload.in_dtype(batch, self.dtype) for batch in drawn]
        self._named = isinstance(batches[0], Mapping)
        if family in (input_families.NORMAL, input_families.ONE_BY_ONE):
            self._note_varied(batches)
        smaller = self.workload.remainder(generator) if family == input_families.NORMAL else None
        batches += [] if smaller is None else [self.workload.in_dtype(smaller, self.dtype)]
        return DrawnSet(batches, family, smaller is not None)

    def recall(self, observation: Mapping[str, Tensor]) -> DrawnSet:
        """The batch of a timed step, from the baseline's replay."""
        given = {n.removeprefix("batch/"): t for n, t in observation.items() if n.startswith("batch/")}
        batch: Batch = given if self._named else tuple(given.values())
        return DrawnSet([map_batch(lambda t: t.to(self.device, copy=True), batch)])

    def constant(self, drawn: DrawnSet) -> list[str]:
        """Names of inputs that had the same values in every draw so far."""
        return [name for name in tensors_of(drawn.batches[0]) if name not in self.varied]

    def _try_on_host(self, batch: Batch) -> None:
        """Raise on the host first: an assertion of a kernel, as of a cross entropy of what lies beyond 0 and 1, ends a
        process that uses the card."""
        if self._watch.seconds.get("host", 0.0) > TRIED_S:
            return
        host = torch.device("cpu")
        try:
            with self._watch.phase("host"), InFloat64(self.dtype), NoDropout():
                self._on_host = self._on_host or self.workload.anew().build(host, torch.float64, self.seed)
                self._on_host.step(self._on_host, map_batch(lambda t: widened(t, host), batch))
        except NoReference:  # of a step that ends no process: as of one that leaves its update out
            return
        except (RuntimeError, ValueError, IndexError) as problem:
            text = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            raise NoReference(f"the model does not take such values: {text}") from problem

    def _note_varied(self, batches: list[Batch]) -> None:
        """Compare a draw with the one before, and its batches with each other."""
        before, self._met = self._met, _some(batches[0])
        self.anew = not same_bits(before, self._met)
        first, *others = [tensors_of(batch) for batch in batches]
        self.varied |= before.keys() - alike(before, self._met) if before else set()
        self.varied |= {name for other in others for name in first.keys() - alike(first, other)}


def same_bits(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Whether every entry has the same bits."""
    return ours.keys() == theirs.keys() == alike(ours, theirs)


def _some(batch: Batch) -> dict[str, Tensor]:
    """Up to 4096 elements of each tensor, far apart: a batch may be large, and two are told apart by few."""
    every = (parts(tensor, name) for name, tensor in tensors_of(batch).items())
    flat = {name: part.detach().reshape(-1) for each in every for name, part in each.items()}
    return {name: tensor[:: -(-len(tensor) // 4096) or 1].cpu() for name, tensor in flat.items()}
