"""Feeds: the same batches from the same seed, nothing left over from before, workers where they do not disturb."""

import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from optexp.comparison import sampling
from optexp.measurement.clock import Timing
from optexp.measurement.settings import MeasurementSettings
from optexp.program.feeds import HostFeed, LoaderFeed
from optexp.workers.messages import WarmUp
from tests.measurement.scripted import Scripted

CPU = torch.device("cpu")
TEN = TensorDataset(torch.arange(10.0), torch.arange(10))


def loader(data: Dataset = TEN, workers: int = 0, **options) -> DataLoader:
    options = {"batch_size": 4, "shuffle": True, "drop_last": True} | options
    return DataLoader(data, num_workers=workers, **options)


def restart(feed: LoaderFeed, seed: int = 0) -> LoaderFeed:
    """As an arm does before every block."""
    torch.manual_seed(seed)
    feed.reset([])
    return feed


def take(feed: LoaderFeed, count: int) -> list[list[float]]:
    return [feed.next()[0].tolist() for _ in range(count)]


# --- from the host's memory


def test_host_batches_are_cycled_and_copied():
    feed = HostFeed(CPU)
    source = [(torch.ones(2),), (torch.zeros(2),)]
    feed.reset(source)
    assert [feed.next()[0][0].item() for _ in range(3)] == [1, 0, 1]
    feed.reset(source)
    assert feed.next()[0][0].item() == 1
    source[0][0].fill_(5)
    feed.reset(source)
    assert feed.next()[0][0].item() == 1, "the host's copy is the feed's own"


def test_what_is_brought_is_a_copy():
    batch = {"x": torch.ones(2)}
    for feed in (HostFeed(CPU), HostFeed(CPU, delivers=False), LoaderFeed(loader(), CPU)):
        feed.bring(batch)["x"].zero_()
        assert batch["x"].tolist() == [1, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_host_batches_reach_the_gpu_pinned_or_not():
    gpu, batch = torch.device("cuda"), (torch.arange(1000.0),)
    for pin_memory in (False, True):
        feed = HostFeed(gpu, pin_memory=pin_memory, non_blocking=pin_memory)
        feed.reset([batch])
        assert feed.batches[0][0].is_pinned() is pin_memory
        assert feed.next()[0].device.type == "cuda"
        assert torch.equal(feed.next()[0].cpu(), batch[0])
        staying = replace(feed, delivers=False)
        staying.reset([batch])
        assert staying.next()[0].device.type == staying.bring(batch)[0].device.type == "cpu"


# --- from a DataLoader


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_follow_without_end_and_equal_seeds_give_equal_batches(workers: int):
    first, other = (restart(LoaderFeed(loader(workers=workers), CPU)) for _ in range(2))
    batches = take(first, 7)
    for epoch in range(3):
        assert len({x for batch in batches[2 * epoch : 2 * epoch + 2] for x in batch}) == 8, "each example once"
    assert take(restart(other), 7) == batches
    assert take(restart(first), 7) == batches, "nothing survives a reset"
    assert take(restart(first, seed=1), 7) != batches


def test_workers_change_who_makes_batches_not_which():
    plain = LoaderFeed(loader(), CPU)
    assert take(restart(replace(plain, workers=2, prefetch=3)), 5) == take(restart(plain), 5)
    assert (plain.queue, replace(plain, workers=2, prefetch=3).queue) == (0, 6)
    assert LoaderFeed(loader(workers=2, prefetch_factor=4), CPU).queue == 8


def test_a_loader_with_its_own_generator_starts_over_too():
    feed = LoaderFeed(loader(generator=torch.Generator().manual_seed(3)), CPU)
    batches = take(restart(feed), 5)
    assert take(restart(feed), 5) == batches


class Drawn(Sampler[int]):
    """Picks with a generator of its own, which no seed reaches."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[int]:
        for _ in range(8):
            if isinstance(self.source, torch.Generator):
                yield int(torch.randint(10, (), generator=self.source))
            else:
                yield (
                    self.source.randrange(10)
                    if isinstance(self.source, random.Random)
                    else int(self.source.random() * 10)
                )

    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "source",
    [torch.Generator(), random.Random(1), numpy.random.default_rng(1), numpy.random.RandomState(1)],
    ids=lambda source: type(source).__name__,
)
def test_a_sampler_with_its_own_generator_starts_over_too(source: Any, workers: int):
    feed = LoaderFeed(loader(workers=workers, shuffle=False, sampler=Drawn(source)), CPU)
    batches = take(restart(feed), 5)
    assert len({str(batch) for batch in batches}) > 2
    assert take(restart(feed), 5) == batches
    feed.pause()


class Counted(Dataset):
    """Says how often it was asked, by whom and where."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.asked, self.seconds = torch.zeros(1).share_memory_(), seconds

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int):
        time.sleep(self.seconds)
        self.asked += 1
        return torch.tensor([os.getpid(), min(os.sched_getaffinity(0)), len(os.sched_getaffinity(0))])


