"""ARM: a program in a worker, from its construction to a restored state from which any step can be taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from optexp.equivalence import input_families, process_state, randomness
from optexp.equivalence.autocast import autocast
from optexp.equivalence.dropout import NoDropout, silence
from optexp.equivalence.observation import carried
from optexp.equivalence.perturbation import turn_parameters, vary
from optexp.equivalence.step_digest import Digest, left_behind
from optexp.equivalence.tensor_math import finite
from optexp.equivalence.trajectory import Rates
from optexp.errors import ConfigError, NoReference, Unsupported
from optexp.export.repro import Script
from optexp.measurement import clock, placement
from optexp.program import Batch, Feed, Outputs, Snapshot, gradients, keeping, map_batch, tensors_of
from optexp.program.offered import Offered, Place
from optexp.python_state import likeness
from optexp.python_state.model_state import same
from optexp.strategy import Composed, Notes, captures, compose
from optexp.support import sparse
from optexp.support.memory_plan import LEAST, PLANS, Sizes, capacity, choose, give_back
from optexp.user_code.aliasing import holdings, matched
from optexp.workers.messages import Identity, SetUp, WorkloadInfo
from optexp.workers.peer import Peer
from optexp.workers.spec import Spec
from optexp.workload import Workload

MOST_OVERFLOWS = 40  # steps in which a loss scale may fall
HEADROOM = 4.0  # by how much, where no optimizer ever lets it fall again: other batches have larger gradients


class Holder(Peer):
    """One program on one device, the state that its steps start from, and the batches that they are timed on."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Batch] = []  # that are timed; none while an arm rests, and others need the memory
        self.fresh: list[Batch] = []  # delivered by the reference
        self.plan, self.family, self.largest_result = 0, input_families.NORMAL, 0
        self.brought: Batch | None = None
        self.unlike: set[str] = set()  # results that may be computed when they are read
        self.firstly: Digest = {}
        self.offered: Offered | None = None
        self.laid_out: list[Batch] = []  # the batches that are offered

    def setup(self, packed: bytes) -> SetUp:
        """Build the program, fold the stack over it, run it for the first time."""
        return self.hold(cloudpickle.loads(packed))

    def hold(self, spec: Spec) -> SetUp:
        """The same of a specification that is here already."""
        start, before = clock.now(), process_state.settings()
        self._settle(spec)
        with self.quiet():
            told = self._setup(spec, start)
        self.settings_then = before, process_state.settings()
        return told

    def _setup(self, spec: Spec, start: float) -> SetUp:
        program = spec.workload.build(self.device, spec.torch_dtype, spec.seed)
        varied = vary(program.model, spec.seed) if spec.generic else []
        if not spec.dropout:
            silence(program.model)
        if spec.autocast is not None:
            program = autocast(program, spec.autocast)
        program = keeping(program)
        self.initial = Snapshot(program)
        self.originals = process_state.originals()
        self.excused = set(process_state.tampered(program, self.originals))
        variety = spec.workload.variety
        state_bytes = sum(map(sparse.nbytes, self.initial.values.values()))
        batch_bytes = max(map(nbytes, self._draw(variety)))
        self.plan = choose(Sizes(batch_bytes, 0, state_bytes), capacity(self.device), spec.plan)
        self.batches = self._draw(self.distinct)
        self.begin(program.feed)
        placement.spare_threads()
        notes = {}
        program = replace(program, captured=captures(spec.strategies))
        for strategy in compose(spec.strategies):
            if reason := strategy.unsupported(program, self.device):
                raise Unsupported(f"{strategy.name}: {reason}")
            feed, aliases, held = program.feed, program.aliases, holdings(program)
            program, notes[strategy.name] = strategy.apply(program)
            program = matched(held, program, aliases, strategy.name, self.initial.values)
            if not spec.dropout:
                silence(program.model)  # which may be another one
            if program.feed is not feed:
                feed.pause()
                self.begin(program.feed)
        self.program, self.rates = keeping(program), Rates(program)
        self.initial.remember(self.program)
        self.restore()
        random, times = False, list[tuple[float, float]]()
        while len(times) < variety:
            began = clock.now()
            batch, before = self.program.feed.next(), randomness.state(self.device)
            given = clock.now()
            outputs = self.program.step(self.program, batch)
            random |= randomness.drawn(before, self.device)
            self.unlike |= set(process_state.unlike(outputs, self.program))
            clock.synchronize(self.device)
            times.append((clock.now() - began, clock.now() - given))
            if len(times) == 1:
                start += self._look_at_the_first(outputs)
        setup_s = clock.now() - start
        carries = bool(carried(self.program.state(), self.initial.values))
        self.program.feed.pause()
        placement.settle()
        self._settle_scale()
        if not outputs and not self.program.trains:
            raise NoReference("the model returns no tensor: return one, or several in a tuple, a dict or a dataclass")
        for name, tensor in outputs.items():
            if tensor.layout is not torch.strided:
                raise NoReference(
                    f"{name} is a {tensor.layout} tensor, of which no element can be compared: return a dense one"
                )
        sizes = list(map(nbytes, self.batches))
        result_bytes = sum(tensor.numel() for tensor in outputs.values()) * spec.torch_dtype.itemsize
        self.largest_result = max((tensor.nbytes for tensor in outputs.values()), default=0)
        del batch, outputs
        self.plan = choose(Sizes(max(sizes), result_bytes, state_bytes), capacity(self.device), self.plan)
        told = SetUp(
            setup_s=setup_s,
            notes=notes,
            random=random,
            batch_bytes=sum(sizes) / len(sizes),
            queue=self.program.feed.queue,
            turn=self.distinct,
            varied=varied,
            carries=carries,
            keeps=self._moving(),
            plan=self.plan,
            step_s=min(whole for whole, _ in times),
            compute_s=min(alone for _, alone in times),
            workload=workload_info(spec.workload, self.initial.values),
        )
        if self.in_turns:
            self.rest()
        return told

    def _look_at_the_first(self, outputs: Outputs) -> float:
        """What the first step after building left; how long it took to see that, in seconds."""
        clock.synchronize(self.device)
        start = clock.now()
        self.firstly = left_behind(self.program, outputs, self.initial.values)
        return clock.now() - start

    def _moving(self) -> list[str]:
        """Names of what the model keeps in Python and changes in a step, and again in the next one. What becomes
        another thing each time, as a time does, is left out from now on."""
        keeps = self.program.keeps
        assert keeps is not None
        if not keeps.changes(self.initial.kept, keeps.read()):
            return []
        runs = []
        for _ in range(2):
            self.restore()
            self.run()
            before = keeps.read()
            self.run()
            runs.append(keeps.changes(before, keeps.read()))
        self.restore()
        self.program.feed.pause()
        keeps.forgetful = self._forgetful()
        one, other = runs
        both = one.keys() & other.keys()
        keeps.unsteady = {*one, *other} - {name for name in both if likeness.alike(one[name].pair, other[name].pair)}
        return sorted(name for name in both - keeps.unsteady - keeps.forgetful if one[name].state)

    def _forgetful(self) -> set[str]:
        """Names of what a step leaves as it does whatever the one before has left there: nobody goes on from it."""
        keeps, ends = self.program.keeps, []
        assert keeps is not None
        for earlier in (True, False):
            self.restore()
            if earlier:
                self.program.run()
                self.program.put(self.initial.values)  # all but what Python keeps
                torch.manual_seed(self.seed)
            else:
                self.program.feed.next()
            self.program.run()
            ends.append(keeps.changes(keeps.first, keeps.read()))
        self.restore()
        self.program.feed.pause()
        after, alone = ends
        return {name for name in after.keys() & alone.keys() if same(after[name].after, alone[name].after)}

    @property
    def in_turns(self) -> bool:
        return PLANS[self.plan].in_turns

    @property
    def distinct(self) -> int:
        """How many batches are timed. At least two of each kind, where there are several: a block that ends on the
        batch it began after tells little (see `_keep`)."""
        variety = self.workload.variety
        return max(2 if variety > 1 else 1, -(-PLANS[self.plan].batches // variety)) * variety

    def _draw(self, count: int) -> list[Batch]:
        return draw(self.workload, self.device, getattr(torch, self.dtype), self.draws, count)

    @property
    def reuses_input_memory(self) -> bool:
        """Whether a batch that is delivered is copied to where the one before was, although this arm rested meanwhile:
        what remembers results by addresses shows there."""
        return self.family == input_families.ONE_BY_ONE and self.in_turns and self.plan < LEAST

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

    def _settle_scale(self) -> None:
        """Let the loss scale fall until no step overflows; it starts from there. A check would find skipped steps, or
        gradients that are not finite where no optimizer lets it fall."""
        scaler = self.program.scaler
        if scaler is None:
            return
        clean, learns = 0, self.program.optimizer is not None
        for _ in range(MOST_OVERFLOWS):
            before = scaler.get_scale()
            self.run()
            if not learns and len(finite(found := gradients(self.program))) < len(found):
                scaler.update(before / HEADROOM)
            clean = clean + 1 if scaler.get_scale() >= before else 0
            if clean == len(self.batches):
                break
        self.initial.values["scaler/scale"] = self.program.state()["scaler/scale"].clone()
        self.restore()
        self.program.feed.pause()

    def _settle(self, spec: Spec) -> None:
        self.settle(spec.torch_device, spec.cores, spec.folders)
        self.seed, self.draws = spec.seed, spec.seed if spec.draws is None else spec.draws
        self.part = Identity(spec.name, Composed(spec.strategies).labels)
        self.dropout, self.workload, self.dtype = spec.dropout, spec.workload, spec.dtype

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
        if not (self.batches or (fresh and self.in_turns)):
            self.batches = self._draw(self.distinct)
        torch.manual_seed(self.draws)
        self.begin(self.program.feed, first)

    def identity(self) -> Identity:
        """The part that this arm has in the comparison, and the strategies that it was built of."""
        return self.part

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
        batch = (self.batches or self._draw(1))[0]
        script = Script(self.workload, self.program, batch, self.dtype, self.seed, stack, notes)
        return script.files()

    def quiet(self) -> AbstractContextManager[Any]:
        """Around whatever calls the program, where dropout is to drop nothing."""
        return nullcontext() if self.dropout else NoDropout()


def draw(workload: Workload, device: torch.device, dtype: torch.dtype, seed: int, count: int) -> list[Batch]:
    """The same batches in every arm that asks with the same seed."""
    generator = torch.Generator(device).manual_seed(seed)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    drawn = workload.batches(generator, count)
    if odd := [type(batch).__name__ for batch in drawn if not isinstance(batch, (tuple, Mapping))]:
        raise ConfigError(f"{workload.name}: a batch is a tuple of tensors, or a dict of them by name, and no {odd[0]}")
    return [map_batch(cast, batch) for batch in drawn]


def nbytes(batch: Batch) -> int:
    """Of all its tensors."""
    return sum(map(sparse.nbytes, tensors_of(batch).values()))


def workload_info(workload: Workload, state: Mapping[str, Tensor]) -> WorkloadInfo:
    """Properties that only a process which has built the workload knows."""
    real = {name: t for name, t in state.items() if name.startswith(("param/", "buffer/")) and t.is_floating_point()}
    built = {name: repr(tensor.sum(dtype=torch.float64).item()) for name, tensor in real.items()}
    return WorkloadInfo(workload.samples, list(workload.notes()), built)
