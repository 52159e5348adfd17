"""A user's step or forward pass that a patch records in a CUDA graph: the same steps, whatever happens in between."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from optexp.errors import NoReference
from optexp.program import Program, ResidentFeed, gradients
from optexp.result import Verdict
from optexp.strategies.cuda_graph import CudaGraph
from optexp.strategy import UserFile
from optexp.user_code.handed_optimizer import Optimizer
from optexp.user_code.step_state import TrackedStepState
from optexp.user_code.train_step import TrainStep
from optexp.workloads.module import Module
from tests.export.test_patch import INPUTS, LEARNS, LOADER, MODEL, PAIR, applied, job, repository
from tests.test_every_choice import run

STEP_FILE = UserFile("cuda", "train", "Model", "Model.forward", None, "get_optimizer", None, "train_step")
FORWARD_FILE = UserFile("cuda", "forward", "Model", "Model.forward")
NOTES = {"parameters": 4}


def module_of(text: str) -> ModuleType:
    module = ModuleType("net")
    exec(compile(text, "net.py", "exec"), vars(module))
    return module


def plain_and_graphed(text: str, file: UserFile, on_gpu: str) -> tuple[ModuleType, ModuleType]:
    """The file, and the file with the block, which takes `on_gpu` for the test of the device."""
    block = CudaGraph().patch(NOTES, file).replace("first.is_cuda", on_gpu)
    return module_of(text), module_of(f"{text}\n\n{block}")


class PretendedGraph:
    """What torch.cuda.CUDAGraph does, on a CPU: recording computes nothing, and a replay writes where it wrote then."""

    replays = 0

    def __init__(self) -> None:
        self.owner: Any = None

    def capture_begin(self, **options: Any) -> None:
        return

    def capture_end(self) -> None:
        return

    def replay(self) -> None:
        type(self).replays += 1
        if (owner := self.owner) is None:  # it was recorded by another class
            return
        model, optimizers, form = owner.recorded
        gradients = [gradient for _, gradient in owner.gradients]
        for parameter in model.parameters():
            parameter.grad = None
        counts = [getattr(optimizer, "steps", 0) for optimizer in optimizers]
        result = owner.call(model, tree_unflatten(owner.static, form), *optimizers)
        for optimizer, count in zip(optimizers, counts, strict=True):
            if type(optimizer) is Optimizer:  # a replay calls nobody
                optimizer.steps = count
                if gradients:  # in their memory, where the graph's zero_grad left them
                    optimizer.show_gradients()
        for kept, parameter in zip(gradients, (p for p in model.parameters() if p.grad is not None), strict=True):
            kept.copy_(parameter.grad)
        if isinstance(result, Tensor):
            owner.result.copy_(result)


def pretend(kind: Any) -> None:
    """Makes a class `Graphed` record into pretended graphs."""
    record = kind.record

    def recording(self: Any, model: Any, leaves: Any, form: Any, optimizers: Any) -> None:
        tensors = [*model.parameters(), *(p for o in optimizers for s in o.state.values() for p in s.values())]
        before = [tensor.detach().clone() for tensor in tensors]
        assert torch.cuda.CUDAGraph is not None  # a name by which optexp knows such a class
        record(self, model, leaves, form, optimizers)
        self.recorded, self.graph.owner = (model, optimizers, form), self
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)

    kind.record = recording


class Stream:
    def wait_stream(self, other: object) -> None:
        return


@contextmanager
def inside(given: object, **options: Any) -> Iterator[None]:
    yield


@contextmanager
def captured(graph: PretendedGraph, **options: Any) -> Iterator[None]:
    graph.capture_begin(**options)
    yield
    graph.capture_end()


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """torch.cuda without a GPU."""
    for name, value in (("Stream", Stream), ("current_stream", Stream), ("stream", inside), ("graph", captured)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PretendedGraph)
    monkeypatch.setattr(PretendedGraph, "replays", 0)
    return pretend


SGD = ("AdamW(params, lr=1e-2)", "SGD(params, lr=1e-2, momentum=0.9)")  # the other has no form for graphs on a CPU
RETURNS = LEARNS.replace("    optimizer.zero_grad()", "    optimizer.zero_grad()\n    return x.sum()")


def batches(count: int, rows: int = 16) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(rows)
    return [(torch.randn(rows, 8, generator=made), torch.randn(rows, 4, generator=made)) for _ in range(count)]


def test_steps_are_those_of_the_plain_file(pretended: Callable[[Any], None]) -> None:
    plain, graphed = plain_and_graphed(MODEL + PAIR + RETURNS.replace(*SGD), STEP_FILE, "True")
    pretended(graphed.Graphed)
    models = [plain.Model(), graphed.Model()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [f.get_optimizer(m.parameters()) for f, m in zip((plain, graphed), models, strict=True)]
    assert isinstance(optimizers[1].param_groups[0]["lr"], Tensor)
    given = [*batches(6), *batches(1, rows=8), *batches(3)]  # another shape in between
    for index, batch in enumerate(given):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + index)  # as a schedule of the user's
        results = [f.train_step(m, batch, o) for f, m, o in zip((plain, graphed), models, optimizers, strict=True)]
        torch.testing.assert_close(results[1], results[0])
        for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert PretendedGraph.replays == 6


def test_another_model_is_recorded_anew(pretended: Callable[[Any], None]) -> None:
    _, graphed = plain_and_graphed(MODEL + PAIR + RETURNS.replace(*SGD), STEP_FILE, "True")
    pretended(graphed.Graphed)
    for _ in range(2):
        model = graphed.Model()
        optimizer = graphed.get_optimizer(model.parameters())
        before = copy.deepcopy(model.state_dict())
        for batch in batches(4):
            graphed.train_step(model, batch, optimizer)
        assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert PretendedGraph.replays == 2


def frozen(model: Any, optimizer: Any) -> None:
    model.first.weight.requires_grad_(False)


def swapped(model: Any, optimizer: Any) -> None:
    model.second = torch.nn.Linear(16, 4)


def hooked(model: Any, optimizer: Any) -> None:
    model.first.register_forward_hook(lambda module, given, found: found * 2)


def weighed(model: Any, optimizer: Any) -> None:
    type(model).forward.__globals__["WEIGHT"] = 2.0


def summed(model: Any, optimizer: Any) -> None:
    model(torch.ones(2, 8)).sum().backward()


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "a number of the file": weighed,
    "a part in evaluation": lambda model, optimizer: model.second.eval(),
    "a number of the model": lambda model, optimizer: setattr(model, "scale", 2.0),
    "a number in a list of the model": lambda model, optimizer: model.scales.append(model.scales.pop() * 2),
    "an option of the optimizer": lambda model, optimizer: optimizer.param_groups[0].update(weight_decay=0.1),
    "a parameter without gradient": frozen,
    "another layer": swapped,
    "a hook": hooked,
    "gradients to add to": summed,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_graph_takes_for_constant_is_compared(change: str, pretended: Callable[[Any], None]) -> None:
    text = MODEL.replace("* 0.5", "* self.scale * self.scales[0] * weight()").replace(
        "        self.first", "        self.scale, self.scales = 0.5, [1.0]\n        self.first"
    )
    text += "\n\nWEIGHT = 1.0\n\ndef weight(): return WEIGHT\n"
    plain, graphed = plain_and_graphed(text + PAIR + RETURNS.replace(*SGD), STEP_FILE, "True")
    pretended(graphed.Graphed)
    models = [plain.Model(), graphed.Model()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [f.get_optimizer(m.parameters()) for f, m in zip((plain, graphed), models, strict=True)]
    for index, batch in enumerate(batches(6)):
        if index == 5:
            for model, optimizer in zip(models, optimizers, strict=True):
                torch.manual_seed(0)
                CHANGES[change](model, optimizer)
        for file, model, optimizer in zip((plain, graphed), models, optimizers, strict=True):
            file.train_step(model, batch, optimizer)
        for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert PretendedGraph.replays == 2, "the last step ran as it is"


def test_arguments_of_other_names_are_no_replay(pretended: Callable[[Any], None]) -> None:
    text = MODEL.replace("(self, x)", "(self, x, more=0, less=0)").replace("* 0.5", "* 0.5 + more - less")
    plain, graphed = plain_and_graphed(text + INPUTS, FORWARD_FILE, "True")
    pretended(graphed.Graphed)
    models = [plain.Model().eval(), graphed.Model().eval()]
    models[1].load_state_dict(models[0].state_dict())
    x, y = torch.ones(16, 8), torch.ones(16, 4)
    with torch.no_grad():
        for name in ("more", "more", "more", "more", "less"):
            results = [model(x, **{name: y}) for model in models]
            torch.testing.assert_close(results[1], results[0])
    assert PretendedGraph.replays == 1


def test_training_and_evaluation_run_a_graphed_forward_as_it_is(pretended: Callable[[Any], None]) -> None:
    plain, graphed = plain_and_graphed(MODEL + INPUTS, FORWARD_FILE, "True")
    model, same = graphed.Model(), plain.Model()
    same.load_state_dict(model.state_dict())
    pretended(graphed.Graphed)
    x = torch.ones(16, 8)
    for _ in range(6):
        model(x).sum().backward()
    with torch.no_grad():
        for _ in range(6):
            model(x)  # in training mode, where dropout would drop
    assert PretendedGraph.replays == 0


def test_results_that_the_next_replay_would_overwrite_are_refused(pretended: Callable[[Any], None]) -> None:
    odd = RETURNS.replace(*SGD).replace("return x.sum()", "return type('Result', (), {'loss': x.sum()})()")
    _, graphed = plain_and_graphed(MODEL + PAIR + odd, STEP_FILE, "True")
    model = graphed.Model()
    optimizer = graphed.get_optimizer(model.parameters())
    for batch in batches(3):
        graphed.train_step(model, batch, optimizer)
    with pytest.raises(TypeError, match="returns tensors, in lists and dicts, and no Result"):
        graphed.train_step(model, batch, optimizer)


def test_on_a_cpu_the_file_runs_as_it_was() -> None:
    plain, graphed = plain_and_graphed(MODEL + PAIR + RETURNS, STEP_FILE, "first.is_cuda")
    model, same = graphed.Model(), plain.Model()
    same.load_state_dict(model.state_dict())
    optimizers = [plain.get_optimizer(same.parameters()), graphed.get_optimizer(model.parameters())]
    for batch in batches(6):
        plain.train_step(same, batch, optimizers[0])
        graphed.train_step(model, batch, optimizers[1])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))


# --- what optexp makes of such a step ----------------------------------------------------------------------------


def test_memory_of_a_graph_is_not_put_back_but_what_the_step_inside_remembers() -> None:
    counted = RETURNS.replace("def train_step", "COUNTS = {'steps': 0}\n\n\ndef train_step").replace(
        "    return x.sum()", "    COUNTS['steps'] += 1"
    )
    _, graphed = plain_and_graphed(MODEL + PAIR + counted, STEP_FILE, "first.is_cuda")
    model = graphed.Model()
    optimizer = graphed.get_optimizer(model.parameters())
    state = TrackedStepState(graphed.train_step, model, optimizer)
    assert [name for name in state.slots if "call" in name or "held" in name] == []
    assert any("COUNTS" in name for name in state.slots)
    before = state.read()
    graphed.train_step(model, batches(1)[0], optimizer)
    held = graphed.train_step.held
    assert graphed.COUNTS == {"steps": 1}
    state.write(before)
    assert graphed.COUNTS == {"steps": 0}
    assert graphed.train_step.held is held


def test_only_what_records_graphs_may_leave_the_optimizer_uncalled() -> None:
    _, graphed = plain_and_graphed(MODEL + PAIR + RETURNS, STEP_FILE, "first.is_cuda")
    assert TrainStep(graphed.train_step, lambda batch: batch).replays
    assert not TrainStep(lambda model, batch, optimizer: None, lambda batch: batch).replays


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(
    ("text", "file"), [(MODEL + PAIR + RETURNS.replace(*SGD), STEP_FILE), (MODEL + INPUTS, FORWARD_FILE)]
)
def test_a_file_that_replays_is_verified_against_the_plain_one(text: str, file: UserFile, tmp_path: Path) -> None:
    block = CudaGraph().patch(NOTES, file).replace("first.is_cuda", "True")
    shown = "\n\nfrom tests.export.test_graphed_file import pretend\n\npretend(Graphed)\n"
    (tmp_path / "before.py").write_text(text)
    (tmp_path / "after.py").write_text(f"{text}\n\n{block}{shown}")
    second = ["strategy=replace", f"strategy.replace.target={tmp_path / 'after.py'}"]
    result = job(tmp_path / "job", tmp_path / "before.py", *second, mode=file.mode)
    assert result.verdict is Verdict.VERIFIED, result.headline
    assert PretendedGraph.replays > 10
    itself = job(tmp_path / "itself", tmp_path / "after.py", mode=file.mode)
    assert itself.verdict is Verdict.VERIFIED, itself.headline


LAZY = """

