"""Sparse buffers, parameters and inputs in each of torch's layouts are compared as dense ones are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from optexp.equivalence import input_families
from optexp.equivalence.checksums import LARGE
from optexp.equivalence.drawn_set import DrawnSet
from optexp.equivalence.tensor_math import alike, identical
from optexp.errors import ConfigError, NoReference
from optexp.strategies.replace import Replace
from optexp.strategy import Strategy
from optexp.support import sparse
from optexp.workers.arm import Arm
from optexp.workers.messages import Look
from optexp.workers.spec import Spec
from optexp.workers.transfer import Inbox, Outbox
from optexp.workloads.module import Module
from tests.user_code.test_own_model import run

LAYOUTS = {
    "coo": "to_sparse()",
    "csr": "to_sparse_csr()",
    "csc": "to_sparse_csc()",
    "bsr": "to_sparse_bsr((2, 2))",
    "bsc": "to_sparse_bsc((2, 2))",
}
GRAPH = """
import torch
from torch import nn


def adjacency(seed=1):
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(8, 8, generator=generator) < 0.4
    return (kept * torch.randn(8, 8, generator=generator)).{layout}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        {held}

    def forward(self, x{given}):
        return torch.relu(self.lin({used} @ x))


class Dense(Model):
    def forward(self, x{given}):
        return torch.relu(self.lin({used}.to_dense() @ x))


class Wrong(Model):
    def forward(self, x{given}):
        return torch.relu(self.lin({used}.to_dense().tril() @ x))


class Late(Model):
    def __init__(self):
        super().__init__()
        with torch.no_grad():
            {other}


def get_inputs():
    return [torch.randn(8, 4){input}]
