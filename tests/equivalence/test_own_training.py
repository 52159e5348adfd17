"""Optimizers and training steps of a user's own: honest candidates pass, and wrong ones are caught."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optexp.equivalence.fp64_reference import Fp64Reference
from optexp.equivalence.input_families import ONE_BY_ONE
from optexp.equivalence.live_inputs import dead_inputs
from optexp.errors import NoReference
from optexp.program import Program, Snapshot
from optexp.strategies.amp import Amp
from optexp.strategy import REASSOCIATES, precision
from optexp.user_code.drawn_alike import Seeded
from optexp.user_code.importing import import_file
from optexp.workloads.module import Module

CPU = torch.device("cpu")
HEAD = """
import torch
from torch import nn
def Model(): return nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 10))
def get_inputs(): return [torch.randn(16, 32), torch.randint(10, (16,))]
"""
COUNTS = """
class Own(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            s = self.state[p]
            if not s:
                s.update(step=0, size=0.0, first=True, m=torch.zeros_like(p), v=torch.zeros_like(p))
            s["step"] += 1
            s["size"] += float(p.grad.norm())
            s["first"] = s["step"] < 2
            s["m"].lerp_(p.grad, 0.1)
            s["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            count = s["step"] if getattr(self, "corrects", True) else 10000
            update = (s["m"] / (1 - 0.9**count)) / ((s["v"] / (1 - 0.999**count)).sqrt() + 1e-6)
            p.sub_(self.param_groups[0]["lr"] * update)

def get_optimizer(params): return Own(params)
"""
SPARSE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(50, 16, padding_idx=0, sparse=True)
    def forward(self, ids): return self.rows(ids).sum(1)
def get_inputs(): return [torch.randint(50, (16, 8)), torch.randint(16, (16,))]
def get_optimizer(params): return torch.optim.%s
"""
AVERAGE = """
ema = []
def get_optimizer(params):
    ema[:] = [p.detach().clone() for p in params]
    return torch.optim.AdamW(params, lr=1e-3)
def train_step(model, batch, optimizer):
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for kept, p in zip(ema, model.parameters()):
            kept.lerp_(p, 1 - 0.999)
    return loss
"""
DRAWS = """
def get_optimizer(params): return torch.optim.SGD(params, lr=0.1)
def train_step(model, batch, optimizer):
    share = torch.rand(len(batch[0]), 1)
    noisy = (1 - share) * batch[0] + share * torch.randn_like(batch[0])
    loss = nn.functional.cross_entropy(model(noisy), batch[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
"""


class Apart(Module):
    """Every arm has globals of its own, as in a process of its own."""

    def build(self, device, dtype, seed):
        return Module(path=self.path, mode=self.mode).build(device, dtype, seed)


def written(folder: Path, text: str) -> Module:
    path = folder / "mine.py"
    path.write_text(HEAD + text)
    return Apart(path=str(path), mode="train")


def amp(program: Program) -> Program:
    program.feed.reset([(torch.randn(16, 32), torch.randint(10, (16,)))])
    return Amp("bfloat16").apply(program)[0]


def uncorrected(program: Program) -> Program:
    program.optimizer.corrects = False
    return program


def uncounted(program: Program) -> Program:
    inner = program.step

    def step(program, batch):
        outputs = inner(program, batch)
        for state in program.optimizer.state.values():
            state["step"] = 1
        return outputs

    return replace(program, step=step)


def averaging(decay: float):
    """The step with the average as one call for all parameters."""

    def change(program: Program) -> Program:
        inner, ema = program.step, program.step.function.__globals__["ema"]  # type: ignore[attr-defined]

        def step(program, batch):
            kept = [average.clone() for average in ema]
            outputs = inner(program, batch)
            torch._foreach_mul_(kept, decay)
            torch._foreach_add_(kept, [p.detach() for p in program.model.parameters()], alpha=1 - decay)
            torch._foreach_copy_(ema, kept)
            return outputs

        return replace(program, step=step)

    return change


def test_numbers_that_an_optimizer_counts_in_python_are_put_back(tmp_path):
    program = written(tmp_path, COUNTS).build(CPU, torch.float32, seed=0)
    program.feed.reset(written(tmp_path, COUNTS).batches(torch.Generator().manual_seed(1), 1))
    (first, *_) = program.optimizer.state.values()
    start, kept = Snapshot(program), {key: first[key] for key in ("step", "size", "first")}
    assert (kept["step"], type(kept["step"]), type(kept["size"]), type(kept["first"])) == (0, int, float, bool)
    once = [program.run()["loss"].clone() for _ in range(3)]
    assert first["step"] == 3
    start.restore(program)
    assert {key: first[key] for key in kept} == kept
    assert [type(first[key]) for key in kept] == [int, float, bool]
    assert once == [program.run()["loss"] for _ in range(3)]


def test_an_optimizer_that_counts_in_python_is_verified(check, tmp_path):
    workload = written(tmp_path, COUNTS)
    assert check(workload).ok
    assert check(workload, amp, precision("bfloat16")).ok
    wrong = check(workload, uncorrected)
    assert wrong.worst.tensor.startswith("change/")
    wrong = check(workload, uncounted)
    assert any(failure.tensor.endswith("/step") for failure in wrong.failures)


@pytest.mark.parametrize("optimizer", ["SparseAdam(params)", "SGD(params, lr=0.1, momentum=0.9)", "Adagrad(params)"])
def test_sparse_gradients_are_verified(check, optimizer, tmp_path):
    workload = written(tmp_path, SPARSE % optimizer)
    assert check(workload).ok

    def faster(program: Program) -> Program:
        program.optimizer.param_groups[0]["lr"] *= 1.01
        return program

    wrong = check(workload, faster)
    assert wrong.worst.tensor == "change/rows.weight"
    assert "lr of rows.weight is" in wrong.headline


@pytest.mark.parametrize("contract", [REASSOCIATES, precision("bfloat16")], ids=str)
def test_an_average_of_the_parameters_is_compared(check, contract, tmp_path):
    workload = written(tmp_path, AVERAGE)
    cast = amp if contract.dtype else lambda program: program
    assert check(workload, lambda program: averaging(0.999)(cast(program)), contract).ok
    wrong = check(workload, lambda program: averaging(0.9991)(cast(program)), contract)
    if contract == REASSOCIATES:
        assert wrong.worst.tensor.startswith("ema")


@pytest.mark.parametrize(("right", "wrong"), [("randn", "randn"), ("share * torch", "1.01 * share * torch")])
def test_a_step_that_draws_random_numbers_is_verified(check, right: str, wrong: str, tmp_path):
    workload = written(tmp_path, DRAWS)
    other = tmp_path / "other.py"
    other.write_text((HEAD + DRAWS).replace(right, wrong))

    def otherwise(program: Program) -> Program:
        seeded = program.step.function  # type: ignore[attr-defined]
        assert isinstance(seeded, Seeded)
        seeded.function = import_file(other, "workload.path", anew=True).train_step
        return program

    verified = check(workload, otherwise)
    assert verified.ok is (right == wrong), verified.headline
    if verified.ok:
        made = Module(path=workload.path, mode="train")
        made.build(CPU, torch.float32, 0)
        assert any("draws random numbers" in note for note in made.notes())


ALTERNATING = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 10)
    def forward(self, x): return self.head(self.body(x))
calls = 0
def get_optimizer(params): return torch.optim.SGD(params, lr=0.1)
def train_step(model, batch, optimizer):
    global calls
    calls += 1
    found = model.body(batch[0])
    loss = nn.functional.cross_entropy(model.head(found if calls % 2 == 0 else found.detach()), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
"""


def test_a_gradient_that_is_zero_in_the_second_step_is_judged_by_its_terms(check, tmp_path):
    def rounded(by):
        def change(program):
            program.model.body[0].bias.register_hook(lambda gradient: gradient + by)
            return program

        return change

    found = check(written(tmp_path, ALTERNATING), rounded(1e-9))
    assert found.ok
    assert not found.undecided
    assert not check(written(tmp_path, ALTERNATING), rounded(1e-3)).ok


REPLAY = """
memory = [(torch.zeros(16, 32), torch.zeros(16, dtype=torch.int64))]
def get_optimizer(params): return torch.optim.SGD(params, lr=0.1)
def train_step(model, batch, optimizer):
    x, y = memory[-1]
    memory.append(tuple(batch))
    loss = nn.functional.cross_entropy(model(x.to(model[0].weight.dtype)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
"""


def test_inputs_that_only_later_steps_read_matter(tmp_path):
    for text, read in ((REPLAY, True), (REPLAY.replace("memory[-1]", "memory[0]"), False)):
        fp64 = Fp64Reference(written(tmp_path, text), CPU, torch.float32, 0)
        fp64.draw(1, 3, ONE_BY_ONE)
        with nullcontext() if read else pytest.raises(NoReference, match="depends on no input"):
            assert dead_inputs(fp64) == []


def test_a_step_without_a_backward_pass_is_told_so(tmp_path):
    text = REPLAY.replace("    loss.backward()\n", "").replace("memory[-1]", "batch")
    fp64 = Fp64Reference(written(tmp_path, text.replace("    return loss\n", "")), CPU, torch.float32, 0)
    fp64.draw(1, 3, ONE_BY_ONE)
    with pytest.raises(NoReference, match=r"computes no gradient.*call backward\(\)"):
        dead_inputs(fp64)


SKIPS = """
import torch
from torch import nn

class Model(nn.Module):
    limit, twice = 5.0, False
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    def forward(self, x): return self.body(x)
def get_inputs(): return [torch.randn(64, 16), torch.randint(4, (64,))]
def get_optimizer(params): return torch.optim.AdamW(params, lr=1e-3)
def train_step(model, batch, optimizer):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    if nn.utils.clip_grad_norm_(model.parameters(), 1.0) < model.limit:
        optimizer.step()
    return loss
"""


@pytest.mark.parametrize(("limit", "ok"), [(5.0, True), (6.0, True), (float("inf"), False), (0.0, None)])
def test_an_update_that_a_norm_leaves_out(check, tmp_path: Path, limit: float, ok: bool | None) -> None:
    """Inputs of a large mean have gradients beyond the limit: there the baseline makes no update."""
    path = tmp_path / "port.py"
    path.write_text(SKIPS)

    def change(program: Program) -> Program:
        program.model.limit = limit
        return program

    options = {"seeds": 1, "steps": 1, "families": ["offset"]}
    if ok is None:
        with pytest.raises(NoReference, match="a call that leaves its update out is not compared"):
            check(Module(path=str(path), mode="train"), change, **options)
        return
    found = check(Module(path=str(path), mode="train"), change, **options)
    assert found.ok is ok, found.headline
    assert ok or "update fails G0: the candidate makes one, and the baseline leaves it out" in found.headline
    assert (
        any("inputs of family offset prove nothing: reference: train_step called" in note for note in found.notes) is ok
    )


FUNCTIONAL = """
import torch
from torch import nn

Model = lambda: nn.Linear(16, 4)
def get_inputs(): return [torch.randn(64, 16), torch.randint(4, (64,))]
trained = None
def train_step(model, batch, optimizer):
    global trained
    trained = trained or {name: p.detach().clone() for name, p in model.named_parameters()}
    def loss(values):
        return nn.functional.cross_entropy(torch.func.functional_call(model, values, (batch[0],)), batch[1])
    slopes, value = torch.func.grad_and_value(loss)(trained)
    trained = {name: p - 0.1 * slopes[name] for name, p in trained.items()}
    return value
"""


def test_parameters_that_a_dict_holds_are_named_as_the_cause(check, tmp_path: Path) -> None:
    """The file has no get_optimizer() that could be left out."""
    path = tmp_path / "port.py"
    path.write_text(FUNCTIONAL)
    with pytest.raises(NoReference, match="copies of them that it trains, as in a dict, are not compared"):
        check(Module(path=str(path), mode="train"), steps=1, seeds=1)


RAISES = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)
    def forward(self, x):
        narrow = bool((x.new_ones(()) + 1e-10) == 1)
        if narrow and bool((x[0] == 0).all()):
            raise ValueError("a sample is zero")
        return self.linear(x)

def get_inputs(): return [torch.randn(64, 16)]
"""


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_a_baseline_that_takes_no_inputs_of_a_family_is_compared_on_others(
    check, tmp_path: Path, factor: float
) -> None:
    """As where a gradient is NaN at a zero, and the next step's solver refuses the parameters."""
    path = tmp_path / "model.py"
    path.write_text(RAISES)

    def change(program: Program) -> Program:
        inner = program.step
        return replace(program, step=lambda p, batch: {n: factor * t for n, t in inner(p, batch).items()})

    found = check(Module(path=str(path)), change, seeds=1, families=["corners"])
    assert found.ok is (factor == 1.0), found.headline
    told = [note for note in found.notes if note.startswith("inputs of family corners prove nothing: baseline: ")]
    assert len(told) == found.ok, found.notes
