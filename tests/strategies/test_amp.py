"""Autocast where it lowers something, the loss scaled where it must be, and a reason where nothing changes."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from optexp.errors import Unsupported
from optexp.strategies.amp import MATRIX_OPS, Amp
from optexp.strategies.inplace import Inplace
from optexp.strategy import precision
from optexp.trace import Op, Span, Trace, record
from optexp.user_code.train_step import TrainStep
from optexp.workloads.gelu import Gelu
from optexp.workloads.mlp import Mlp

# What rounding a few products to 8 or 11 bits costs, of values around one.
TOLERANCE = {"bfloat16": 3e-2, "float16": 4e-3}


def profile(*dtypes: str) -> Trace:
    """A trace of one step whose matrix products had these dtypes; none are visible in a captured step."""
    ops = tuple(Op("aten::addmm", 0.0, 1.0, inputs=((dtype, (4, 4)),)) for dtype in dtypes)
    return Trace(steps=(Span("step", 0.0, 9.0),), ops=ops)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mode", ["forward", "forward_backward", "train"])
@pytest.mark.parametrize("optim", ["adamw", "sgd"])
def test_numbers_are_those_of_the_lower_precision(build, observe, dtype: str, mode: str, optim: str):
    workload = Mlp(mode=mode, dim=32, batch_size=16, optim=optim)
    exact = observe(build(workload))
    lowered = observe(build(workload, Amp(dtype)))
    differs = False
    for ours, plain in zip(lowered, exact, strict=True):
        assert ours.keys() == plain.keys()
        for name, value in plain.items():
            # Unscaled loss and gradients: a forgotten division by the scale would be off by 65536.
            torch.testing.assert_close(ours[name].float(), value, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
            differs |= not torch.equal(ours[name].float(), value)
    assert differs


def test_numbers_are_those_of_plain_autocast(build):
    program, plain = build(Mlp(mode="forward", dim=32, batch_size=16), Amp()), build(Mlp(dim=32, batch_size=16))
    batch = program.feed.batches[0]
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = plain.model(*batch)
    output = program.run()["output"]
    assert output.dtype is torch.bfloat16
    assert torch.equal(output, expected)


def test_loss_scale_exists_before_the_first_step_and_only_for_float16_gradients(build):
    for dtype, mode, scaled in (
        ("float16", "train", True),
        ("float16", "forward", False),
        ("bfloat16", "train", False),
    ):
        state = build(Mlp(mode=mode, dim=8, batch_size=2), Amp(dtype)).state()
        assert ("scaler/scale" in state) == scaled
    assert build(Mlp(dim=8, batch_size=2), Amp("float16")).state()["scaler/scale"].item() == 65536


def test_an_overflow_skips_the_step_and_lowers_the_scale(build):
    program = build(Mlp(mode="train", dim=8, batch_size=2), Amp("float16"))
    before = {name: p.detach().clone() for name, p in program.model.named_parameters()}
    x, y = program.feed.batches[0]
    program.step(program, (x, y * float("inf")))
    assert program.scaler.get_scale() == 32768
    assert all(torch.equal(p, before[name]) for name, p in program.model.named_parameters())


def test_apply_leaves_no_trace_in_the_state(build):
    model = torch.nn.BatchNorm1d(4)
    program = build(Gelu(size=4))
    program, _ = Amp().apply(type(program)(model=model, step=program.step, feed=program.feed))
    assert model.num_batches_tracked.item() == 0
    assert torch.equal(model.running_mean, torch.zeros(4))


def test_evidence_names_what_was_lowered(build):
    _, notes = Amp().apply(build(Mlp(dim=8, batch_size=2)))
    for after in (profile(), profile("bfloat16", "float32")):
        evidence = Amp().evidence(profile("float32"), after, notes, {})
        assert evidence.engaged
        assert evidence.text == "in bfloat16: 4 addmm, 4 gelu"
    evidence = Amp().evidence(profile("float32"), profile("float32"), notes, {})
    assert not evidence.engaged
    assert "ran in float32" in evidence.text


def test_evidence_is_seen_in_a_real_profile(build, tmp_path):
    workload = Mlp(dim=8, batch_size=2)
    lowered, notes = Amp().apply(build(workload))
    for name, program in (("before", build(workload)), ("after", lowered)):
        record(program.run, 2, tmp_path / f"{name}.json.gz", torch.device("cpu"))
    before, after = (Trace.read(tmp_path / f"{name}.json.gz") for name in ("before", "after"))
    assert set(after.op_dtypes(MATRIX_OPS)) == {"bfloat16"}
    assert Amp().evidence(before, after, notes, {}).engaged
    assert not Amp().evidence(before, before, notes, {}).engaged


def test_a_formula_without_products_is_not_engaged(build):
    _, notes = Amp().apply(build(Gelu(size=8)))
    evidence = Amp().evidence(profile(), profile(), notes, {})
    assert not evidence.engaged
    assert "nothing ran in bfloat16" in evidence.text


def test_a_model_that_is_lowered_already_is_unsupported():
    program = Mlp(dim=8).build(torch.device("cpu"), torch.bfloat16, 0)
    assert "use dtype=float32" in Amp().unsupported(program, torch.device("cpu"))


def test_in_place_operations_leave_autocast_its_choice_of_dtype(build):
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x) + x)  # bfloat16 + float32 is float32

    plain = build(Gelu(size=8))
    program = type(plain)(model=Mixed(), step=plain.step, feed=plain.feed)
    batch = plain.feed.batches[0]
    alone, _ = Amp().apply(program)
    rewritten, notes = Inplace().apply(program)
    stacked, _ = Amp().apply(rewritten)
    assert notes["rewritten"] == 2
    expected, output = (p.step(p, batch)["output"] for p in (alone, stacked))
    assert output.dtype is expected.dtype is torch.float32
    assert torch.equal(output, expected)


class Gathers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gathered(self.linear(x))

    @staticmethod
    def gathered(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(x.shape).scatter(0, torch.zeros(x.shape, dtype=torch.int64), x)


def test_what_does_not_run_in_lower_precision_is_a_reason(build):
    program = replace(build(Gelu(size=8)), model=Gathers())
    program.run()
    with pytest.raises(Unsupported, match=r"do not run under autocast .*: cast what fails to float32"):
        Amp().apply(program)
    program = build(Mlp(mode="forward_backward", dim=8, batch_size=2))
    with pytest.raises(Unsupported, match="do not run under autocast"):
        Amp().apply(replace(program, loss=lambda output, batch: Gathers.gathered(output)))


def test_a_step_of_ones_own_cannot_scale_its_loss(build):
    def step(model, batch, optimizer):
        model(batch[0]).square().mean().backward()
        optimizer.step()

    program = replace(build(Mlp(mode="train", dim=8, batch_size=2)), step=TrainStep(step, lambda b: b), loss=None)
    Amp("bfloat16").apply(program)[0].run()
    with pytest.raises(Unsupported, match=r"use strategy.amp.dtype=bfloat16"):
        Amp("float16").apply(program)[0].run()


def test_a_step_may_call_the_model_otherwise_than_by_its_batch(build):
    class Timed(torch.nn.Linear):
        def forward(self, x, *, share):
            return super().forward(x) * share

    def step(model, batch, optimizer):
        model(batch[0], share=0.5).square().mean().backward()
        optimizer.step()

    model = Timed(8, 8)
    program = replace(build(Mlp(mode="train", dim=8, batch_size=2)), model=model, loss=None)
    program = replace(program, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    notes = Amp().apply(replace(program, step=TrainStep(step, lambda b: b)))[1]
    assert notes["operations"] == {"addmm": 1, "mul": 1}  # of the model's call, without backward and loss


class Masked(torch.nn.Linear):
    """The least number of float32, which bfloat16 does not have."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).masked_fill(x > 0, torch.finfo(x.dtype).min)


