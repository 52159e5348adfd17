"""What workloads that can train share."""

import pytest
import torch

from optexp.program import ResidentFeed
from optexp.program.feeds import HostFeed
from optexp.workloads.lenet5 import LeNet5
from optexp.workloads.mlp import Mlp

CPU = torch.device("cpu")


@pytest.mark.parametrize("workload", [LeNet5, Mlp])
def test_batches_lie_on_the_device_or_come_from_the_host(workload):
    assert isinstance(workload().feed(CPU, torch.float32), ResidentFeed)
    assert isinstance(workload(source="host").feed(CPU, torch.float32), HostFeed)


def test_where_batches_lie_does_not_change_the_numbers():
    losses = []
    for source in ("device", "host"):
        workload = Mlp(mode="train", dim=8, batch_size=4, source=source)
        program = workload.build(CPU, torch.float32, seed=0)
        program.feed.reset([workload.batch(torch.Generator().manual_seed(i)) for i in range(2)])
        losses.append([program.run()["loss"].item() for _ in range(3)])
    assert losses[0] == losses[1]
