"""The worker process: holds one program and answers the runner's messages. `python -m optexp.arm` launches them."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import log
from operator import truediv
from pathlib import Path
from random import Random
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from optexp import sparse
from optexp.aliasing import holdings, matched
from optexp.equivalence import bits, dice, families, state, trajectory
from optexp.equivalence.autocast import autocast
from optexp.equivalence.dropout import NoDropout, silence
from optexp.equivalence.gates import finite
from optexp.equivalence.generic import turn_parameters, vary
from optexp.equivalence.imprint import Imprint, imprint, left_behind
from optexp.equivalence.missed import LOOKS, End
from optexp.equivalence.noise import disturbed
from optexp.equivalence.observation import Observation, carried, observed, overwritten, repeats
from optexp.equivalence.parting import Passed, watched
from optexp.equivalence.poison import stain
from optexp.equivalence.trajectory import RATES, Rates
from optexp.errors import ConfigError, NoReference, Unsupported
from optexp.insight.trace import record
from optexp.kernelkit.toolchain import counted
from optexp.measurement import clock, openmp, persisting, placement
from optexp.memory_plan import LEAST, PLANS, Sizes, capacity, choose, give_back
from optexp.offered import Offered, Place
from optexp.program import Batch, Feed, Outputs, Program, Snapshot, gradients, keeping, map_batch, tensors_of
from optexp.reading import read
from optexp.strategy import Composed, Notes, captures, compose
from optexp.takehome.repro import Script
from optexp.usermodel import likeness
from optexp.usermodel.modelstate import same
from optexp.workers.messages import Facts, Identity, Look, PeakMemory, SetUp, WarmUp
from optexp.workers.parcel import Parcel, bytes_of
from optexp.workers.peer import Peer
from optexp.workers.spec import Spec
from optexp.workload import Workload

STAINED = 2  # blocks of a result's size: an intermediate may take the first
SIZES_MET = 16  # batches of a loader whose sizes are looked at
MOST_OVERFLOWS = 40  # steps in which a loss scale may fall
HEADROOM = 4.0  # by how much, where no optimizer ever lets it fall again: other batches have larger gradients
NOVEL = 5  # sets of batches that an arm has not met; two where they take longer than
NOVEL_S = 4.0
FEW_REPEATS, REPEATS_S = 32, 20.0
SOME = 3  # steps that are repeated to see whether they can be
OWN, ONCE, AGAIN = range(3)  # kinds of blocks: of the batches that are timed, of others the first time, the second
COLD_STEPS = 99  # of a block with emptied caches, which take longer to empty than most steps; no multiple of batches


@dataclass(frozen=True)
class Kept:
    """The end of one timed block, and a digest of every tensor after its last step."""

    end: End
    left: Imprint


class Arm(Peer):
    """One program on one device. Every public method is a message."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Batch] = []  # that are timed; none while an arm rests, and others need the memory
        self.fresh: list[Batch] = []
        self.plan, self.family, self.largest_result = 0, families.NORMAL, 0
        self.brought: Batch | None = None
        self.blocks, self.dice = 0, Random()  # not seeded: nobody can tell which blocks are kept
        self.kept: dict[int, Kept] = {}
        self.outputs: Outputs = {}  # of the last step of the first that is kept
        self.unlike: set[str] = set()
        self.firstly: Imprint = {}
        self.offered: Offered | None = None
        self.laid_out: list[Batch] = []  # the batches that are offered
        self.given: Batch = ()  # to the last step of a block
        self.ahead = self.misgiven = 0
        self.drawn: dict[int, list[str]] = {}  # digests of batches that were met for the first time, by turn
        self.reassociated = 0

    def setup(self, packed: bytes) -> SetUp:
        """Build the program, fold the stack over it, run it for the first time."""
        return self.hold(cloudpickle.loads(packed))

    def hold(self, spec: Spec) -> SetUp:
        """The same of a specification that is here already."""
        start, before = clock.now(), state.settings()
        self._settle(spec)
        with self.quiet():
            told = self._setup(spec, start)
        self.settings_then = before, state.settings()
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
        self.originals = state.originals()
        self.excused = set(state.tampered(program, self.originals))
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
            batch, before = self.program.feed.next(), dice.state(self.device)
            given = clock.now()
            outputs = self.program.step(self.program, batch)
            random |= dice.drawn(before, self.device)
            self.unlike |= set(state.unlike(outputs, self.program))
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
            varied=varied,
            carries=carries,
            keeps=self._moving(),
            plan=self.plan,
            step_s=min(whole for whole, _ in times),
            compute_s=min(alone for _, alone in times),
            facts=facts(spec.workload, self.initial.values),
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

    def unkept(self) -> list[str]:
        """What the model keeps and nobody can put back, or has nothing to compare with, where equal steps differ."""
        keeps = self.program.keeps
        assert keeps is not None
        if self.repeated(End(SOME)) == self.repeated(End(SOME)):
            return []
        return [*sorted(keeps.unsteady), *keeps.strange()]

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
        return self.family == families.ONE_BY_ONE and self.in_turns and self.plan < LEAST

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

    # --- equivalence

    def load(self, index: int, family: str) -> None:
        """What was taken is one batch of a set that the reference arm has drawn; the feed brings copies of it."""
        if index == 0:
            self.fresh, self.family = [], family
            if not self.reuses_input_memory:
                self.brought = None
        self.fresh.append(self.inbox.contents)

    def bring(self, step: int) -> Batch:
        """A fresh batch, as the feed brings it: in new memory or, where inputs are exchanged, in the memory of the one
        before, as a caller would who reuses his buffers."""
        given = self.program.feed.bring(self.fresh[step % len(self.fresh)])
        if self.family == families.NONCONTIGUOUS:
            given = map_batch(families.with_gaps, given)
        if self.family == families.ONE_BY_ONE:
            self.brought = families.refilled(self.brought, given)
            return self.brought
        return given

    def observe(self, look: Look) -> Parcel:
        """One step on a fresh batch, and everything of it that can be compared.

        A reassociated run of code that looks at its dispatch modes fails; it then runs in its own order.
        """
        if look.restore:
            self.restore(fresh=True)
        self.rates.set(RATES[look.step % len(RATES)])
        if self.in_turns:
            stain(self.device, [self.largest_result] * STAINED)
        initial = None if look.restore else self.initial.values
        with self.quiet(), bits.deterministic() if look.repeating else nullcontext():
            try:
                seen = observed(self.program, self.bring(look.step), look.noise, look.forward, initial, look.order)
            except Exception:
                if look.order is None:
                    raise
                self.restore(fresh=True)
                seen = observed(self.program, self.bring(look.step), look.noise, look.forward, initial)
                seen["flag/reassociated"].zero_()
        self.reassociated = int(seen["flag/reassociated"])
        return self.send(seen)

    def reassociated_operators(self) -> int:
        """How many operators of the last step that was observed took another order."""
        return self.reassociated

    def passed(self) -> list[Passed]:
        """What every module returns in a first step on a fresh batch, in samples."""
        self.restore()
        with self.quiet(), watched(self.program.model) as passed:
            self.program.step(self.program, self.bring(0))
        return passed

    def first_step(self) -> Imprint:
        """What the first step left that this process ran."""
        return self.firstly

    def timed_ends(self) -> list[End]:
        """Of each block that was kept."""
        return [kept.end for _, kept in sorted(self.kept.items())]

    def timed(self, index: int) -> Imprint:
        """What one of those blocks left behind."""
        return self.kept[index].left

    def repeated(self, end: End, noise: int | None = None) -> Imprint:
        """The same of the same steps from the restored state, the last of them observed as `replay` does.

        noise: seed of a little of it in the parameters that the first step finds
        """
        self.restore(end.first)
        with disturbed(self.program.model, noise):
            return imprint(self._replayed(end.steps)[1])

    def replay(self, end: End, timed: bool) -> Parcel:
        """The last step before that end, from the restored state on, observed as `observe` does.

        Beside it batch/<name>: what it was given, flag/drawn: 1 where that is one of the core's own batches, and where
        it is asked for timed/<name>: the outputs of the first block that was kept, which these steps repeat.
        """
        self.restore(end.first)
        batch, seen = self._replayed(end.steps)
        given = tensors_of(batch)
        drawn = any(_same(given, tensors_of(own)) for own in self.batches)
        seen |= {"flag/drawn": torch.tensor(drawn, dtype=torch.uint8)}
        seen |= {f"batch/{name}": tensor for name, tensor in given.items()}
        seen |= {f"timed/{name}": tensor for name, tensor in self.outputs.items()} if timed else {}
        return self.send(seen)

    def _replayed(self, steps: int) -> tuple[Batch, Observation]:
        """The last step's batch, and what is seen of that step."""
        with self.quiet():
            run = self.runner()
            for _ in range(steps - 1):
                run()
            assert self.offered is not None
            self.offered.due += 1
            batch = map_batch(torch.clone, self.program.feed.next())
            seen = observed(self.program, map_batch(torch.clone, batch), initial=self.initial.values)
        self.program.feed.pause()
        return batch, seen

    def overwritten(self) -> list[str]:
        """Outputs that do not outlive the next step."""
        self.restore(fresh=True)
        with self.quiet():
            return overwritten(self.program, self.fresh[0], self.fresh[1])

    def losses(self, unit: float, seed: int) -> list[float]:
        """Of many steps, from a state that may be moved by one rounding."""
        self.restore(fresh=True)
        with self.quiet():
            return trajectory.losses(self.program, self.fresh, self.rates, unit, seed)

    def repeats(self, times: int) -> bool:
        """Whether the program gives the same bits every time."""
        self.restore(fresh=True)
        with self.quiet():
            return repeats(self.program, self.fresh[0], self.initial, times)

    def varying(self, times: int, step: int = 0, repeating: bool = False) -> list[str]:
        """Names of tensors whose bits differ between repeated steps on one fresh batch.

        times:     repetitions; fewer, though at least `FEW_REPEATS`, once `REPEATS_S` have passed
        repeating: under deterministic algorithms
        """
        self.restore(fresh=True)
        batch, found, end = self.fresh[step % len(self.fresh)], set[str](), clock.now() + REPEATS_S
        with self.quiet(), bits.deterministic() if repeating else nullcontext():
            for done in range(0, times, FEW_REPEATS):
                if done and clock.now() > end:
                    break
                found |= set(bits.varying(self.program, batch, self.initial, min(times - done, FEW_REPEATS)))
        return sorted(found)

    def throw(self, unit: float) -> dice.Throws:
        """One step with many seeds, where it draws random numbers."""
        return dice.throw(self.program, self.fresh[0], self.initial, unit)

    def settings(self) -> state.History:
        """Global settings of this process, before it was set up, after that, and now."""
        return state.History(*self.settings_then, state.settings())

    def configuration(self) -> dict[str, Any]:
        """Global settings as they are now, and the mode of the model."""
        return {**state.settings(), "model.training": self.program.model.training}

    def replaced(self) -> list[str]:
        """What this process measures time with or reads results by, and a strategy has replaced."""
        return clock.tampered() + sorted(set(state.tampered(self.program, self.originals)) - self.excused)

    def tampered(self) -> list[str]:
        """The same, and results that may be computed when they are read."""
        return [*self.replaced(), *sorted(self.unlike)]

    # --- measurement

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

    def warm_up(self, limit_s: float) -> WarmUp:
        """Run until steady, for at most `limit_s` seconds."""
        self.restore()
        alone = clock.warm_up(self.runner(), self.device, limit_s)
        self.program.feed.pause()
        timer_s, queue = clock.empty_timer_s(self.device), self.program.feed.queue
        return WarmUp(list(alone), timer_s, queue, constant(self.batches))

    def period(self, limit_s: float) -> int:
        """After how many steps batches come again; 1 where a loader's are of one size, else 0: nobody knows, nor where
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
        count = steps_of_scale(self.program)
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
        return replace(timing, skipped=skipped)

    def _keep(self, end: End, anywhere: bool, outputs: Outputs) -> None:
        """Keep a digest of every tensor after a block, for some blocks picked at random that could end anywhere."""
        self.unlike |= set(state.unlike(outputs, self.program))
        place = 0
        if anywhere:
            self.blocks += 1
            place = self.blocks - 1 if self.blocks <= LOOKS else self.dice.randrange(self.blocks)
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
        return self.offered.ahead < 0 or _same(tensors_of(given), tensors_of(self.offered.current))

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
            digests.append(_digest(batch))
            rounds = 2 if self.offered.ahead >= 0 else 1
        self.program.feed.pause()
        return (right if rounds == 2 else None), [digests.index(digest) for digest in digests]

    def novelty(self, seed: int) -> float | None:
        """How many times longer a step takes on batches that it meets for the first time than on the same ones again,
        or than on those that it is timed on: what it does at least in most turns, however busy the machine is.

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
        seconds: tuple[list[float], ...] = ([], [], [])
        count, queue = len(self.batches), self.program.feed.queue
        for turn in _turns():
            drawn = draw(self.workload, self.device, getattr(torch, self.dtype), seed + turn, count)
            self.drawn[turn] = [_digest(batch).hex() for batch in drawn] if turn < 2 else []
            fresh, own = Offered(drawn, self.offered.place), True
            self.restore(self.dice.randrange(count))
            run = self.runner()
            for _ in range(count + self.dice.randrange(3 * count)):
                run()
            for kind in _order(turn):
                if own is not (kind == OWN):
                    self.offered.exchange(fresh)
                    own = not own
                    if eager:
                        self.program.feed.reset(self.offered)
                    for _ in range(queue if kind == ONCE else count + queue):  # own ones: what was kept is there again
                        run()
                seconds[kind].append(clock.time_block(run, count, self.device).wall_s)
            if not own:
                self.offered.exchange(fresh)
        self.program.feed.pause()
        return _most(*seconds)

    def met(self) -> list[list[str]]:
        """Digests of the batches of the first turns of `novelty`: those of all arms are drawn from the same seeds."""
        return [self.drawn[turn] for turn in sorted(self.drawn)[:2]]

    def reordered(self, seed: int) -> float:
        """`novelty` where the batches are a loader's: another order makes others, of the same samples."""
        steps = max(len(self.batches), self.program.feed.queue)
        seconds: tuple[list[float], ...] = ([], [], [])
        for turn in _turns():
            for kind in _order(turn):
                self.restore()
                if kind != OWN:  # a loader's sampler draws from this one, on the CPU
                    torch.default_generator.manual_seed(seed + turn)
                run = self.runner()
                for _ in range(steps):  # until none is left that was made before the clock starts
                    run()
                seconds[kind].append(clock.time_block(run, steps, self.device).wall_s)
                self.program.feed.pause()
        return _most(*seconds)

    def restart_s(self) -> float:
        """Seconds for each batch that the feed takes to begin again: nobody times that."""
        seconds = []
        for _ in _turns():
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
        tensors = [part for tensor in given for part in sparse.parts(tensor).values()]
        sizes = {t.untyped_storage().data_ptr(): min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors}
        on_gpu = self.device.type == "cuda"
        return sum(sizes.values()), torch.cuda.get_device_properties(self.device).L2_cache_size if on_gpu else 0

    def work(self, steps: int) -> float:
        """Steps while somebody reads the card; seconds that each of them took, about."""
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
        size = 2 * torch.cuda.get_device_properties(self.device).L2_cache_size
        write = torch.empty(size, dtype=torch.uint8, device=self.device).zero_

        def flush() -> None:
            persisting.give_up()
            write()

        return flush

    def dismiss(self) -> None:
        """Let go of threads that only look out for work: one that runs now works."""
        openmp.dismiss()

    def counters(self) -> dict[str, float]:
        """What torch's compiler counted so far, and this process's cores."""
        return counted() | {"process/cores": float(len(os.sched_getaffinity(0)))}

    def peak_memory(self, steps: int) -> PeakMemory:
        """Peak memory over steady steps: of the device; on a CPU only tensors that live between them.

        What graphs hold counts whole (see `held_by_graphs`). What is here for the tool's sake, batches but one and the
        state to restore, does not. Empty where torch's allocator is switched off, and counts nothing.
        """
        self.fresh, self.brought = [], None
        self.inbox.clear()
        self.restore()
        one, *others = [list(tensors_of(batch).values()) for batch in self.batches]
        if self.device.type != "cuda":
            model, named = self.program.model, self.program.state()  # which leaves out what has no alias
            rest = [tensor for name, tensor in named.items() if not name.startswith(("param/", "buffer/"))]
            living = (*model.parameters(), *model.buffers(), *rest, *one)
            return PeakMemory(resident_mib=sum(map(sparse.nbytes, living)) / 2**20)
        kept = self.program.keeps.tensors if self.program.keeps is not None else []
        ours = [*(t for tensors in others for t in tensors), *self.initial.values.values(), *kept]
        overhead = sum(sparse.nbytes(t) for t in ours if t.device.type == "cuda")
        self.restore()
        clock.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run = self.runner()
        for _ in range(steps):
            run()
        clock.synchronize(self.device)
        if not torch.cuda.max_memory_allocated(self.device) and ours:
            return PeakMemory()
        pools = held_by_graphs(self.program.pool)
        return PeakMemory(
            peak_mib=(torch.cuda.max_memory_allocated(self.device) + pools - overhead) / 2**20,
            reserved_mib=torch.cuda.max_memory_reserved(self.device) / 2**20,
            pools_mib=pools / 2**20,
            pinned_mib=torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0) / 2**20,
        )

    # --- profile; leftover tracing slows what follows, so nothing is timed in this process afterwards

    def profile(self, path: str, steps: int) -> dict[str, float]:
        """Write a Chrome trace of steady steps; returns the counters at the end."""
        self.restore()
        run = self.runner()
        for _ in range(max(3, self.program.feed.queue)):
            run()
        record(run, steps, Path(path), self.device)
        return self.counters()

    def code(self, folder: str, ran: list[tuple[str, int]]) -> None:
        """Write down what the compiler made of our kernels that ran, by name and number of warps, if any did."""
        if "optexp.kernel" in sys.modules and self.device.type == "cuda":
            from optexp.kernelkit import assembly

            assembly.write(Path(folder), set(ran))

    def takes(self, packed: bytes) -> list[bool]:
        """Which of these strategies this program, as it is now, would not refuse."""
        return [not strategy.unsupported(self.program, self.device) for strategy in cloudpickle.loads(packed)]


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


