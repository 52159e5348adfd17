"""The GELU formula against the library's."""

import torch

from optexp.workloads.gelu import Gelu


def test_formula_is_the_tanh_approximation():
    workload = Gelu(size=64)
    program = workload.build(torch.device("cpu"), torch.float32, seed=0)
    batch = workload.batch(torch.Generator().manual_seed(0))
    program.feed.reset([batch])
    expected = torch.nn.functional.gelu(batch[0], approximate="tanh")
    torch.testing.assert_close(program.run()["output"], expected)
