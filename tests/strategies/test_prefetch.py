"""Prefetching: which stream waits for which, what proves overlap, and on a GPU that nothing is read too early."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from optexp.program import Program, forward
from optexp.program.feeds import HostFeed
from optexp.strategies.cuda_graph import CudaGraph
from optexp.strategies.pinned_memory import PinnedMemory
from optexp.strategies.prefetch import Prefetch, Prefetched, prefetched
from optexp.trace import Copy, Kernel, Span, Trace, record
from optexp.workloads.mlp import Mlp
from optexp.workloads.pipeline import Pipeline
from optexp.workloads.training import Training

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("workload", "device", "words"),
    [
        (Training(batch_size=4), CPU, "used where they are made"),
        (Mlp(dim=4), CUDA, "nothing is left to prefetch"),
        (Training(batch_size=4), CUDA, "add pinned_memory"),
        (Pipeline(rows=8, dim=4), CUDA, "use streams"),
    ],
)
def test_reasons_say_what_to_do(workload, device: torch.device, words: str):
    assert words in Prefetch().unsupported(workload.build(CPU, torch.float32, 0), device)


def test_on_top_of_pinned_memory_in_any_order():
    from optexp.strategy import compose

    assert [s.name for s in compose([Prefetch(), PinnedMemory()])] == ["pinned_memory", "prefetch"]
    program, _ = PinnedMemory().apply(Training(batch_size=4).build(CPU, torch.float32, 0))
    assert Prefetch().unsupported(program, CUDA) is None


# --- without a GPU: streams that only write down what they are told


@pytest.fixture
def logged(streams) -> type[HostFeed]:
    """A feed that says which stream copies which batch."""

    class Logged(HostFeed):
        def _deliver(self, batch):
            streams.work(f"{batch[0].item():g}")
            return batch

    return Logged


def numbers(count: int = 4) -> list[tuple[torch.Tensor]]:
    return [(torch.tensor(float(i)),) for i in range(count)]


def test_a_batch_is_awaited_and_the_next_begun_once_earlier_steps_are_done(streams, logged):
    feed = Prefetched(logged(CPU))
    feed.reset(numbers())
    assert feed.next()[0] == 0
    assert streams.log == [
        "side waits for main", "0 on side", "main waits for side",
        "side waits for main", "1 on side",
    ]  # fmt: skip
    streams.log.clear()
    assert feed.next()[0] == 1
    assert streams.log == ["main waits for side", "side waits for main", "2 on side"]


def test_nothing_prefetched_survives_a_reset_or_a_pause(streams, logged):
    feed = Prefetched(logged(CPU))
    feed.reset(numbers())
    assert [feed.next()[0].item() for _ in range(3)] == [0, 1, 2]
    feed.reset(numbers())
    assert feed.next()[0] == 0
    feed.pause()
    assert feed.ready is None
    assert feed.queue == 1


def test_what_is_brought_goes_the_same_way_and_leaves_the_queue_alone(streams, logged):
    feed = Prefetched(logged(CPU))
    feed.reset(numbers())
    feed.next()
    streams.log.clear()
    batch = (torch.tensor(7.0),)
    brought = feed.bring(batch)
    assert streams.log == ["side waits for main", "7 on side", "main waits for side"]
    brought[0].zero_()
    assert batch[0] == 7
    assert feed.next()[0] == 1


def test_the_recipe_gives_the_same_batches_one_ahead(streams, logged):
    batches = prefetched(iter(numbers()), CPU)
    assert [next(batches)[0].item() for _ in range(3)] == [0, 1, 2]
    assert streams.log[-2:] == ["main waits for side", "side waits for main"]


# --- evidence


@pytest.mark.parametrize(("start", "words"), [(0.0, "during 50% of that time"), (20.0, "waits for the host")])
def test_evidence_is_a_stream_of_its_own(start: float, words: str):
    copies = (Copy("Memcpy", 0.0, 10.0, stream=13, kind="HtoD"), Copy("Memcpy", 5.0, 9.0, stream=13, kind="DtoH"))
    trace = Trace(steps=(Span("step", 0.0, 30.0),), kernels=(Kernel("k", start, 5.0, stream=7),), copies=copies)
    evidence = Prefetch().evidence(trace, trace, {}, {})
    assert evidence.engaged
    assert words in evidence.text
    assert not Prefetch().evidence(trace, replace(trace, copies=copies[1:]), {}, {}).engaged
    in_line = replace(trace, copies=(replace(copies[0], stream=7),))
    assert not Prefetch().evidence(trace, in_line, {}, {}).engaged


# --- on a GPU


class Slow(nn.Module):
    """Reads its input only after a long while, so that a batch that is overwritten or not yet there shows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        busy = torch.zeros(2048, 2048, device=x.device)
        for _ in range(10):
            busy = busy @ busy
        return x.sum(1) + busy[0, 0]