def held_by_graphs(pool: Any) -> int:
    """Bytes of private pools that the allocator calls free, although graphs use them at every replay.

    pool:  the program's own, whose memory is counted like any other unless a graph was captured into it
    """
    if torch.cuda.get_allocator_backend() != "native":  # the driver's allocator keeps no list of its segments
        return 0
    plain = {(0, 0)} | ({tuple(pool.id)} if pool is not None and pool.use_count() == 1 else set())
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment.get("segment_pool_id", (0, 0))) not in plain
    )


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


def _most(own: Sequence[float], once: Sequence[float], again: Sequence[float]) -> float:
    """How many times longer steps took once than again, or than those known longest, in most turns at least."""
    ratios: list[list[float]] = [sorted(map(truediv, once, known)) for known in (own, again)]
    return max(ratio[len(once) // 3] for ratio in ratios)


def _turns() -> Iterator[int]:
    """`NOVEL` of them; where they take long, two."""
    end = clock.now() + NOVEL_S
    for turn in range(NOVEL):
        if turn < 2 or clock.now() < end:
            yield turn


def _order(turn: int) -> tuple[int, int, int]:
    """Of one turn's blocks. On a busy machine that lets others run after as much time as a turn takes, the same one of
    three would always wait for them."""
    return (OWN, ONCE, AGAIN) if turn % 2 == 0 else (ONCE, AGAIN, OWN)


def _same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """The same values, wherever they lie."""
    return a.keys() == b.keys() and all(sparse.equal(a[name], b[name].to(a[name].device, a[name].dtype)) for name in a)


def _digest(batch: Batch) -> bytes:
    """Of a batch's values."""
    found = hashlib.blake2b(digest_size=16)
    for whole, tensor in tensors_of(batch).items():
        for name, part in sparse.parts(tensor, whole).items():
            found.update(name.encode())
            found.update(bytes_of(part).cpu().numpy().data)
    return found.digest()


def facts(workload: Workload, state: Mapping[str, Tensor]) -> Facts:
    """Facts that only a process which has built the workload knows."""
    real = {name: t for name, t in state.items() if name.startswith(("param/", "buffer/")) and t.is_floating_point()}
    built = {name: repr(tensor.sum(dtype=torch.float64).item()) for name, tensor in real.items()}
    return Facts(workload.samples, list(workload.notes()), built)


if __name__ == "__main__":
    import torch._dynamo  # optimizers and the profiler import it: four seconds, here once instead of in every arm

    import optexp.reference  # noqa: F401  the other kind of arm
    from optexp.workers.processes import serve_launcher

    sys.path[:] = [entry or os.getcwd() for entry in sys.path]
    serve_launcher(int(sys.argv.pop()))
