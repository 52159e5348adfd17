"""The same optimizer in another implementation: the same updates, its state kept, and proof that torch took it."""

from dataclasses import replace

import pytest
import torch

from optexp.errors import Unsupported
from optexp.strategies.amp import Amp
from optexp.strategies.cuda_graph import CudaGraph
from optexp.strategies.fused_optimizer import FusedOptimizer, implement
from optexp.strategy import compose
from optexp.trace import Kernel, Op, Span, Trace, record
from optexp.workloads.mlp import Mlp

FUSED = (
    "void at::native::multi_tensor_apply_kernel<at::native::FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor>"
)
FOREACH = "void at::native::multi_tensor_apply_kernel<at::native::TensorListMetadata<1>, BinaryOpScalarFunctor<float>>"


def small(optim: str = "adamw") -> Mlp:
    return Mlp(mode="train", dim=8, batch_size=4, optim=optim, lr=0.1)


@pytest.mark.parametrize("optim", ["adamw", "sgd"])
@pytest.mark.parametrize("implementation", ["fused", "foreach"])
@pytest.mark.parametrize("stack", [(), (Amp("float16"),)], ids=["float32", "scaled"])
def test_steps_are_those_of_the_plain_optimizer(build, observe, optim: str, implementation: str, stack):
    program = build(small(optim), *stack, FusedOptimizer(implementation))
    for ours, plain in zip(observe(program), observe(build(small(optim), *stack)), strict=True):
        for name, value in plain.items():
            torch.testing.assert_close(ours[name], value, atol=1e-5, rtol=1e-4, msg=name)


def test_class_hyperparameters_and_state_are_kept(build):
    program = build(small())
    program.run()
    optimizer, before = program.optimizer, {name: t.clone() for name, t in program.state().items()}
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key not in ("fused", "foreach")}
    fused, _ = FusedOptimizer().apply(program)
    assert fused.optimizer is optimizer
    (group,) = optimizer.param_groups
    assert (group["fused"], group["foreach"]) == (True, False)
    assert {key: group[key] for key in settings} == settings
    assert all(torch.equal(t, before[name]) for name, t in fused.state().items())
    assert all(p.grad is None for p in program.model.parameters())


def test_without_an_optimizer_or_an_implementation_it_says_what_to_do(build):
    assert "workload.mode=train" in FusedOptimizer().unsupported(build(Mlp(dim=4)), torch.device("cpu"))
    program = build(small())
    program = replace(program, optimizer=torch.optim.RMSprop(program.model.parameters()))
    assert "no fused RMSprop: use Adam" in FusedOptimizer().unsupported(program, torch.device("cpu"))
    assert FusedOptimizer("foreach").unsupported(program, torch.device("cpu")) is None


def test_what_torch_refuses_at_the_first_step_is_unsupported(build):
    program = build(small())
    program.model.register_parameter("phase", torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    program.optimizer.add_param_group({"params": [program.model.phase]})
    with pytest.raises(Unsupported, match="not implemented for 'ComplexFloat'"):
        FusedOptimizer().apply(program)


def test_evidence_is_seen_in_a_real_profile(build, tmp_path):
    program, notes = FusedOptimizer().apply(build(small()))
    for name, run in (("before", build(small()).run), ("after", program.run)):
        record(run, 2, tmp_path / f"{name}.json.gz", torch.device("cpu"))
    before, after = (Trace.read(tmp_path / f"{name}.json.gz") for name in ("before", "after"))
    evidence = FusedOptimizer().evidence(before, after, notes, {})
    assert evidence.engaged
    assert evidence.text.startswith("AdamW.step: ")
    assert "(_fused_adamw_)" in evidence.text
    assert "no fused operation" in FusedOptimizer().evidence(before, before, notes, {}).text


@pytest.mark.parametrize(
    ("implementation", "kernel", "engaged"),
    [("fused", FUSED, True), ("fused", FOREACH, False), ("foreach", FOREACH, True), ("foreach", FUSED, False)],
)
def test_inside_a_captured_step_kernels_tell(implementation: str, kernel: str, engaged: bool):
    names = {"fused": "aten::_fused_adam_", "foreach": "aten::_foreach_add_"}
    notes = {"before": {"aten::add_": 9}, "after": {names[implementation]: 1}, "optimizer": "Adam"}
    trace = Trace(steps=(Span("step", 0.0, 9.0),), kernels=(Kernel(kernel, 1.0, 1.0, in_graph=True),))
    assert FusedOptimizer(implementation).evidence(trace, trace, notes, {}).engaged is engaged


def test_what_was_so_already_is_not_engaged():
    notes = {"before": {"aten::_foreach_add_": 4}, "after": {"aten::_foreach_add_": 4}, "optimizer": "SGD"}
    trace = Trace(steps=(Span("step", 0.0, 9.0),), ops=(Op("aten::_foreach_add_", 1.0, 1.0),))
    evidence = FusedOptimizer("foreach").evidence(trace, trace, notes, {})
    assert not evidence.engaged
    assert "implementation=fused" in evidence.text


def test_sparse_gradients_are_refused(build):
    program = build(small())
    program.model.append(torch.nn.Embedding(3, 2, sparse=True))
    assert "sparse" in str(FusedOptimizer().unsupported(program, torch.device("cpu")))


def test_two_that_change_the_optimizer_are_refused():
    with pytest.raises(Unsupported, match="leave one out"):
        compose([FusedOptimizer(), type("Other", (FusedOptimizer,), {"name": "other"})()])


def test_a_scaler_leaves_a_fused_step_to_the_kernel():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    for implementation in ("fused", "foreach"):
        implement(optimizer, implementation)
        assert optimizer._step_supports_amp_scaling is (implementation == "fused")


@pytest.mark.gpu
@pytest.mark.parametrize("optim", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [None, "float16"])
@pytest.mark.parametrize("captured", [False, True])
def test_stacks_on_a_gpu(build, observe, tmp_path, optim: str, dtype: str | None, captured: bool):
    """Updates agree, torch's own choice there is foreach, and the fused kernel runs, inside a graph too."""
    stack = [*([Amp(dtype)] if dtype else []), *([CudaGraph()] if captured else [])]
    program = build(small(optim), *stack, FusedOptimizer(), device="cuda")
    plain = build(small(optim), *stack, device="cuda")
    for ours, theirs in zip(observe(program, 4), observe(plain, 4), strict=True):
        for name, value in theirs.items():  # near zero Adam takes a gradient's sign: parameters agree on average
            assert (ours[name].float() - value.float()).abs().mean() < 1e-3, name
    _, notes = FusedOptimizer().apply(build(small(optim), device="cuda"))
    assert any("_foreach_" in name for name in notes["before"])
    record(program.run, 2, tmp_path / "after.json.gz", torch.device("cuda"))
    evidence = FusedOptimizer().evidence(None, Trace.read(tmp_path / "after.json.gz"), notes, {})
    assert evidence.engaged, evidence.text