def test_a_step_that_calls_parts_of_the_model_by_themselves_is_a_reason(build):
    def whole(model, batch, optimizer):
        model(batch[0]).sum().backward()
        optimizer.step()

    def parts(model, batch, optimizer):
        model.second(model(batch[0])).sum().backward()  # bfloat16, which a layer outside of autocast does not take
        optimizer.step()

    model = torch.nn.Sequential()
    model.add_module("first", torch.nn.Linear(8, 8))
    model.add_module("second", torch.nn.Linear(8, 8))
    program = replace(build(Mlp(mode="train", dim=8, batch_size=2)), model=model, loss=None)
    program = replace(program, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(Unsupported, match="train_step does not run where only the model's own call is under autocast"):
        Amp().apply(replace(program, step=TrainStep(parts, lambda b: b)))
    with pytest.raises(Unsupported, match=r"the model does not run under autocast .*: cast what fails to float32"):
        Amp().apply(replace(program, model=Masked(), step=TrainStep(whole, lambda b: b)))
    Amp().apply(replace(program, step=TrainStep(whole, lambda b: b)))
    assert all(map(torch.equal, model.parameters(), before))  # tried out, and put back


def test_a_model_that_differentiates_inside_is_lowered_too(build):
    class Force(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            return torch.autograd.grad(self.linear(x).square().sum(), x, create_graph=True)[0]

    program = build(Mlp(mode="forward_backward", dim=8, batch_size=2))
    program, notes = Amp().apply(replace(program, model=Force()))
    assert notes["operations"]


class Modern(torch.nn.Module):
    """A compiled function of one graph, a condition, and attention by functions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.whole = torch.compile(torch.nn.functional.gelu, backend="eager", fullgraph=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.whole(self.linear(x))
        return torch.cond(x.sum() > 0, lambda x: x @ x.mT @ x, torch.relu, (x,))


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return flex_attention(*[self.linear(x).expand(1, 1, 2, 8)] * 3)


def test_what_torch_compiles_itself_is_lowered_too(build):
    program = build(Mlp(mode="train", dim=8, batch_size=2))
    assert {"addmm": 1, "gelu": 1, "mm": 2}.items() <= Amp().apply(replace(program, model=Modern()))[1][
        "operations"
    ].items()
    program = build(Mlp(mode="forward", dim=8, batch_size=2))
    assert Amp().apply(replace(program, model=Attention()))[1]["operations"]["flex_attention"] == 1


def test_promises_its_precision():
    assert Amp("float16").contract == precision("float16")
    assert Amp("float16").label == "amp[dtype=float16]"
