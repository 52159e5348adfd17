"""What can be said of CUDA Graphs without a GPU: reasons, and what surrounds a replay. The rest: test_on_gpu.py."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from optexp.errors import Unsupported
from optexp.program import Program, clear_gradients
from optexp.strategies.amp import grad_scaler
from optexp.strategies.cuda_graph import CudaGraph, UpdatedOutside, outside, prepare_optimizer
from optexp.trace import Call, Kernel, Span, Trace
from optexp.transforms import capture
from optexp.transforms.capture import CapturedStep, GraphedModel, call_of, culprit, first, graph_model, recording
from optexp.workloads.gelu import Gelu
from optexp.workloads.mlp import Mlp
from optexp.workloads.pipeline import Pipeline

CUDA = torch.device("cuda")


class EagerReplay:
    """Stands in for a captured graph: runs the step on the static inputs, into the static outputs and gradients."""

    def __init__(self, program) -> None:
        self.program = program
        self.inputs = [t.clone() for t in program.feed.batches[0]]
        self.outputs = program.step(program, tuple(self.inputs))
        self.gradients = [(p, p.grad) for p in program.model.parameters()]

    def replay(self) -> None:
        outputs = self.program.step(self.program, tuple(self.inputs))
        for name, static in self.outputs.items():
            static.copy_(outputs[name])
        for parameter, static in self.gradients:
            static.copy_(parameter.grad)
            parameter.grad = static


@pytest.fixture
def captured(build):
    program = build(Mlp(mode="train", optim="sgd", dim=8, batch_size=4))
    rates = prepare_optimizer(program)
    graph = EagerReplay(program)
    return replace(program, step=CapturedStep(graph, graph.inputs, graph.outputs, graph.gradients, rates))


def test_a_cpu_is_told_what_to_do_in_one_line(build):
    reason = CudaGraph().unsupported(build(Gelu(size=4)), torch.device("cpu"))
    assert reason == (
        "CUDA Graphs need a CUDA device, and this run is on the CPU:"
        " use device=cuda on a machine with an NVIDIA GPU, or try strategy=fusion"
    )


@pytest.mark.parametrize(
    ("optimizer", "scaled", "expected"),
    [
        (torch.optim.AdamW, False, None),
        (torch.optim.SGD, True, None),
        (torch.optim.RMSprop, False, None),
        (torch.optim.RMSprop, True, "needs a fused optimizer, which RMSprop has not"),
        (torch.optim.LBFGS, False, "LBFGS keeps its step on the CPU"),
        (torch.optim.Adagrad, False, "Adagrad keeps its step on the CPU"),
        (torch.optim.Adagrad, True, "needs a fused optimizer, which Adagrad has not"),
    ],
)
def test_optimizers_that_cannot_be_captured_are_named(build, optimizer, scaled: bool, expected: str | None):
    program = build(Mlp(mode="train", dim=4, batch_size=2))
    program = replace(
        program,
        optimizer=optimizer(program.model.parameters(), lr=0.1),
        scaler=grad_scaler(program.device) if scaled else None,
    )
    reason = CudaGraph().unsupported(program, CUDA)
    assert reason is None if expected is None else expected in reason


def test_batches_of_another_shape_are_refused_not_broadcast(captured):
    x, y = captured.feed.batches[1]
    with pytest.raises(Unsupported, match=r"captured for \(4, 8\) torch.float32, got \(1, 8\) .*drop_last=True"):
        captured.step(captured, (x[:1], y))
    with pytest.raises(ValueError, match=r"got \(4, 8\) torch.float64"):
        captured.step(captured, (x.double(), y))


def test_an_assigned_learning_rate_reaches_the_graph(captured):
    batch, weight = captured.feed.batches[1], captured.model[0].weight
    (rate,) = captured.step.rates
    captured.optimizer.param_groups[0]["lr"] = 0.0
    before = weight.detach().clone()
    captured.step(captured, batch)
    assert torch.equal(weight, before)
    captured.optimizer.param_groups[0]["lr"] = 0.5
    captured.step(captured, batch)
    assert not torch.equal(weight, before)
    assert captured.optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


def test_gradients_come_back_after_someone_cleared_them(captured):
    parameter, gradient = captured.step.gradients[0]
    clear_gradients(captured.model)
    captured.step(captured, captured.feed.batches[1])
    assert parameter.grad is gradient


@pytest.mark.parametrize("scaled", [False, True])
def test_prepared_sgd_steps_as_before(build, observe, scaled: bool):
    workload = Mlp(mode="train", optim="sgd", dim=8, batch_size=4, lr=0.1)
    prepared = build(workload)
    if scaled:
        prepared = replace(prepared, scaler=grad_scaler(prepared.device))
    prepare_optimizer(prepared)
    assert prepared.optimizer.param_groups[0]["fused"]
    for ours, plain in zip(observe(prepared), observe(build(workload)), strict=True):
        for name, value in plain.items():
            torch.testing.assert_close(ours[name], value)


def test_prepared_adam_stays_unfused_unless_scaled(build):
    workload = Mlp(mode="train", dim=8, batch_size=4)
    for scaler, fused in ((None, None), (grad_scaler(torch.device("cpu")), True)):
        program = replace(build(workload), scaler=scaler)
        prepare_optimizer(program)
        (group,) = program.optimizer.param_groups
        assert group["capturable"] is True
        assert group["fused"] is fused
        assert group["lr"].item() == pytest.approx(1e-3)


def test_a_compiled_sgd_stays_compiled(build):
    """A fused one is not traced: compiling it would have changed nothing."""
    program = build(Mlp(mode="train", optim="sgd", dim=4, batch_size=2))
    program.optimizer.step = torch.compile(program.optimizer.step, backend="eager")
    prepare_optimizer(program)
    assert not program.optimizer.param_groups[0]["fused"]


def test_a_smaller_scope_takes_any_optimizer(build):
    program = build(Mlp(mode="train", dim=4, batch_size=2))
    program = replace(program, optimizer=torch.optim.LBFGS(program.model.parameters()))
    assert "strategy.cuda_graph.scope=forward_backward" in CudaGraph().unsupported(program, CUDA)
    for scope in ("forward_backward", "model"):
        assert CudaGraph(scope).unsupported(program, CUDA) is None


def test_a_step_that_reads_host_memory_is_refused(build):
    reason = CudaGraph().unsupported(build(Pipeline(rows=8, dim=4)), CUDA)
    assert "takes its batch from host memory" in reason


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("optim", ["adamw", "sgd"])
def test_an_update_outside_computes_the_same(build, observe, optim: str, scaled: bool):
    workload = Mlp(mode="train", optim=optim, dim=8, batch_size=4)
    program, plain = build(workload), build(workload)
    if scaled:
        program, plain = (replace(p, scaler=grad_scaler(p.device)) for p in (program, plain))
    before = program.model[0].weight.detach().clone()
    inside = outside(program)
    graph = EagerReplay(inside)
    assert torch.equal(program.model[0].weight, before), "nothing steps while a step is captured"
    assert inside.state().keys() == program.state().keys()
    program = replace(program, step=UpdatedOutside(CapturedStep(graph, graph.inputs, graph.outputs, graph.gradients)))
    for ours, theirs in zip(observe(program), observe(plain), strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value)


def test_the_one_call_of_the_model_is_found_and_two_are_refused(build):
    program = build(Mlp(mode="train", dim=8, batch_size=4))
    before = program.model[0].weight.detach().clone()
    (x,), options = call_of(program)
    assert torch.equal(program.model[0].weight, before)
    assert (tuple(x.shape), options) == ((4, 8), {})

    def twice(program: Program, batch):
        program.predict(batch)
        return {"output": program.predict(batch)}

    with pytest.raises(Unsupported, match="calls the model 2 times"):
        call_of(replace(program, step=twice))


@pytest.fixture
def uncaptured(streams, monkeypatch: pytest.MonkeyPatch):
    """Capturing without a GPU: what would be recorded runs."""
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda module, sample, **options: module(*sample))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(streams, "current", stream))
    return streams


class Noise(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.generator, self.unused = torch.Generator() if own else None, torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape, generator=self.generator)


@pytest.mark.usefixtures("uncaptured")
def test_the_graph_of_a_model_does_not_know_dice_of_its_own(build):
    program = build(Gelu(size=4))
    graph_model(replace(program, model=Noise(own=False)), warmup=3)
    with pytest.raises(Unsupported, match=r"a generator of its own.*scope=forward_backward or step"):
        graph_model(replace(program, model=Noise(own=True)), warmup=3)


def test_after_a_broken_capture_work_goes_on_where_it_was(build, uncaptured, monkeypatch: pytest.MonkeyPatch):
    undone: list[object] = []
    monkeypatch.setattr(capture, "abandon", lambda pool, program: undone.append(pool))
    program, side = build(Gelu(size=4)), uncaptured()

    def fail(ended: bool) -> None:
        with recording("the step", program):
            uncaptured.current = uncaptured.current if ended else side
            torch.ones(2).view(3)

    for ended in (True, False):
        with pytest.raises(Unsupported, match="the step cannot be captured"):
            fail(ended)
        assert uncaptured.current.name == "main"
        assert undone == [(0, 7)] * (not ended)


@pytest.mark.usefixtures("uncaptured")
def test_too_little_memory_is_not_called_uncapturable(build):
    def fail() -> None:
        with recording("the step", build(Gelu(size=4))):
            try:
                raise torch.OutOfMemoryError("no room")
            finally:
                raise RuntimeError("capture could not be ended")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        fail()


def test_lazy_things_need_a_step_before_the_capture():
    with pytest.raises(ValueError, match="warmup=0 must be at least 1"):
        CudaGraph(warmup=0)


@pytest.mark.usefixtures("uncaptured")
def test_a_model_that_returns_more_than_tensors_is_refused(build):
    program = build(Mlp(mode="forward", dim=8, batch_size=4))
    graph_model(program, warmup=3)
    with pytest.raises(Unsupported, match="the model returns NoneType, and its graph holds tensors alone"):
        graph_model(replace(program, forward=lambda x: (program.model(x), None)), warmup=3)


def test_a_graphed_model_takes_its_tensors_from_wherever_they_were_passed():
    seen = []
    model = GraphedModel(lambda *tensors: seen.extend(tensors), [torch.ones(2), torch.ones(3)])
    model(torch.zeros(2), "constant", mask=torch.zeros(3))
    assert [tuple(tensor.shape) for tensor in seen] == [(2,), (3,)]
    with pytest.raises(ValueError, match=r"captured for \(3,\)"):
        model(torch.zeros(2), mask=torch.zeros(1))


def test_the_recipe_of_a_model_calls_it_by_name_and_lets_gradients_reach_its_inputs(monkeypatch: pytest.MonkeyPatch):
    given = {}

    def graphed(module, sample, **options):
        given.update(options, grads=[tensor.requires_grad for tensor in sample])
        return lambda *tensors: module(*tensors)  # like torch's, it takes no names

    def model(x, *, scale):
        return x * scale[0]

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", graphed)
    batch = (torch.ones(2), torch.full((1,), 3.0), torch.zeros(2))
    names = {"torch": torch, "nn": torch.nn, "pool": None, "batches": iter([batch]), "model": torch.nn.Identity()}
    names["predict"] = lambda batch: model(batch[0], scale=batch[1])
    exec(CudaGraph("model").recipe({"grads": [True, False]}), names)
    assert given == {"num_warmup_iters": 3, "allow_unused_input": True, "pool": None, "grads": [True, False]}
    assert names["predict"](batch).tolist() == [3.0, 3.0]


def test_the_line_that_broke_the_capture_is_named():
    try:
        try:
            torch.ones(2).view(3)
        except RuntimeError:
            raise RuntimeError("capture could not be ended") from None
    except RuntimeError as error:
        text = culprit(first(error))
    assert "test_cuda_graph.py" in text
    assert "torch.ones(2).view(3)" in text
    assert "capture could not be ended" not in text


def test_evidence_is_a_graph_launch():
    steps = (Span("step", 0.0, 4.0), Span("step", 5.0, 4.0))
    plain = Trace(steps, api=(Call("cudaLaunchKernel", 0.0, 1.0),) * 6, kernels=(Kernel("k", 0.0, 1.0),) * 6)
    graph = Trace(
        steps,
        api=(Call("cudaGraphLaunch", 0.0, 1.0),) * 2,
        kernels=(Kernel("k", 0.0, 1.0, in_graph=True),) * 6,
    )
    evidence = CudaGraph().evidence(plain, graph, {}, {})
    assert evidence.engaged
    assert evidence.text == "1 graph launch a step, with 3 kernels inside"
    assert CudaGraph("model").evidence(plain, graph, {}, {}).text.endswith("3 kernels inside and 0 outside")
    assert not CudaGraph().evidence(plain, plain, {}, {}).engaged
    less = replace(plain, kernels=plain.kernels[:4])
    told = CudaGraph().evidence(less, graph, {}, {}).text
    assert told.endswith(
        "3 kernels inside (2 without a graph: while captured, the model or the optimizer takes another way)"
    )


def test_unsupported_is_raised_before_anything_touches_cuda(build):
    with pytest.raises(Unsupported, match="CUDA Graphs need a CUDA device"):
        build(Gelu(size=4), CudaGraph())


def test_what_a_captured_step_registers_has_its_values_before_the_first_replay() -> None:
    """A capture computes nothing: the first step would seem to change what the plain program's leaves alone."""
    program = Mlp("forward", dim=4, layers=1, batch_size=2).build(torch.device("cpu"), torch.float32, 0)
    weights, known = next(program.model.parameters()), set(program.state())
    program.model.register_buffer("table", torch.full((3,), float("nan")), persistent=False)
    before = weights.detach().clone()

    class Graph:
        def replay(self) -> None:
            program.model.get_buffer("table").fill_(2.0)
            weights.data.add_(1.0)

    capture.fill(program, Graph(), known)
    assert torch.equal(program.model.get_buffer("table"), torch.full((3,), 2.0))
    assert torch.equal(weights, before)