class Lazy:
    def __init__(self, step):
        self.step, self.calls, self.last = step, 0, None

    def __call__(self, *arguments):
        self.calls += 1
        if self.calls <= 60:
            self.last = self.step(*arguments)
        return self.last

    def record(self):
        return torch.cuda.CUDAGraph()


"""
LAZY_STEP = f"{LAZY}train_step = Lazy(train_step)\n"
LAZY_FORWARD = f"{LAZY}lazy = Lazy(Model.forward)\nModel.forward = lambda self, x: lazy(self, x)\n"


def test_one_step_left_out_is_no_replay(tmp_path: Path) -> None:
    """However seldom: a step that calls no optimizer must have replayed a graph."""
    (tmp_path / "after.py").write_text(MODEL + PAIR + RETURNS + LAZY_STEP.replace("<= 60", "% 50"))
    program = Module(path=str(tmp_path / "after.py"), mode="train").build(torch.device("cpu"), torch.float32, 0)
    batch = {str(index): part for index, part in enumerate(batches(1)[0])}
    with pytest.raises(NoReference, match="0 times"):
        _ = [program.step(program, batch) for _ in range(50)]


TRIVIAL_STEP = """

class Trivial:
    def __init__(self, step):
        self.step, self.calls, self.graph = step, 0, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            pass

    def __call__(self, *arguments):
        self.calls += 1
        self.graph.replay()
        return self.step(*arguments) if self.calls % 50 else torch.ones(())


