"""ARM: steps that are observed for the reference, and looks into the process for what a program left there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from optexp.equivalence import bits, footprint, input_families, process_state, randomness, scatter, trajectory
from optexp.equivalence.asserting import IndicesAsBefore
from optexp.equivalence.footprint import Footprint
from optexp.equivalence.kept_copies import move_apart
from optexp.equivalence.late_counts import JUDGED, SEEN, Counts, Paces
from optexp.equivalence.missed import End
from optexp.equivalence.noise import disturbed
from optexp.equivalence.observation import Observation, observed, overwritten, repeats
from optexp.equivalence.parting import Passed, watched
from optexp.equivalence.perturbation import move_parameters
from optexp.equivalence.poison import stain
from optexp.equivalence.rule import calls
from optexp.equivalence.schedules import STEPS
from optexp.equivalence.step_digest import Digest, digest
from optexp.equivalence.trajectory import RATES
from optexp.measurement import clock
from optexp.program import Batch, is_training, map_batch, rate_of, tensors_of
from optexp.support import own_code, wrapped
from optexp.support.pausing import Used
from optexp.workers.arm_program import draw
from optexp.workers.arm_python_state import note_forgetful
from optexp.workers.arm_timing import Timing, same_values
from optexp.workers.messages import Look
from optexp.workers.transfer import Transfer

STAINED = 2  # blocks of a result's size: an intermediate may take the first
FEW_REPEATS, REPEATS_S = 32, 20.0
SOME = 3  # steps that are repeated to see whether they can be
RENEWED = 7919  # beside the seed of the batches that are timed: of those that take their memory
RATES_S = 4.0  # seconds on a core of steps whose learning rates are looked at


class Checks(Timing):
    """Observations of fresh steps and of repeated timed steps."""

    def __init__(self) -> None:
        super().__init__()
        self.reassociated = 0
        self.elements = scatter.Elements()

    def turn_parameters(self) -> None:
        super().turn_parameters()
        note_forgetful(self)

    def unkept(self) -> list[str]:
        """Python state of the model that cannot be put back, or has no counterpart, where equal steps differ."""
        keeps = self.program.keeps
        assert keeps is not None
        steady = self.repeated(End(SOME)) == self.repeated(End(SOME))
        if self.in_turns:
            self.rest()
        if steady:
            return []
        return [*sorted(keeps.unsteady), *keeps.strange()]

    def load(self, index: int, family: str) -> None:
        """The tensors taken are one batch of a set that the reference arm has drawn; the feed brings copies of it."""
        if index == 0:
            self.fresh, self.family = [], family
            if not self.reuses_input_memory:
                self.brought = None
        self.fresh.append(self.inbox.contents)

    def bring(self, step: int) -> Batch:
        """A fresh batch, as the feed brings it: in new memory or, where inputs are exchanged, in the memory of the one
        before, as a caller would who reuses his buffers."""
        given = self.program.feed.bring(self.fresh[step % len(self.fresh)])
        if self.family == input_families.NONCONTIGUOUS:
            given = map_batch(input_families.with_gaps, given)
        if self.family == input_families.ONE_BY_ONE:
            self.brought = input_families.refilled(self.brought, given)
            return self.brought
        return given

    def observe(self, look: Look) -> Transfer:
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
        """Samples of every module's result in a first step on a fresh batch."""
        self.restore()
        with self.quiet(), watched(self.program.model) as passed:
            self.program.step(self.program, self.bring(0))
        return passed

    def first_step(self) -> Digest:
        """Digest of the first step that this process ran."""
        return self.firstly

    def timed_ends(self) -> list[End]:
        """Of each block that was kept."""
        return [kept.end for _, kept in sorted(self.kept.items())]

    def timed(self, index: int) -> Digest:
        """Digest of the last step of one of those blocks."""
        return self.kept[index].left

    def repeated(self, end: End, noise: int | None = None) -> Digest:
        """The same of the same steps from the restored state, the last of them observed as `replay` does.

        noise: seed of a little of it in the parameters that the first step finds
        """
        self.restore(end.first)
        with disturbed(self.program.model, noise):
            return digest(self._replayed(end.steps)[1])

    def replay(
        self,
        end: End,
        timed: bool,
        renewed: bool = False,
        noise: int | None = None,
        late: int | None = None,
        moved: bool = False,
        forgets: bool = False,
        apart: bool = False,
    ) -> Transfer:
        """The last step before that end, from the restored state on, observed as `observe` does.

        Beside it batch/<name>: what it was given, flag/drawn: 1 where that is one of the core's own batches, and where
        it is asked for timed/<name>: the outputs of the first block that was kept, which these steps repeat.

        renewed: halfway the batches' memory gets other values, which shows results that are remembered by addresses
        noise: as `repeated` takes it
        late: counts move on to it after the first steps (see `optexp.equivalence.late_counts`)
        moved: parameters get other values in place halfway
        forgets: then what Python keeps becomes what it was at first
        apart: after the first step copies of parameters get other values (see `optexp.equivalence.kept_copies`)
        """
        self.restore(end.first)
        with disturbed(self.program.model, noise):
            replayed = self._renewed(end.steps) if renewed else self._replayed(end.steps, late, moved, forgets, apart)
            batch, seen = replayed
            seen |= {f"batch/{name}": tensor for name, tensor in tensors_of(batch).items()}
            seen |= {f"timed/{name}": tensor for name, tensor in self.outputs.items()} if timed else {}
            return self.send(seen)

    def kept_copies(self) -> list[str]:
        """Parameters of which the first step makes copies that are kept."""
        self.restore()
        with self.quiet():
            self.runner()()
            found = move_apart(self.program, self.initial.values)
        self.program.feed.pause()
        self.restore()
        return found

    def footprints(self, steps: int | None = None) -> list[Footprint]:
        """Tensors that each of the first steps changes, from the restored state on.

        steps: their number; None for as many as a second on a core allows, and as a schedule of so many steps takes
        """
        self.restore()
        assert self.offered is not None
        least, most = (steps, steps) if steps else (footprint.LEAST, footprint.MOST)
        limit, used = clock.on_core() + footprint.LIMIT_S, Used()
        found: list[Footprint] = []
        with self.quiet():
            while len(found) < most:
                late = clock.on_core() >= limit or used.seconds() >= footprint.LONGEST_S
                if late and len(found) >= least:
                    break
                self.offered.due += 1
                given = map_batch(torch.clone, self.program.feed.next())
                try:
                    found.append(Footprint.of(observed(self.program, given)))
                except Exception:
                    if steps or not found:
                        raise
                    break
        self.program.feed.pause()
        return found

    def paces(self, late: int, watched: bool) -> Paces | None:
        """How far a step moves counts; None where it does not work with counts that are so late.

        watched: indices beyond those of the first steps count as not working, as they may end a process with a card
        """
        self.restore()
        indices = IndicesAsBefore()
        with self.quiet(), indices if watched else nullcontext():
            run = self.runner()
            try:
                found: Paces | None = self._move_on(run, late)
                indices.later = True
                for _ in JUDGED:
                    run()
            except Exception:
                found = None
        self.program.feed.pause()
        self.restore()
        return found

    def _move_on(self, run: Callable[[], object], late: int) -> Paces:
        """The first steps, after which counts move on."""
        counts = Counts(self.program)
        for _ in range(SEEN):
            run()
            counts.look()
        return counts.move_on(late)

    def _replayed(
        self, steps: int, late: int | None = None, moved: bool = False, forgets: bool = False, apart: bool = False
    ) -> tuple[Batch, Observation]:
        """The last step's batch, and what is seen of that step."""
        with self.quiet():
            run = self.runner()
            if late is not None:
                self._move_on(run, late)
            before = steps - 1 - (0 if late is None else SEEN)
            for step in range(before):
                if moved and step == before // 2:
                    self._move(forgets)
                run()
                if apart and step == 0:
                    move_apart(self.program, self.initial.values)
            assert self.offered is not None
            self.offered.due += 1
            batch = map_batch(torch.clone, self.program.feed.next())
            drawn = self._drawn(batch)
            seen = observed(self.program, map_batch(torch.clone, batch), initial=self.initial.values)
        self.program.feed.pause()
        return batch, seen | drawn

    def _move(self, forgets: bool) -> None:
        """Other values for the parameters that learn."""
        learn = [(alias, parameter) for alias, parameter in self.program.parameters() if parameter.requires_grad]
        with torch.no_grad():  # their own views, which count changes
            views = [wrapped.parts(alias(parameter), alias.name) for alias, parameter in learn]
        move_parameters({name: part for found in views for name, part in found.items()})
        if forgets:
            self.initial.restore_attributes(self.program)

    def _drawn(self, batch: Batch) -> Observation:
        """Whether a batch is one of the core's own."""
        given = tensors_of(batch)
        drawn = any(same_values(given, tensors_of(own)) for own in self.batches)
        return {"flag/drawn": torch.tensor(drawn, dtype=torch.uint8)}

    def _renewed(self, steps: int) -> tuple[Batch, Observation]:
        """The same, where half of each real input gets other values after half of the steps; the last step is given its
        batch itself."""
        assert self.offered is not None
        with self.quiet():
            run = self.runner()
            for _ in range(steps // 2):
                run()
            dtype, count = getattr(torch, self.dtype), len(self.offered)
            others = draw(self.workload, self.device, dtype, self.draws + RENEWED, count)
            into = input_families.refilled if self.offered.written else input_families.half_refilled
            self.batches = self.offered.refill(others, into)
            del others  # memory of that size is needed for the step
            for _ in range(steps - steps // 2 - 1):
                run()
            self.offered.due += 1
            given = self.program.feed.next()
            batch = map_batch(torch.clone, given)
            drawn = self._drawn(batch)  # before the step, which may write to it
            seen = observed(self.program, given, initial=self.initial.values)
        self.program.feed.pause()
        self.batches = []  # the timed ones are drawn again
        return batch, seen | drawn

    def overwritten(self) -> list[str]:
        """Outputs that do not outlive the next few steps."""
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

    def rates_of_steps(self, steps: int | None = None) -> list[tuple[list[float], list[float]]]:
        """The learning rates that each of the first steps calls its optimizer with, where that is known, and those that
        it leaves, from the restored state on.

        steps: their number; None for as many as there is time for
        """
        self.restore()
        found, limit = list[tuple[list[float], list[float]]](), clock.on_core() + RATES_S
        with self.quiet():
            run = self.runner()
            while len(found) < (steps or STEPS) and (steps or clock.on_core() < limit):
                with calls(self.program) as called:
                    run()
                used, left = ([*map(rate_of, groups)] for groups in (called, self.rates.groups))
                found.append((used, left))
        self.program.feed.pause()
        return found

    def sets_rates(self) -> bool:
        """Whether steps set their learning rates themselves."""

        def used(factor: float) -> list[float]:
            self.restore()
            self.rates.set(factor)
            with self.quiet(), calls(self.program) as called:
                self.program.step(self.program, self.program.feed.next())
            return [*map(rate_of, (*called, *self.rates.groups))]

        found = trajectory.sets_rates(self.program, used)
        self.restore()
        return found

    def keep_rates(self) -> None:
        """Leave learning rates to the steps from now on."""
        self.rates.kept = True

    def varying(self, times: int, step: int = 0, repeating: bool = False) -> list[str]:
        """Names of tensors whose bits differ between repeated steps on one fresh batch.

        times:     repetitions; fewer, though at least `FEW_REPEATS`, once `REPEATS_S` have passed
        repeating: under deterministic algorithms
        """
        self.restore(fresh=True)
        batch, found, used = self.fresh[step % len(self.fresh)], set[str](), Used()
        with self.quiet(), bits.deterministic() if repeating else nullcontext():
            for done in range(0, times, FEW_REPEATS):
                if done and used.seconds() > REPEATS_S:
                    break
                found |= set(bits.varying(self.program, batch, self.initial, min(times - done, FEW_REPEATS)))
        return sorted(found)

    def throw(self, unit: float) -> randomness.Throws:
        """One step with many seeds, where it draws random numbers."""
        elements, used = scatter.Elements(), Used()
        self.elements = elements

        def more(draws: int) -> bool:
            limit_s = scatter.SOME_S if draws < scatter.SOME else scatter.MANY_S
            return draws < elements.wanted and used.seconds() < limit_s

        return randomness.throw(self.program, self.fresh[0], self.initial, unit, elements, more)

    def thrown(self) -> Transfer:
        """Elements of the results of these seeds."""
        elements, self.elements = self.elements.stacked(), scatter.Elements()
        return self.send(elements)

    def settings(self) -> process_state.History:
        """Global settings of this process, before it was set up, after that, and now."""
        return process_state.History(*self.settings_then, process_state.settings())

    def configuration(self) -> dict[str, Any]:
        """Global settings as they are now, and the mode of the model."""
        return {**process_state.settings(), "model.training": is_training(self.program.model)}

    def replaced(self) -> list[str]:
        """Functions of the clock and of reading results that a strategy has replaced in this process."""
        found = set(process_state.tampered(self.program, self.originals)) - self.excused
        timers = clock.tampered()
        return [*timers, *sorted(found | set(own_code.replaced(self.own)) - set(timers))]

    def tampered(self) -> list[str]:
        """The same, and results that may be computed when they are read."""
        return [*self.replaced(), *sorted(self.unlike)]