def slow_program(batches: list, *stack) -> Program:
    feed = HostFeed(CUDA)
    feed.reset(batches)
    program = Program(model=Slow(), step=forward, feed=feed)
    for strategy in stack:
        program, _ = strategy.apply(program)
        program.feed.reset(batches)
    return program


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
def test_steps_see_their_own_batches_however_far_the_host_runs_ahead(graph: bool):
    batches = [(torch.full((512, 4096), float(i + 1)),) for i in range(5)]
    program = slow_program(batches, PinnedMemory(), Prefetch(), *([CudaGraph()] if graph else []))
    outputs = [program.run()["output"].clone() for _ in range(40)]
    for i, output in enumerate(outputs):
        assert torch.equal(output, torch.full((512,), 4096.0 * (i % 5 + 1), device="cuda")), f"step {i}"


@pytest.mark.gpu
def test_two_batches_are_on_the_device_however_far_the_host_runs_ahead():
    batches = [(torch.ones(512, 4096),) for _ in range(4)]
    nbytes = batches[0][0].nbytes
    program = slow_program(batches, PinnedMemory(), Prefetch())
    program.run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    steps = [program.run()["output"].sum() for _ in range(30)]
    assert not torch.cuda.current_stream().query(), "the host was not ahead, and this shows nothing"
    assert torch.cuda.max_memory_allocated() - before < nbytes + 4 * 2048 * 2048 * 4 + 2**20
    assert all(step.item() == 512 * 4096 for step in steps)


@pytest.mark.gpu
def test_copies_overlap_with_kernels_in_a_real_trace(tmp_path):
    batches = [(torch.ones(512, 4096),) for _ in range(4)]
    traces = {}
    for name, stack in (("plain", [PinnedMemory()]), ("ahead", [PinnedMemory(), Prefetch()])):
        program = slow_program(batches, *stack)
        record(program.run, 5, tmp_path / f"{name}.json.gz", CUDA)
        traces[name] = Trace.read(tmp_path / f"{name}.json.gz")
    assert Prefetch().evidence(traces["plain"], traces["ahead"], {}, {}).engaged
    assert not Prefetch().evidence(traces["plain"], traces["plain"], {}, {}).engaged


@pytest.mark.gpu
@pytest.mark.parametrize("stack", [(), (CudaGraph(),)], ids=["eager", "graph"])
@pytest.mark.parametrize("workers", [0, 2])
def test_training_on_prefetched_batches_computes_the_same(build, observe, stack, workers: int):
    workload = Training(batch_size=64, workers=workers)
    seen = []
    for strategies in ((), (PinnedMemory(), Prefetch(), *stack)):
        program = build(workload, *strategies, device="cuda")
        torch.manual_seed(0)
        program.feed.reset([])
        seen.append(observe(program, 4))
        program.feed.pause()
    for ours, plain in zip(*seen, strict=True):
        torch.testing.assert_close(ours["loss"], plain["loss"], atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_verified_batches_go_through_the_side_stream():
    program = slow_program([(torch.zeros(512, 4096),)] * 2, PinnedMemory(), Prefetch())
    for i in range(10):
        program.run()
        brought = program.feed.bring((torch.full((512, 4096), float(i)),))
        assert program.step(program, brought)["output"][0].item() == 4096.0 * i
