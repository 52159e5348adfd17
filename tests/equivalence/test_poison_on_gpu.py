"""On a GPU memory that was freed holds NaN afterwards, and nobody else's memory does."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from optexp.equivalence.poison import hold, poison

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.mark.parametrize("elements", [100, 10_000, 300_000, 10_000_000])
def test_freed_memory_holds_nan(elements):
    torch.empty(elements, device=CUDA).fill_(1.0)
    poison(CUDA)
    assert torch.empty(elements, device=CUDA).isnan().all()


def test_memory_in_use_is_left_alone():
    kept = [torch.full((size,), 3.0, device=CUDA) for size in (10, 1000, 5_000_000)]
    pool = torch.cuda.graph_pool_handle()
    graph, static = torch.cuda.CUDAGraph(), torch.ones(1000, device=CUDA)
    with torch.cuda.graph(graph, pool=pool):
        result = (static * 2) + 1
    graph.replay()
    poison(CUDA)
    assert all(bool((tensor == 3.0).all()) for tensor in kept)
    assert bool((result == 3.0).all())


def test_it_asks_for_no_new_memory():
    torch.empty(50_000_000, device=CUDA)
    poison(CUDA)
    reserved = torch.cuda.memory_reserved()
    poison(CUDA)
    assert torch.cuda.memory_reserved() == reserved


@pytest.mark.parametrize("held", [False, True])
def test_what_nobody_waits_for_is_not_done_when_a_slow_host_reads_it(held, monkeypatch):
    monkeypatch.setattr("optexp.equivalence.poison._chance", SimpleNamespace(random=lambda: 0.0 if held else 1.0))
    side, counted = torch.cuda.Stream(), torch.zeros(4_000_000, device=CUDA)
    counted.add_(0.0).clone()  # kernels are loaded at their first launch
    torch.cuda.synchronize()
    hold(CUDA)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(20):
            counted.add_(1.0)
    time.sleep(2e-3 if held else 0.2)  # where nothing is held, other processes on the card may take their turn first
    read = counted.clone()
    torch.cuda.synchronize()
    assert bool((read == 20.0).all()) != held
