"""Pinned memory: the device copies from page-locked memory by itself, so that the host need not wait."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from optexp.measurement.floor import MARGIN
from optexp.program import Program
from optexp.program.feeds import nothing_copied, settings
from optexp.strategy import BITWISE, Contract, Counters, Evidence, Notes, Remedy, Stage, Strategy, UserFile

if TYPE_CHECKING:
    from optexp.profiling.bounds import Bound
    from optexp.profiling.view import View
    from optexp.records.profile import Calibration
    from optexp.trace import Trace

WORKERS = 4  # most workers that the remedy proposes


@dataclass
class PinnedMemory(Strategy):
    """Page-locked batches and non-blocking copies, for feeds and steps with these settings.

    A DataLoader pins each batch during the timed steps; other batches in host memory are pinned once, before the clock
    starts.

    workers:  processes that make a DataLoader's batches, on a CPU too; None: the loader's own number
    """

    stage = Stage.FEED
    variants = ({"workers": 2}, {"workers": 4}, {"workers": 8})

    workers: int | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 0:
            raise ValueError(f"workers={self.workers} must be at least 0")

    @property
    def contract(self) -> Contract:
        return BITWISE

    @property
    def remedies(self) -> tuple[Remedy, ...]:
        return (
            Remedy("pageable_copy"),
            Remedy("data_loading", options={"workers": max(1, min(WORKERS, len(os.sched_getaffinity(0)) - 1))}),
        )

    def bound(self, view: View, ceilings: Calibration | None) -> Bound | None:
        """Copies at the rate of pinned memory without host waits; with `workers`, these share the loader's time."""
        step = view.parts(ceilings)
        saved_us, waiting_us = 0.0, 0.0
        least_us = step.loading_least_us + step.launching_us()
        texts: list[str] = []
        copies = [copy for copy in view.trace.copies if copy.kind == "HtoD"]
        rate = ceilings.pinned if ceilings else None
        if copies and rate:
            steps = len(view.trace.steps)
            exposed_us = step.copied_us("HtoD")
            hidden_us = sum(copy.duration for copy in copies) / steps - exposed_us
            at_best_us = sum(copy.bytes for copy in copies) / rate * 1e6 / steps
            saved_us = exposed_us - max(MARGIN * at_best_us - hidden_us, 0.0)
            waiting_us = step.waiting_us
            texts.append(f"copies at {rate / 1e9:.3g} GB/s, and the host does not wait for them")
        if self.workers and step.loading_us:
            waiting_us = max(waiting_us, step.loading_us)
            least_us = max(step.loading_least_us / self.workers, step.launching_us())
            texts.append(f"{self.workers} workers share the loader's time, {step.share(step.loading_us)}")
        return step.less("; ".join(texts), saved_us, waiting_us, least_us) if texts else None

    def unsupported_on(self, device: torch.device) -> str | None:
        if self.workers is None and (reason := nothing_copied(device)):
            return f"{reason}, or let strategy.pinned_memory.workers= make a DataLoader's batches"
        return None

    def unsupported(self, program: Program, device: torch.device) -> str | None:
        if reason := self.unsupported_on(device):
            return reason
        if "pin_memory" not in settings(program.feed):
            return (
                "batches lie on the device before the step begins, and nothing is copied: use a workload whose"
                " batches come from host memory (workload=training, workload=pipeline, or a loader of your own)"
            )
        if self.workers is not None and "workers" not in settings(program.feed):
            return "workers make the batches of a DataLoader, and here there is none: leave workers out"
        loader: Any = settings(program.feed).get("loader")
        if self.workers and isinstance(loader.dataset, IterableDataset) and not loader.num_workers:
            return (
                "each worker would give all of an iterable data set: shard it by torch.utils.data.get_worker_info, and"
                " give the loader itself num_workers; or leave workers out"
            )
        return None

    def apply(self, program: Program) -> tuple[Program, Notes]:
        feed, step, had = program.feed, program.step, settings(program.feed)
        options: dict[str, Any] = {"pin_memory": True, "non_blocking": True}
        if self.workers is not None:
            options["workers"] = self.workers
        feed = replace(feed, **options)  # type: ignore[type-var]  # a dataclass: it has settings
        if "non_blocking" in settings(step):  # the step itself copies its batch
            step = replace(step, non_blocking=True)  # type: ignore[type-var]
        notes = {
            "copies": nothing_copied(program.device) is None,
            "already": bool(had["pin_memory"] and had["non_blocking"]),
            "loader": "workers" in had,
            "step": step.listing() if step is not program.step and hasattr(step, "listing") else "",
            "workers": [had.get("workers", 0), settings(feed).get("workers", 0)],
        }
        return replace(program, feed=feed, step=step), notes

    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        had, has = notes["workers"]
        workers = f"{has} worker{' makes' if has == 1 else 's make'} batches, not {had}" if had != has else ""
        if not notes.get("copies", True):
            return Evidence(bool(workers), workers or f"{has} workers make batches, as before, and nothing is copied")
        if notes["already"]:
            return Evidence(bool(workers), f"{workers or 'nothing changed'}; batches were in pinned memory already")
        steps, copies = len(after.steps), [copy for copy in after.copies if copy.kind == "HtoD"]
        pinned = [copy for copy in copies if not copy.pageable]
        if not pinned:
            return Evidence(False, f"{len(copies) / steps:g} copies a step to the device, none from pinned memory")
        mib = sum(copy.bytes for copy in pinned) / steps / 2**20
        text = f"{len(pinned) / steps:g} copies a step from pinned memory ({mib:.3g} MiB)"
        if left := len(copies) - len(pinned):
            text += f", {left / steps:g} from pageable"
        text += f", {workers}" if workers else ""
        return Evidence(True, text if notes["loader"] else f"{text}; they were pinned before the clock ran")

    def recipe(self, notes: Notes) -> str:
        if notes["loader"] and not notes.get("copies", True):
            return (
                "from torch.utils.data import DataLoader\n\n"
                f'loader_options |= {{"num_workers": {self.workers}}}\nloader = DataLoader(**loader_options)\n'
            )
        if not notes["loader"]:
            return PINNED + (f"\n\n{notes['step']}" if notes["step"] else BRING)
        workers = f', "num_workers": {self.workers}' if self.workers is not None else ""
        options = f'loader_options |= {{"pin_memory": True{workers}}}\n'
        return f"from torch.utils.data import DataLoader\n\n{options}loader = DataLoader(**loader_options)\n" + BRING

    def patch(self, notes: Notes, file: UserFile) -> str:
        lines = ["    loader.pin_memory = True  # copy batches by .to(device, non_blocking=True)"] * notes["copies"]
        if self.workers is not None:
            lines.append(f"    loader.num_workers = {self.workers}")
            lines += ["    loader.prefetch_factor = loader.prefetch_factor or 2"] * bool(self.workers)
        return PATCH.format(name=file.part("loader"), lines="\n".join(lines))


PATCH = """\
def {name}(*args, plain={name}, **kwargs):
    loader = plain(*args, **kwargs)
{lines}
    return loader
"""

PINNED = "loader = [tuple(tensor.pin_memory() for tensor in batch) for batch in loader]\n"

BRING = """

def bring(batch, plain=bring):
    if isinstance(batch, dict):
        return plain({name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()})
    return plain(tuple(tensor.to(device, non_blocking=True) for tensor in batch))
"""
