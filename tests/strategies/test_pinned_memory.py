"""Pinned batches: which feeds can be pinned, what proves it, and on a GPU that the same batches arrive."""

from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from optexp.program import Program
from optexp.program.feeds import HostFeed, LoaderFeed
from optexp.strategies.pinned_memory import PinnedMemory
from optexp.trace import Copy, Span, Trace, record
from optexp.workloads.mlp import Mlp
from optexp.workloads.pipeline import Pipeline
from optexp.workloads.training import Training

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(4))


def program_of(workload, device: torch.device = CPU) -> Program:
    return workload.build(device, torch.float32, seed=0)


def copies(*kinds: str) -> Trace:
    found = tuple(Copy("Memcpy", 0.0, 1.0, kind="HtoD", pageable=kind == "pageable", bytes=2**20) for kind in kinds)
    return Trace(steps=(Span("step", 0.0, 9.0),), copies=found)


@pytest.mark.parametrize("workload", [Training(batch_size=4), Pipeline(rows=8, dim=4)])
def test_what_comes_from_the_host_can_be_pinned_on_a_gpu_only(workload):
    program = program_of(workload)
    assert PinnedMemory().unsupported(program, CUDA) is None
    assert "nothing is copied: use device=cuda" in PinnedMemory().unsupported(program, CPU)


def test_resident_batches_and_missing_workers_are_said():
    assert "lie on the device before" in PinnedMemory().unsupported(program_of(Mlp(dim=4)), CUDA)
    reason = PinnedMemory(workers=2).unsupported(program_of(Pipeline(rows=8, dim=4)), CUDA)
    assert "leave workers out" in reason
    whole = replace(program_of(Training(batch_size=4)), feed=LoaderFeed(DataLoader(Stream()), CPU))
    assert "each worker would give all of an iterable data set" in PinnedMemory(workers=2).unsupported(whole, CUDA)
    assert PinnedMemory().unsupported(whole, CUDA) is None
    with pytest.raises(ValueError, match="workers=-1 must be at least 0"):
        PinnedMemory(workers=-1)


def test_a_loader_is_pinned_and_gets_its_workers():
    program, _ = PinnedMemory(workers=3).apply(program_of(Training(batch_size=4, workers=1)))
    feed = program.feed
    assert (feed.pin_memory, feed.non_blocking, feed.workers) == (True, True, 3)
    assert PinnedMemory().apply(program_of(Training(batch_size=4, workers=1)))[0].feed.workers == 1


def test_workers_make_the_batches_of_a_loader_on_a_cpu_too():
    plain = program_of(Training(batch_size=4, workers=0))
    assert PinnedMemory(workers=2).unsupported(plain, CPU) is None
    assert "strategy.pinned_memory.workers=" in PinnedMemory().unsupported(plain, CPU)
    program, notes = PinnedMemory(workers=2).apply(plain)
    assert program.feed.workers == 2
    assert PinnedMemory(workers=2).evidence(copies(), copies(), notes, {}).text == "2 workers make batches, not 0"
    _, notes = PinnedMemory(workers=0).apply(plain)
    assert not PinnedMemory(workers=0).evidence(copies(), copies(), notes, {}).engaged
    assert "pin_memory" not in PinnedMemory(workers=2).recipe(notes)


def test_a_step_that_copies_its_batch_does_not_wait_either():
    program, notes = PinnedMemory().apply(program_of(Pipeline(rows=8, dim=4)))
    assert (program.feed.pin_memory, program.step.non_blocking) == (True, True)
    assert "non_blocking=True" in PinnedMemory().recipe(notes)


def test_a_loaders_own_dice_start_where_they_did():
    """A strategy before this one has looked at a batch."""
    data = TensorDataset(torch.arange(8.0))
    loader = DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))
    plain = LoaderFeed(loader, CPU)
    plain.reset([])
    first = plain.next()[0].tolist()
    pinned = replace(plain, non_blocking=True)
    pinned.reset([])
    assert pinned.next()[0].tolist() == first


@pytest.mark.parametrize(
    ("after", "already", "workers", "engaged", "words"),
    [
        (("pinned", "pinned"), False, [0, 0], True, "2 copies a step from pinned memory (2 MiB)"),
        (("pinned", "pageable"), False, [0, 4], True, "1 from pageable, 4 workers make batches, not 0"),
        (("pageable",), False, [0, 0], False, "1 copies a step to the device, none from pinned memory"),
        (("pinned",), True, [0, 0], False, "nothing changed; batches were in pinned memory already"),
        (("pinned",), True, [0, 2], True, "2 workers make batches, not 0"),
    ],
)
def test_evidence(after: tuple[str, ...], already: bool, workers: list[int], engaged: bool, words: str):
    for loader in (False, True):
        notes = {"already": already, "workers": workers, "loader": loader}
        evidence = PinnedMemory().evidence(copies("pageable"), copies(*after), notes, {})
        assert evidence.engaged is engaged
        assert words in evidence.text
        assert ("before the clock ran" in evidence.text) is (engaged and not already and not loader)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "workload", [Training(batch_size=64), Training(batch_size=64, workers=2), Pipeline(rows=64, dim=32)]
)
def test_the_same_batches_arrive_from_pinned_memory(workload, build, tmp_path):
    programs = {"plain": build(workload, device="cuda"), "pinned": build(workload, PinnedMemory(), device="cuda")}
    batches, traces = {}, {}
    for name, program in programs.items():
        torch.manual_seed(0)
        program.feed.reset([workload.batch(torch.Generator("cuda").manual_seed(i)) for i in range(4)])
        batches[name] = [program.feed.next() for _ in range(3)]
        record(program.run, 3, tmp_path / f"{name}.json.gz", CUDA)
        program.feed.pause()
        traces[name] = Trace.read(tmp_path / f"{name}.json.gz")
    for ours, theirs in zip(batches["pinned"], batches["plain"], strict=True):
        assert all(map(torch.equal, ours, theirs))
    _, notes = PinnedMemory().apply(programs["plain"])
    assert PinnedMemory().evidence(traces["plain"], traces["pinned"], notes, {}).engaged
    assert not PinnedMemory().evidence(traces["plain"], traces["plain"], notes, {}).engaged


@pytest.mark.gpu
def test_what_is_verified_is_brought_from_pinned_memory():
    loader = DataLoader(TensorDataset(torch.randn(8, 1000)), batch_size=8)
    for feed in (HostFeed(CUDA, pin_memory=True, non_blocking=True), LoaderFeed(loader, CUDA, pin_memory=True)):
        batch = (torch.randn(8, 1000),)
        with torch.profiler.profile() as profiled:
            (brought,) = feed.bring(batch)
            torch.cuda.synchronize()
        assert torch.equal(brought.cpu(), batch[0])
        assert any("Pinned -> Device" in event.name for event in profiled.events())
