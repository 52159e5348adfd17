"""The chunked pipeline: same numbers as in one piece, back on the host."""

import pytest
import torch

from optexp.errors import ConfigError
from optexp.schema import build
from optexp.workloads.pipeline import Pipeline

CPU = torch.device("cpu")


@pytest.mark.parametrize("chunks", [1, 3, 4])
def test_chunks_give_what_the_whole_gives(chunks: int):
    workload = Pipeline(rows=12, dim=8, layers=1, chunks=chunks)
    program = workload.build(CPU, torch.float32, seed=0)
    batch = workload.batch(torch.Generator().manual_seed(0))
    program.feed.reset([batch])
    calls = []
    program.model.register_forward_hook(lambda module, inputs, output: calls.append(output.shape))
    output = program.run()["output"]
    assert calls == [(12 // chunks, 8)] * chunks
    torch.testing.assert_close(output, program.model(*batch))


def test_sizes_left_open_depend_on_the_device():
    assert Pipeline().resolve("cuda").samples == 65536
    assert Pipeline(rows=64).resolve("cpu").rows == 64


def test_no_chunks_is_a_mistake():
    with pytest.raises(ConfigError, match="chunks=0 must be at least 1"):
        build({"_target_": "optexp.workloads.pipeline.Pipeline", "chunks": 0}, "workload")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("pinned", [False, True])
def test_data_starts_and_ends_on_the_host(pinned: bool):
    workload = Pipeline(rows=4096, dim=256, pin_memory=pinned, non_blocking=pinned)
    program = workload.build(torch.device("cuda"), torch.float32, seed=0)
    batch = workload.batch(torch.Generator("cuda").manual_seed(0))
    program.feed.reset([batch])
    assert program.feed.next()[0].device.type == "cpu"
    output = program.run()["output"]
    assert output.device.type == "cpu"
    assert output.is_pinned() == pinned
    with torch.no_grad():
        torch.testing.assert_close(output, program.model(*batch).cpu())