train_step = Trivial(train_step)
"""


@pytest.mark.usefixtures("pretended")
def test_a_replay_steps_only_where_the_optimizers_step_was_recorded(tmp_path: Path) -> None:
    (tmp_path / "after.py").write_text(MODEL + PAIR + RETURNS + TRIVIAL_STEP)
    program = Module(path=str(tmp_path / "after.py"), mode="train").build(torch.device("cpu"), torch.float32, 0)
    batch = {str(index): part for index, part in enumerate(batches(1)[0])}
    for _ in range(49):
        program.step(program, batch)
    with pytest.raises(NoReference, match="in replays of CUDA graphs too, 0 times"):
        program.step(program, batch)


def test_gradients_that_a_recorded_step_clears_stay_to_be_compared(pretended: Callable[[Any], None]) -> None:
    cleared = RETURNS.replace(*SGD).replace("optimizer.zero_grad()", "model.zero_grad_by_hand()")
    by_hand = "    def zero_grad_by_hand(self):\n        for p in self.parameters():\n            p.grad = None\n"
    text = MODEL.replace("    def forward", f"{by_hand}\n    def forward") + PAIR + cleared
    _, graphed = plain_and_graphed(text, STEP_FILE, "True")
    pretended(graphed.Graphed)
    model = graphed.Model()
    step = TrainStep(graphed.train_step, unpack=lambda batch: batch)
    program = Program(
        model, step, ResidentFeed(torch.device("cpu")), optimizer=graphed.get_optimizer([*model.parameters()])
    )
    for batch in batches(6):
        program.step(program, batch)
        assert len(gradients(program)) == 4
    assert PretendedGraph.replays == 3


@pytest.mark.parametrize(
    ("text", "lazy", "mode"), [(MODEL + PAIR + RETURNS, LAZY_STEP, "train"), (MODEL + INPUTS, LAZY_FORWARD, "forward")]
)
def test_what_names_a_graph_and_leaves_steps_out_is_caught(text: str, lazy: str, mode: str, tmp_path: Path) -> None:
    (tmp_path / "before.py").write_text(text)
    (tmp_path / "after.py").write_text(text + lazy)
    settings = ["workload=module", f"workload.path={tmp_path / 'before.py'}", f"workload.mode={mode}"]
    second = ["strategy=replace", f"strategy.replace.target={tmp_path / 'after.py'}"]
    result = run(tmp_path / "job", *settings, *second)
    assert result.verdict in (Verdict.NOT_EQUIVALENT, Verdict.INVALID, Verdict.UNVERIFIED), result.headline
    assert result.speedup is None


# --- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("text", "mode", "stack"),
    [
        (MODEL + LOADER + RETURNS, "train", "amp,fused_optimizer,pinned_memory,cuda_graph"),
        (MODEL + PAIR + RETURNS.replace(*SGD), "train", "cuda_graph"),
        (MODEL + INPUTS, "forward", "amp,fusion,cuda_graph"),
        (MODEL + INPUTS, "forward", "inference_mode,cuda_graph"),
    ],
)  # fmt: skip
def test_the_patched_file_is_verified_and_replays(text: str, mode: str, stack: str, tmp_path: Path) -> None:
    root = repository(tmp_path, {"net.py": text.encode()})
    settings = ["device=cuda", "isolation=process"]
    result = job(tmp_path / "job", root / "net.py", *settings, stack=stack, mode=mode)
    assert result.verdict is Verdict.VERIFIED, result.headline
    new = applied(tmp_path, root, tmp_path / "job" / "optimized.patch", "net.py")
    second = [*settings, "strategy=replace", f"strategy.replace.target={new}"]
    second += ["strategy.replace.precision=bfloat16"] * ("amp" in stack)
    again = job(tmp_path / "again", root / "net.py", *second, mode=mode)
    assert again.verdict is Verdict.VERIFIED, again.headline
    alone = job(tmp_path / "alone", new, *settings, mode=mode)  # the next baseline, against itself
    assert alone.verdict is Verdict.VERIFIED, alone.headline


@pytest.mark.gpu
def test_graphed_steps_are_those_of_the_plain_file_on_a_gpu() -> None:
    plain, graphed = plain_and_graphed(MODEL + PAIR + RETURNS, STEP_FILE, "first.is_cuda")
    models = [file.Model().cuda() for file in (plain, graphed)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [f.get_optimizer(m.parameters()) for f, m in zip((plain, graphed), models, strict=True)]
    given = [*batches(6), *batches(1, rows=8), *batches(3)]
    for index, host in enumerate(given):
        batch = tuple(tensor.pin_memory() for tensor in host)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + index)
        plain.train_step(models[0], tuple(t.cuda() for t in batch), optimizers[0])
        graphed.train_step(models[1], tuple(t.to("cuda", non_blocking=True) for t in batch), optimizers[1])
        for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert graphed.train_step.graph is not None
