"""LeNet-5 as published: its sizes, and that it learns."""

import torch

from optexp.program import Program
from optexp.workloads.lenet5 import LeNet5, lenet5


def build(workload: LeNet5) -> Program:
    program = workload.build(torch.device("cpu"), torch.float32, seed=0)
    program.feed.reset([workload.batch(torch.Generator().manual_seed(1))])
    return program


def test_has_the_61706_parameters_of_the_paper():
    assert sum(p.numel() for p in lenet5().parameters()) == 61_706


def test_forward_scores_ten_classes():
    assert build(LeNet5(mode="forward", batch_size=3)).run()["output"].shape == (3, 10)


def test_training_lowers_the_loss_on_one_batch():
    program = build(LeNet5(batch_size=16, lr=1e-2))
    losses = [program.run()["loss"].item() for _ in range(15)]
    assert losses[-1] < 0.8 * losses[0]
