"""The batch of a marked block without a loader."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optexp.program import Program, preserved
from optexp.user_code.block_batches import varied
from optexp.user_code.script_run import Reached, run
from optexp.workloads.script import UNCHANGING, Script

HEAD = """\
import torch
import optexp
torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
params = list(model.parameters())
class Graph:
    def __init__(self, x, y):
        self.x, self.y = x, y
"""
PREFETCHED = """\
X, ones = torch.rand(3, 2), torch.ones(2)
while True:
    with optexp.step(model=model, optimizer=optimizer):
        loss = (ones * model(X)).sum()
        X = torch.rand(3, 2)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""
IMAGE = """\
image, target = torch.rand(3, 2, requires_grad=True), torch.ones(2)
optimizer = torch.optim.Adam([image], lr=0.1)
while True:
    with optexp.step(model=model, optimizer=optimizer):
        optimizer.zero_grad()
        loss = (model(image) - target).square().sum()
        loss.backward()
        optimizer.step()
"""
WHOLE = """\
graph, labels = Graph(torch.rand(3, 2), torch.ones(3, 2)), torch.tensor([0, 1, 1])
while True:
    with optexp.step(model=model, optimizer=optimizer):
        optimizer.zero_grad()
        graph.x.requires_grad_()
        loss = torch.nn.functional.cross_entropy(model(graph.x) * graph.y, labels)
        loss.backward()
        optimizer.step()
"""


def script(folder: Path, body: str) -> Path:
    path = folder / "train.py"
    path.write_text(HEAD + body)
    return path


def names(found: Reached) -> set[str]:
    target = found.loop.target
    return {one.id for one in getattr(target, "elts", ())}


SPARSE = """\
adjacency = torch.eye(2).to_sparse()
while True:
    with optexp.step(model=model, optimizer=optimizer):
        optimizer.zero_grad()
        loss = torch.sparse.mm(adjacency, model(adjacency.to_dense())).square().sum()
        loss.backward()
        optimizer.step()
"""
BATCHES = [(PREFETCHED, {"X"}), (IMAGE, {"image"}), (WHOLE, {"graph", "labels"}), (SPARSE, {"adjacency"})]


@pytest.mark.parametrize(("body", "expected"), BATCHES)
def test_which_variables_are_the_batch(body: str, expected: set[str], tmp_path: Path) -> None:
    assert names(run(script(tmp_path, body), [])) == expected


def built(path: Path) -> tuple[Script, Program]:
    workload = Script(path=str(path))
    workload.mode = "train"
    return workload, workload.build(torch.device("cpu"), torch.float32, 0)


def test_an_image_that_is_optimized_takes_a_batch_where_it_is(tmp_path: Path) -> None:
    workload, program = built(script(tmp_path, IMAGE))
    image = program.optimizer.param_groups[0]["params"][0]  # type: ignore[union-attr]
    one, other = workload.batches(torch.Generator().manual_seed(0), 2)
    losses = list[torch.Tensor]()
    for batch in (one, other, one):
        with preserved(program):
            losses.append(program.step(program, batch)["loss"].clone())
            assert image.grad is not None
            assert not torch.equal(image, next(iter(batch.values())))  # type: ignore[union-attr]
    assert torch.equal(losses[0], losses[2])
    assert not torch.equal(losses[0], losses[1])


def test_data_that_never_change_are_drawn_anew(tmp_path: Path) -> None:
    workload, _ = built(script(tmp_path, WHOLE))
    assert UNCHANGING in workload.notes()
    one, other = workload.batches(torch.Generator().manual_seed(0), 2)
    assert isinstance(one, dict)
    assert isinstance(other, dict)
    assert torch.equal(one["0.1"], other["0.1"])
    assert not torch.equal(one["0.0.x"], other["0.0.x"])
    again = workload.batches(torch.Generator().manual_seed(0), 2)[1]
    assert isinstance(again, dict)
    assert torch.equal(other["0.0.x"], again["0.0.x"])


def test_fresh_values_keep_signs_bounds_and_symmetry() -> None:
    generator = torch.Generator().manual_seed(0)
    given = torch.tensor([0.0, 1.0, -1.0, torch.inf])
    found = varied(given, generator)
    assert found[0] == 0
    assert found[3] == torch.inf
    assert ((found[1:3] / given[1:3] > 0.9) & (found[1:3] / given[1:3] < 1)).all()
    matrix = torch.rand(4, 4, dtype=torch.float64)
    covariance = matrix @ matrix.T + torch.eye(4)
    covariance = (covariance + covariance.T) / 2
    found = varied(covariance, generator)
    assert torch.equal(found, found.T)
    assert torch.linalg.eigvalsh(found).min() > 0
    index = torch.arange(3)
    assert varied(index, generator) is index


IN_FUNCTIONS = """\
x, noise = torch.rand(3, 2), torch.zeros(3, 2)
seen = None
def loss():
    global seen
    noise.uniform_()
    seen = x + noise
    return model(seen).square().sum()
def train():
    scale = torch.ones(2)
    def scaled():
        return (loss() * scale).sum()
    while True:
        with optexp.step(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            total = scaled()
            total.backward()
            optimizer.step()
train()
"""


def test_data_that_functions_of_the_block_read(tmp_path: Path) -> None:
    """What they change is their state."""
    found = run(script(tmp_path, IN_FUNCTIONS), [])
    assert names(found) == {"x", "scale"}
    ordered = [one.id for one in found.loop.target.elts]  # type: ignore[union-attr]
    given = {"x": torch.zeros(3, 2), "scale": torch.zeros(2)}
    assert found.function([tuple(given[name] for name in ordered)])["total"].item() == 0
    assert found.function.__globals__["x"] is given["x"]


LEARNED = """\
average, adam = torch.nn.BatchNorm1d(2), torch.optim.Adam(params, lr=0.1)
for _ in range(TURNS):
    with optexp.step(model=model, optimizer=adam):
        x = torch.rand(3, 2)
        loss = average(model(x)).square().sum() + model(x).sum()
        loss.backward()
        adam.step()
        average.running_mean = average.running_mean * 0.9
"""


@pytest.mark.parametrize("turns", [5, 50])  # a loop that ends before as many turns as are looked at, and a long one
def test_what_turns_before_the_comparison_learned_is_put_back(turns: int, tmp_path: Path) -> None:
    """Two programs that round differently learn other values in these turns, and would begin apart."""
    text = LEARNED.replace("x = torch.rand(3, 2)", "x = X + 1").replace("TURNS", str(turns))
    found = run(script(tmp_path, "X = torch.rand(3, 2)\n" + text), [])
    torch.manual_seed(0)
    fresh = torch.nn.Linear(2, 2)
    assert torch.equal(found.mark.model.weight, fresh.weight)
    assert found.mark.model.weight.grad is None
    assert not found.mark.optimizer.state
    assert torch.equal(found.function.__globals__["average"].running_mean, torch.zeros(2))


IN_A_BRANCH = """\
def train(recurrent):
    if recurrent:
        hidden = torch.zeros(2)
    while True:
        x = torch.rand(3, 2)
        with optexp.step(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            y = model(x)
            if recurrent:
                y, hidden = y + hidden, y.detach().mean(0)
            y.sum().backward()
            optimizer.step()
train(recurrent=False)
"""


def test_a_variable_that_one_branch_alone_assigns_may_be_missing(tmp_path: Path) -> None:
    workload, program = built(script(tmp_path, IN_A_BRANCH))
    assert names(workload.reached) == {"x"}
    (batch,) = workload.batches(torch.Generator().manual_seed(0), 1)
    with preserved(program):
        program.step(program, batch)