"""
HELD = {
    "buffer": {
        "held": 'self.register_buffer("a", adjacency())',
        "given": "",
        "used": "self.a",
        "input": "",
        "other": "self.a = adjacency(seed=2)",
    },
    "parameter": {
        "held": "self.a = nn.Parameter(adjacency())",
        "given": "",
        "used": "self.a",
        "input": "",
        "other": "self.a = nn.Parameter(adjacency(seed=2))",
    },
    "input": {
        "held": "",
        "given": ", a",
        "used": "a",
        "input": ", adjacency(int(torch.randint(99, ())))",
        "other": "pass",
    },
}


def written(folder: Path, layout: str, held: str) -> Path:
    path = folder / "graph.py"
    path.write_text(GRAPH.format(layout=LAYOUTS[layout], **HELD[held]))
    return path


def made(layout: str, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    dense = torch.randn(8, 8) * (torch.rand(8, 8) < 0.4)
    found: Tensor = eval(f"dense.{LAYOUTS[layout]}", {"dense": dense})
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sparse_tensor_in_dense_parts(layout: str) -> None:
    one, other = made(layout), made(layout, seed=1)
    assert torch.equal(sparse.like(one, lambda values: 2 * values).to_dense(), 2 * one.to_dense())
    assert sparse.like(one, torch.clone).layout is one.layout
    assert identical(one, one.clone())
    assert not identical(one, other)
    assert not identical(one, one.to_dense())
    assert alike({"a": one, "b": one}, {"a": one.clone(), "b": other}) == {"a"}
    assert sparse.nbytes(one) < 8 * 8 * 4 * 6
    assert sparse.place(one) == sparse.place(one.detach())
    assert sparse.place(one) != sparse.place(one.clone())
    sparse.fill(one, sparse.like(one, torch.zeros_like))
    assert not one.to_dense().any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_travels(layout: str, tmp_path: Path) -> None:
    tensor = made(layout)
    outbox, inbox = Outbox([str(tmp_path)]), Inbox()
    transfer = outbox.send((tensor, torch.ones(3)))
    inbox.expect(transfer, torch.device("cpu"))
    for piece in range(transfer.pieces):
        outbox.fill(piece)
        inbox.take(piece)
    outbox.close()
    arrived, beside = inbox.contents
    assert identical(arrived, tensor)
    assert sparse.coalesced(arrived) == sparse.coalesced(tensor)
    assert beside.tolist() == [1, 1, 1]


@pytest.mark.parametrize("family", input_families.FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_families_of_inputs_change_the_values(layout: str, family: str) -> None:
    tensor = made(layout)
    (changed,) = input_families.of(family, (tensor,), targets=0)
    assert changed.layout is tensor.layout
    pairs = zip(sparse.parts(changed).values(), sparse.parts(tensor).values(), strict=True)
    assert [torch.equal(*pair) for pair in pairs][1:] == [True] * (len(sparse.parts(tensor)) - 1)
    assert not identical(changed, tensor)


def arm(path: Path, mode: str, *stack: Strategy, device: str = "cpu") -> Arm:
    made = Arm()
    workload = Module(path=str(path), mode=mode)
    made.setup(Spec(workload, stack, device, "float32", 0, generic=True).pack())
    made.restore()
    return made


@pytest.mark.parametrize("mode", ["forward", "forward_backward"])
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr"])
def test_a_step_is_observed_and_restored(tmp_path: Path, layout: str, held: str, mode: str) -> None:
    if layout == "bsr" and mode != "forward":
        pytest.skip("torch has no backward of a product with blocks on a CPU")
    path = written(tmp_path, layout, held)
    one = arm(path, mode)
    first = {name: tensor.clone() for name, tensor in one.program.run().items()}
    with torch.no_grad():
        for tensor in one.program.state().values():
            if tensor.is_floating_point():
                tensor.add_(1)
    assert not torch.equal(next(iter(one.program.run().values())), next(iter(first.values())))
    one.restore()
    assert alike(one.program.run(), first) == first.keys()
    one.fresh, one.family = list(one.batches), input_families.NORMAL
    for noise in (None, 1):
        assert one.observe(Look(0, noise=noise)).size
    assert one.repeats(2)
    assert one.moved()[0] > 0
    assert one.peak_memory(1).resident_mib > 0
    other = arm(path, mode, Replace(f"{path}:Late"))
    torch.testing.assert_close(other.program.run(), first)
    assert other.program.state().keys() == one.program.state().keys()


@pytest.mark.parametrize(
    "held", ["buffer", *(pytest.param(held, marks=pytest.mark.slow) for held in HELD if held != "buffer")]
)
def test_a_verdict(tmp_path: Path, held: str) -> None:
    path = written(tmp_path, "csr", held)
    given = [f"workload.path={path}", "strategy=replace", "verify=only", "isolation=none"]
    same = run(tmp_path, *given, f"strategy.replace.target={path}:Dense")
    assert same.verdict.name == "VERIFIED", same.headline
    wrong = run(tmp_path, *given, f"strategy.replace.target={path}:Wrong")
    assert wrong.verdict.name == "NOT_EQUIVALENT", wrong.headline


def test_training_with_a_sparse_buffer(tmp_path: Path) -> None:
    path = written(tmp_path, "csr", "buffer")
    one, other = arm(path, "train"), arm(path, "train", Replace(f"{path}:Dense"))
    for _ in range(3):
        torch.testing.assert_close(other.program.run(), one.program.run())
    torch.testing.assert_close(other.program.state(), one.program.state())


def test_another_layout_in_a_second_implementation(tmp_path: Path) -> None:
    path = written(tmp_path, "csr", "buffer")
    path.write_text(
        f"{path.read_text()}\n\nclass Stored(Model):\n    def __init__(self):\n        super().__init__()\n"
        "        self.a = adjacency().to_dense()\n\n\nclass Turned(Stored):\n    def __init__(self):\n"
        "        super().__init__()\n        self.a = adjacency().to_dense().to_sparse_csc()\n"
    )
    plain, other = arm(path, "forward"), arm(path, "forward", Replace(f"{path}:Stored"))
    torch.testing.assert_close(other.program.run(), plain.program.run())
    with pytest.raises(ConfigError, match=r"a is torch.strided, and the baseline's a is torch.sparse_csr: give both"):
        arm(path, "train", Replace(f"{path}:Stored"))
    with pytest.raises(ConfigError, match=r"a is torch.sparse_csc, and the baseline's a is torch.sparse_csr: give"):
        arm(path, "forward", Replace(f"{path}:Turned"))


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_sparse_parameter_cannot_be_trained(tmp_path: Path, layout: str) -> None:
    with pytest.raises(ConfigError, match=f"the parameter a is sparse_{layout}, and no optimizer of torch's updates"):
        arm(written(tmp_path, layout, "parameter"), "train")


def test_a_model_of_one_size_is_trained_without_odd_batches(tmp_path: Path) -> None:
    workload = Module(path=str(written(tmp_path, "csr", "buffer")), mode="forward_backward", odd_batch=True)
    with pytest.raises(NoReference, match="does not take 7 rows"):
        workload.build(torch.device("cpu"), torch.float32, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_on_a_gpu(tmp_path: Path, layout: str, held: str) -> None:
    one = arm(written(tmp_path, layout, held), "forward_backward", device="cuda")
    one.fresh, one.family = list(one.batches), input_families.NORMAL
    assert one.observe(Look(0)).size
    assert one.moved()[0] > 0
    assert (one.peak_memory(1).peak_mib or 0) > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_set_with_sparse_batches_has_a_size(layout: str) -> None:
    assert not DrawnSet(batches=[(made(layout), made(layout))]).larger_than(LARGE)
