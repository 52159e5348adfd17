"""What a model keeps in Python stands still in a captured graph: it is named, and what is only made once passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optexp.equivalence.attributes import LEFT
from optexp.program import Program
from optexp.result import Verdict
from optexp.strategies.cuda_graph import CudaGraph
from tests.equivalence.counting import Annealed, Lazy, Plain, Rows, Statistics
from tests.test_end_to_end_on_gpu import optexp

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = torch.device("cuda")
STEPS = 6
MODES = ["forward", "forward_backward", "train"]


class RowsOnDevice(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.bank = torch.zeros(16, 10, device=CUDA)


def graphed(program: Program) -> Program:
    batch = (torch.randn(8, 3, 8, 8, device=CUDA), torch.randint(10, (8,), device=CUDA))
    program.feed.reset([batch[: 1 + program.targets]])
    return CudaGraph().apply(program)[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", [Plain, Lazy])
def test_honest_graphs_pass(check, net, model, mode):
    found = check(net(mode=mode, make=model), graphed, device=CUDA, steps=STEPS, overwrites=True)
    assert found.ok, found.headline


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("model", "name"), [(Annealed, "calls"), (RowsOnDevice, "at"), (Statistics, "seen")])
def test_what_stands_still_is_named(check, net, model, name, mode):
    found = check(net(mode=mode, make=model), graphed, device=CUDA, steps=STEPS, overwrites=True)
    assert not found.ok
    assert any(m.tensor == f"attribute {name}" and m.message == LEFT for m in found.failures)


SCHEDULE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(64, 64), nn.Linear(64, 64), 0

    def forward(self, x):
        self.calls += 1
        h = torch.tanh(self.first(x))
        return self.second(h).square().mean() + (self.calls % 10) / 10 * h.square().mean()

def get_inputs():
    return [torch.randn(32, 64)]
"""

CACHE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.position = nn.Linear(64, 64), 0
        self.register_buffer("cache", torch.zeros(16, 64))

    def forward(self, x):
        keys = self.key(x)
        self.cache[self.position % 16] = keys.mean(0).detach()
        self.position += 1
        return keys

def get_inputs():
    return [torch.randn(32, 64)]
"""


@pytest.mark.parametrize(
    ("text", "mode", "name"), [(SCHEDULE, "forward_backward", "calls"), (CACHE, "forward", "position")]
)
def test_a_graph_of_a_model_that_counts_is_never_faster(tmp_path: Path, text: str, mode: str, name: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    mine = ["workload=module", "workload.path=mine.py", f"workload.mode={mode}"]
    beside_others = ["tracking.enabled=false", "environment.allow_foreign=true"]
    result = optexp(tmp_path, *mine, "strategy=cuda_graph", *beside_others)
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline
    assert name in str(result.equivalence.failures)
