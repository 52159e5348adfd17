"""ARM: memory by category over one or two steady steps, recorded after timing."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from optexp.measurement import clock
from optexp.profiling.allocations import Event, History, history_of, largest_free
from optexp.profiling.memory import Recording, memory_profile
from optexp.program import tensors_of
from optexp.records.memory import CacheState, MemoryProfile
from optexp.workers.arm_profile import held_by_graphs
from optexp.workers.arm_program import Holder
from optexp.workers.cpu_allocations import Marks, events_of
from optexp.workers.memory_watch import Watch, owned, places

STEPS, SLOW_S = 2, 0.1  # recorded; of steps that take longer, one
MOST_EVENTS = 400_000  # of the allocator in the recorded steps


class Memory(Holder):
    """Memory of steady steps, by category."""

    def memory_by_category(self, snapshot: str) -> MemoryProfile | None:
        """Record one or two steps; None where the allocator keeps no history, or more than can be kept.

        snapshot: path for the allocator's own record, which https://pytorch.org/memory_viz reads; written on a GPU
        """
        self.fresh, self.brought = [], None
        self.inbox.clear()
        self.restore()
        steps = STEPS if clock.time_block(self.runner(), 1, self.device).wall_s < SLOW_S else 1
        try:
            recorded = self._recorded(steps, True, snapshot)
        except RuntimeError:  # functorch takes no hooks: what it keeps for backward stays unseen
            self.restore()
            recorded = self._recorded(steps, False, snapshot)
        return None if recorded is None else memory_profile(recorded)

    def _recorded(self, steps: int, saved: bool, snapshot: str) -> Recording | None:
        if self.device.type != "cuda":
            return self._on_cpu(steps, saved)
        if torch.cuda.get_allocator_backend() != "native":
            return None
        return self._on_gpu(steps, saved, Path(snapshot))

    def _on_gpu(self, steps: int, saved: bool, snapshot: Path) -> Recording | None:
        device = self.device.index if self.device.index is not None else torch.cuda.current_device()

        def counted() -> int:
            found = torch.cuda.memory_stats_as_nested_dict(device)["allocation"]["all"]
            return int(found["allocated"] + found["freed"])

        gc.collect()  # garbage that is released between counting and recording would shift all moments
        clock.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=MOST_EVENTS)
        try:
            before, first = torch.cuda.memory_stats(device), counted()
            watch = Watch(self.program, self.device, lambda: counted() - first)
            self._see_tools_own(watch)
            watch.given(self.batches[0])
            watch.see_state()
            begins = self._watched_steps(watch, steps, saved)
            clock.synchronize(self.device)
            watch.see_state()
            after, taken = torch.cuda.memory_stats(device), torch.cuda.memory._snapshot()
        finally:
            torch.cuda.memory._record_memory_history(None)
        history = history_of(taken, device)
        if len(history.events) >= MOST_EVENTS:  # the oldest were overwritten
            return None
        snapshot.parent.mkdir(parents=True, exist_ok=True)
        with snapshot.open("wb") as file:
            pickle.dump(taken, file)
        return Recording(
            history,
            begins,
            watch.sightings,
            watch.calls,
            partial(owned, self.device),
            pools=held_by_graphs(self.program.pool),
            allocated=after["allocated_bytes.all.peak"],
            requested=after["requested_bytes.all.peak"],
            saved_known=saved,
            cache=_cache_state(before, after, largest_free(taken, device), steps),
        )

    def _on_cpu(self, steps: int, saved: bool) -> Recording:
        """Events of torch.profiler, with the sizes of the known tensors that live between steps."""
        from torch.profiler import ProfilerActivity, profile

        marks = Marks()
        watch = Watch(self.program, self.device, marks.now)
        living = self._living()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True) as profiler:
            with watch.watching(saved):
                self._step(watch)()  # releases of memory from before the trace are not in it
            watch.given(self.batches[0])
            watch.see_state()
            begins = self._watched_steps(watch, steps, saved)
            watch.see_state()
        events, at = events_of(profiler, marks.made)
        history = History(events, {address: Event(address, size) for address, size in living.items()})
        return Recording(
            history,
            [at[mark] for mark in begins],
            [replace(seen, at=at[seen.at]) for seen in watch.sightings],
            [replace(call, begin=at[call.begin], end=at[call.end]) for call in watch.calls],
            partial(owned, self.device),
            saved_known=saved,
        )

    def _living(self) -> dict[int, int]:
        """Addresses and bytes of tensors that live between steps: model, optimizer, one batch."""
        model, one = self.program.model, tensors_of(self.batches[0]).values()
        tensors = (*model.parameters(), *model.buffers(), *self.program.state().values(), *one)
        return {address: size for tensor in tensors for address, size in places(tensor, self.device)}

    def _see_tools_own(self, watch: Watch) -> None:
        """Batches but one, and the state to restore, which peak memory does not count either."""
        kept = self.program.keeps.tensors if self.program.keeps is not None else []
        others = [tensor for batch in self.batches[1:] for tensor in tensors_of(batch).values()]
        for tensor in (*others, *self.initial.values.values(), *kept):
            watch.see("tool", tensor)

    def _watched_steps(self, watch: Watch, steps: int, saved: bool) -> list[int]:
        """Run the steps; the moment at which each began."""
        begins, run = [], self._step(watch)
        with watch.watching(saved):
            for _ in range(steps):
                begins.append(watch.now())
                run()
        return begins

    def _step(self, watch: Watch) -> Callable[[], None]:
        """One step whose batch and outputs are seen, and held no longer than the program holds them."""
        assert self.offered is not None, "setup comes first"
        program, source = self.program, self.offered
        step, take = program.step, program.feed.next

        def run() -> None:
            source.due += 1
            watch.returned(step(program, watch.given(take())))

        return run


def _cache_state(before: Mapping[str, int], after: Mapping[str, int], free: int, steps: int) -> CacheState:
    """Of the caching allocator, by its counters before and after the recorded steps."""
    calls = after.get("num_device_alloc", 0) - before.get("num_device_alloc", 0)
    return CacheState(
        reserved_bytes=after["reserved_bytes.all.current"],
        allocated_bytes=after["allocated_bytes.all.current"],
        largest_free_bytes=free,
        inactive_split_bytes=after["inactive_split_bytes.all.current"],
        driver_calls=calls / steps,
    )