def test_a_paused_feed_has_no_batches_and_idle_workers():
    data = Counted()
    feed = LoaderFeed(loader(data, workers=1, batch_size=1), CPU)
    first = restart(feed).next()[0][0, 0]
    feed.pause()
    asked = data.asked.item()
    time.sleep(0.1)
    assert data.asked.item() == asked
    assert feed.next()[0][0, 0] == first != os.getpid(), "the same worker goes on"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_workers_stay_off_the_cores_that_the_loop_is_bound_to():
    cores = os.sched_getaffinity(0)
    mine = min(cores)
    feed = LoaderFeed(loader(Counted(), workers=1, batch_size=1), CPU)
    assert restart(feed).next()[0][0, 2] == len(cores)
    try:
        os.sched_setaffinity(0, {mine})
        _, lowest, count = restart(feed).next()[0][0].tolist()
        assert os.sched_getaffinity(0) == {mine}
    finally:
        os.sched_setaffinity(0, cores)
    assert count == len(cores) - 1
    assert lowest != mine


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(6.0))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_starts_again_at_its_end(workers: int):
    feed = LoaderFeed(DataLoader(Stream(), batch_size=2, num_workers=workers), CPU)
    expected = [[0, 1], [2, 3], [4, 5], [0, 1]]
    assert take(restart(feed), 4) == expected
    assert take(restart(feed), 4) == expected


def test_real_tensors_arrive_in_the_arms_dtype():
    x, y = LoaderFeed(loader(), CPU, torch.float64).next()
    assert (x.dtype, y.dtype) == (torch.float64, torch.int64)


def test_batches_by_name_keep_their_names():
    data = [{"x": torch.ones(3), "y": torch.tensor(1)}] * 4
    batch = LoaderFeed(loader(data), CPU).next()
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {"x": (4, 3), "y": (4,)}


@pytest.mark.parametrize(("data", "error", "words"), [
    (TensorDataset(torch.ones(3)), ValueError, "no batch"),
    ([("a", torch.ones(1))] * 4, TypeError, "yields a list of tuple, Tensor"),
])  # fmt: skip
def test_what_cannot_be_fed_is_said(data, error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        LoaderFeed(loader(data), CPU).next()


@pytest.mark.parametrize(
    ("examples", "drop_last", "epoch"),
    [(513, False, 17), (512, False, None), (513, True, None), (32 * 200 + 1, False, None)],
)
def test_an_epoch_is_its_period_where_its_last_batch_is_smaller_and_counts(examples, drop_last, epoch):
    data = TensorDataset(torch.zeros(examples, 1))
    assert LoaderFeed(DataLoader(data, batch_size=32, drop_last=drop_last), CPU).period == epoch


def test_a_sampler_that_does_not_know_its_length_has_no_period():
    class Endless(Sampler):
        def __iter__(self):
            yield from range(33)

    assert LoaderFeed(DataLoader(TEN, batch_size=32, sampler=Endless()), CPU).period is None


# --- how it is measured


def test_blocks_outlast_the_queue():
    blocks = []

    class Queueing(Scripted):
        def answer(self, method: str, **arguments):
            if method == "block":
                blocks.append(arguments)
                return Timing(arguments["steps"], 1.0, None)
            answers = {"warm_up": WarmUp([self.step_s], 1e-6, 8, []), "counters": {}, "period": 1, "relocate": False}
            return answers[method]

    for step_s in (1e-2, 1.0):
        Queueing.step_s = step_s
        order = SimpleNamespace(
            random=lambda: 0.0,
            uniform=lambda low, high: low,
            randint=lambda low, high: high,
            sample=lambda names, count: names,
        )
        sampling.sample(
            {"baseline": Queueing(step_s), "candidate": Queueing(step_s)}, MeasurementSettings(), order, pairs=2
        )
    assert min(block["steps"] for block in blocks) >= 80
    assert min(block["lead_in"] for block in blocks) >= 8


def test_a_queue_that_could_refill_does_not_make_the_loop_faster():
    """A worker needs 5 ms for a batch and the step nothing: a block after a pause must still take 5 ms a step."""
    feed = restart(LoaderFeed(loader(Counted(seconds=5e-3), workers=1, batch_size=1, prefetch_factor=8), CPU))
    feed.next()
    feed.pause()
    time.sleep(0.1)  # the other arm's block
    restart(feed)
    for _ in range(feed.queue):
        feed.next()
    start = time.perf_counter()
    for _ in range(20):
        feed.next()
    assert time.perf_counter() - start > 0.95 * 20 * 5e-3
