"""The check in the middle: it changes nothing, it notices, and a compiler stumbles over it."""

import pytest
import torch

from optexp.workloads.graph_break import GraphBreak
from optexp.workloads.mlp import Mlp

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_steps", [1, 2])
def test_computes_what_the_mlp_computes(num_steps: int):
    sizes = {"mode": "forward", "dim": 8, "layers": 4, "batch_size": 3, "num_steps": num_steps}
    plain, watched = (cls(**sizes).build(CPU, torch.float32, seed=0) for cls in (Mlp, GraphBreak))
    batch = Mlp(**sizes).batch(torch.Generator().manual_seed(1))
    assert torch.equal(plain.step(plain, batch)["output"], watched.step(watched, batch)["output"])


def test_notices_what_is_not_finite():
    program = GraphBreak(mode="forward", dim=4, layers=2, batch_size=2).build(CPU, torch.float32, seed=0)
    with pytest.raises(FloatingPointError):
        program.step(program, (torch.full((2, 4), torch.nan),))


def test_the_compiler_makes_two_graphs():
    model = GraphBreak(dim=4, layers=2).model()
    explained = torch._dynamo.explain(model)(torch.randn(2, 4))
    assert explained.graph_break_count == 1
