"""What is checked beside the gates: each finds its own kind of mistake, and leaves honest programs alone."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import cycle, pairwise
from pathlib import Path
from random import SystemRandom
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from optexp.equivalence import input_families, process_state, trajectory
from optexp.equivalence.poison import scribble
from optexp.equivalence.trajectory import Rates, strays
from optexp.errors import NoReference
from optexp.program import Program
from optexp.workloads.mlp import Mlp
from optexp.workloads.module import Module, Names
from optexp.workloads.softmax import Softmax
from tests.equivalence.conftest import Net

CPU = torch.device("cpu")


def mlp(mode: str, **options) -> Mlp:
    return Mlp(**{"mode": mode, "dim": 32, "layers": 2, "batch_size": 16, **options})


def with_step(wrapper):
    """A candidate whose step is `wrapper(inner, program, batch)`."""

    def change(program: Program) -> Program:
        inner = program.step
        return replace(program, step=lambda program, batch: wrapper(inner, program, batch))

    return change


def test_every_tensor_has_a_row_with_its_worst_element(check):
    found = check(mlp("train"), seeds=3)
    row = found.tensors["change/0.weight"]
    assert row.error_ratio is not None
    assert row.element.baseline == row.element.candidate  # the same program
    loss = found.tensors["loss"].element
    assert (loss.index, loss.baseline) == ([], loss.candidate)  # a scalar's, too
    assert found.sizes.keys() == found.tensors.keys()
    assert list(found.tensors) == sorted(found.tensors, key=lambda name: -found.tensors[name].used)


# --- sensitivity -------------------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    def __init__(self, used=2):
        super().__init__()
        self.used = used

    def forward(self, a, b):
        return a + b if self.used == 2 else a * 2 if self.used else torch.ones(16, 8)


def of_two(used):
    class Workload(Softmax):
        def model(self):
            return TwoInputs(used)

    return Workload(rows=16, columns=8, add=True)


def test_an_input_that_does_not_matter_is_named(check):
    assert check(of_two(2)).dead == []
    found = check(of_two(1))
    assert found.ok
    assert found.dead == ["1"]
    assert any("input 1" in note for note in found.notes)


class Segments(nn.Module):
    """Sums of rows between offsets; without the second input, of rows between offsets that it knows."""

    def __init__(self, given=True):
        super().__init__()
        self.given = given

    def forward(self, x, offsets):
        ends = offsets.tolist() if self.given else [0, 3, 8]
        return torch.stack([x[a:b].sum(0) for a, b in pairwise(ends)])


def of_segments(offsets, given=True):
    class Workload(Softmax):
        def model(self):
            return Segments(given)

        def batch(self, generator):
            return torch.randn(8, 16, generator=generator), offsets(generator)

    return Workload(rows=8, columns=16, add=True)


def test_an_input_without_a_second_value_is_not_called_dead(check):
    found = check(of_segments(lambda generator: torch.tensor([0, 3, 8])))
    assert found.ok
    assert (found.dead, found.constant) == ([], ["1"])
    assert any("input 1 was the same in every draw" in note for note in found.notes)
    drawn = check(
        of_segments(lambda generator: torch.tensor([0, int(torch.randint(1, 8, (), generator=generator)), 8]))
    )
    assert (drawn.dead, drawn.constant) == ([], [])
    unused = check(of_segments(lambda generator: torch.randint(1, 8, (3,), generator=generator), given=False))
    assert (unused.dead, unused.constant) == (["1"], [])


def test_where_the_only_input_that_matters_never_varies_that_is_said(check):
    class Constant(Softmax):
        def model(self):
            return OnlySecond()

        def batch(self, generator):
            return torch.randn(16, 8, generator=generator), torch.ones(16, 8)

    with pytest.raises(NoReference, match=r"no input that was varied \(the same in every draw: input 1\)"):
        check(Constant(rows=16, columns=8, add=True))


class OnlySecond(nn.Module):
    def forward(self, a, b):
        return b * 2


class OnlyNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.ones(8)), nn.BatchNorm1d(8)

    def forward(self, x, z):
        self.norm(z)
        return x * self.weight


def test_an_input_that_only_statistics_depend_on_does_not_matter(check):
    class Workload(Softmax):
        def model(self):
            return OnlyNormed()

    assert check(Workload(rows=16, columns=8, add=True, mode="forward_backward")).dead == ["1"]


class ManyInputs(nn.Module):
    def forward(self, *inputs):
        return sum(inputs[i] for i in range(len(inputs)) if i not in (3, 17))


class OfTwenty(Softmax):
    def model(self):
        return ManyInputs()

    def batch(self, generator):
        return tuple(torch.randn(4, 8, generator=generator) for _ in range(20))


def test_inputs_beyond_those_that_are_exchanged_alone_are_tried_too(check):
    workload = OfTwenty(rows=4, columns=8)
    assert check(workload).dead == ["3", "17"]
    exchanged = input_families.exchanged(*(workload.batch(torch.Generator().manual_seed(seed)) for seed in (0, 1)))
    assert len(exchanged) == 10
    changed = [[not torch.equal(a, b) for a, b in zip(exchanged[0], other, strict=True)] for other in exchanged[1:-1]]
    assert [sum(column) for column in zip(*changed, strict=True)] == [1] * 20


def test_a_result_that_depends_on_nothing_proves_nothing(check):
    with pytest.raises(NoReference, match="depends on no input"):
        check(of_two(0))


def test_a_candidate_must_follow_every_input(check):
    """Right as long as all inputs change together."""
    first = {}

    def by_first_input(inner, program, batch):
        key = tuple(batch[0].flatten().tolist())
        if key not in first:
            first[key] = inner(program, batch)["output"].clone()
        return {"output": first[key].clone()}

    found = check(of_two(2), with_step(by_first_input), seeds=3)
    assert found.worst.family == "one by one"


def test_memory_that_is_used_again_holds_another_batch(check):
    results = {}

    def by_address(inner, program, batch):
        key = batch[0].data_ptr()
        if key not in results:
            results[key] = (batch, inner(program, batch)["output"].clone())  # kept alive: no address comes twice
        return {"output": results[key][1].clone()}

    assert not check(mlp("forward"), with_step(by_address), seeds=3).ok


# --- mutation and aliasing ---------------------------------------------------------------------------------------


def test_a_step_that_changes_a_parameter_is_caught(check):
    def nudging(inner, program, batch):
        outputs = inner(program, batch)
        program.model[0].weight.data[0, 0] += 1e-9
        return outputs

    found = check(mlp("forward"), with_step(nudging))
    assert "param/0.weight" in found.headline
    assert check(mlp("forward"), with_step(nudging), baseline=with_step(nudging)).ok


class Buffered:
    """Returns the same memory every time, as a captured graph does."""

    def __init__(self):
        self.memory = None

    def __call__(self, inner, program, batch):
        outputs = inner(program, batch)
        if self.memory is None:
            self.memory = {name: torch.empty_like(tensor) for name, tensor in outputs.items()}
        for name, tensor in outputs.items():
            self.memory[name].copy_(tensor)
        return dict(self.memory)


def test_outputs_that_the_next_step_overwrites_have_to_be_declared(check):
    found = check(mlp("forward"), with_step(Buffered()))
    assert "Strategy.overwrites" in found.headline
    assert check(mlp("forward"), with_step(Buffered()), overwrites=True).ok


@pytest.mark.parametrize("buffers", [2, 3, 4])
def test_outputs_in_a_ring_of_buffers_have_to_be_declared(check, buffers):
    turns = cycle(Buffered() for _ in range(buffers))
    found = check(mlp("forward"), with_step(lambda *step: next(turns)(*step)))
    assert "Strategy.overwrites" in found.headline


# --- poison ------------------------------------------------------------------------------------------------------


class WrittenOnce(Buffered):
    """Fills its memory the first time, and all but the last row afterwards."""

    def __call__(self, inner, program, batch):
        if self.memory is None:
            return super().__call__(inner, program, batch)
        for name, tensor in inner(program, batch).items():
            self.memory[name][:-1] = tensor[:-1]
        return dict(self.memory)


def test_a_result_that_is_not_written_anew_shows(check):
    found = check(mlp("forward"), with_step(WrittenOnce()), overwrites=True)
    assert not found.ok


def test_scribbling_spares_what_the_program_needs():
    x, parameter = torch.ones(3), torch.ones(3)
    with torch.inference_mode():
        inferred = torch.ones(3)
    result, count = torch.ones(3), torch.ones(3, dtype=torch.int64)
    scribble([result, inferred, x.view(3, 1), parameter[:2], count], spared=[x, parameter])
    assert result.isnan().all()
    assert inferred.isnan().all()
    assert torch.equal(x, parameter)
    assert count.tolist() == [1, 1, 1]


# --- training ----------------------------------------------------------------------------------------------------


def frozen_rate(program: Program) -> Program:
    """What is captured with a number keeps that number."""
    rates = [group["lr"] for group in program.optimizer.param_groups]
    inner = program.step

    def step(program, batch):
        given = [group["lr"] for group in program.optimizer.param_groups]
        for group, rate in zip(program.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        outputs = inner(program, batch)
        for group, rate in zip(program.optimizer.param_groups, given, strict=True):
            group["lr"] = rate
        return outputs

    return replace(program, step=step)


@pytest.mark.parametrize("optim", ["adamw", "sgd"])
def test_a_frozen_learning_rate_shows_at_the_second_step(check, optim):
    found = check(mlp("train", optim=optim), frozen_rate)
    assert found.worst.tensor.startswith("change/")
    assert min(failure.step for failure in found.failures) == 1


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw", "sgd"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_honest_training_stays_within_its_envelope(check, optim, activation):
    def split_k(program):
        def forward(layer, x):
            k = layer.in_features // 2
            return x[..., :k] @ layer.weight[:, :k].T + x[..., k:] @ layer.weight[:, k:].T + layer.bias

        for layer in program.model.modules():
            if isinstance(layer, nn.Linear):
                layer.forward = lambda x, layer=layer: forward(layer, x)
        return program

    shares = []
    for first in range(0, 20, 4):
        found = check(mlp("train", optim=optim, activation=activation), split_k, follow=True, first=first)
        assert found.ok, found.headline
        shares.append(found.trajectory.share)
    assert 0 < max(shares) < 1


def test_training_that_goes_astray_later_is_caught(check, monkeypatch):
    """Every compared step is right; where many follow each other, one is skipped."""
    monkeypatch.setattr("optexp.equivalence.observation.OUTLIVED", (4, 4))
    taken = []

    def skipping(inner, program, batch):
        taken.append(1)
        if len(taken) != 25:
            return inner(program, batch)
        kept = {name: tensor.clone() for name, tensor in program.state().items()}
        outputs = inner(program, batch)
        for name, tensor in program.state().items():
            tensor.copy_(kept[name])
        return outputs

    found = check(mlp("train"), with_step(skipping), follow=True)
    assert found.worst.gate == "TRAJECTORY"
    assert "as rounding explains" in found.headline


def test_a_bias_correction_in_float32_leads_nowhere_else(check):
    """As an optimizer's that a graph captures: all updates of a step are longer, or all are shorter, by 3e-5."""

    def corrected_in_float32(program):
        for group in program.optimizer.param_groups:
            group["differentiable"], group["foreach"] = True, False
        return program

    file = Path(__file__).parents[1] / "benchmarks/zoo/loops.py"
    names = Names("TabularNet", loader="tabular_net_loader", loss="tabular_net_loss")
    workload = Module(path=str(file), mode="train", names=names)
    found = check(workload, corrected_in_float32, follow=True)
    assert found.ok, found.headline


def test_more_perturbed_runs_are_made_before_training_is_called_astray(check, monkeypatch):
    """Rounding flips a ReLU of the candidate in a few of a hundred runs, and of one of four others as seldom."""
    monkeypatch.setattr(trajectory, "strays", lambda ours, theirs, moved, unit: (3, 2.0 if len(moved) < 10 else 0.5))
    assert check(mlp("train"), follow=True).ok
    monkeypatch.setattr(trajectory, "strays", lambda ours, theirs, moved, unit: (3, 2.0))
    assert check(mlp("train"), follow=True).worst.gate == "TRAJECTORY"


def test_straying_is_measured_beside_perturbed_runs():
    plain, moved = [1.0, 1.0, 1.0], [[1.0, 1.1, 1.0], [1.0, 0.95, 1.0]]
    assert strays(plain, plain, moved, 0.0) == (0, 0.0)
    step, share = strays([1.0, 1.15, 1.2], plain, moved, 0.0)
    assert (step, share) == (2, pytest.approx(0.2 / 0.3))
    assert strays([1.0, float("nan"), 1.0], plain, moved, 0.0) == (1, float("inf"))
    assert strays([1.0, 9.0, 9.0], [1.0, float("inf"), 1.0], [[1.0, 1.0, 1.0]], 1e-3) == (0, 0.0)  # both diverge


def test_rates_are_multiples_of_their_own():
    program = mlp("train").build(CPU, torch.float32, 0)
    (group,) = program.optimizer.param_groups
    group["lr"] = torch.tensor(0.5)
    rates, tensor = Rates(program), group["lr"]
    rates.set(0.5)
    assert group["lr"] is tensor
    assert tensor.item() == 0.25
    rates.set(1.0)
    assert tensor.item() == 0.5
    assert set(trajectory.RATES) > {1.0}


# --- global state ------------------------------------------------------------------------------------------------


def test_settings_that_changed_are_named_unless_declared_or_the_baselines_too():
    before = process_state.settings()
    try:
        torch.use_deterministic_algorithms(True)
        torch.set_flush_denormal(True)
        gc.disable()
        after = process_state.settings()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_flush_denormal(False)
        gc.enable()
    candidate, baseline = process_state.History(before, before, after), process_state.History(before, before, after)
    assert set(process_state.undeclared(candidate, baseline, ())) == {
        "torch.are_deterministic_algorithms_enabled",
        "torch.set_flush_denormal",
        "gc.isenabled",
    }
    declared = {"gc.isenabled", "torch.set_flush_denormal"}
    assert process_state.undeclared(candidate, baseline, declared) == {
        "torch.are_deterministic_algorithms_enabled": "False → True"
    }
    assert process_state.undeclared(candidate, process_state.History(before, after, after), ()) == {}
    assert process_state.settings() == before


# --- what is no tensor -------------------------------------------------------------------------------------------


class Told(torch.nn.Module):
    """A tensor and numbers; `edit` changes them."""

    def __init__(self, edit=dict):
        super().__init__()
        self.edit, self.calls, self.chance = edit, 0, SystemRandom()

    def forward(self, x):
        self.calls += 1
        y = x.flatten(1).cumsum(-1)
        top = y[0].argmax().item()
        found = {"y": y, "size": y.norm().item(), "top": top, "kind": "sum", "calls": self.calls, "what": object()}
        found["chance"] = self.chance.getrandbits(60)
        return self.edit(found)


def test_numbers_of_an_output_are_compared_and_what_cannot_be_is_named(check, net):
    found = check(net(mode="forward", make=Told))
    assert found.ok, found.headline
    assert {"output.size", "output.top", "output.kind"} <= found.tensors.keys()
    assert "output.chance is another one in every run of the baseline: not compared" in found.notes
    assert "output.calls" in found.tensors, "a counter is put back, and compared"
    assert found.unread == ["output.what (unread object)"]


class Cached(torch.nn.Module):
    """A result beside what its class keeps, as decoders return keys and values."""

    def __init__(self, kept=lambda x: x):
        super().__init__()
        self.kept = kept

    def forward(self, x):
        cache = SimpleNamespace(layers=[SimpleNamespace(keys=self.kept(x.flatten(1)), name="first")], seen=3)
        return {"y": x.flatten(1) * 2, "cache": cache}


def test_tensors_inside_any_object_are_compared(check, net):
    found = check(net(mode="forward", make=Cached))
    assert found.ok, found.headline
    assert "output.cache.layers.0.keys" in found.tensors
    assert found.unread == []
    shorter = Cached(lambda x: x * 1.01)
    found = check(net(mode="forward", make=Cached), lambda program: replace(program, forward=shorter))
    assert "output.cache.layers.0.keys fails" in found.headline


class Boxes(torch.nn.Module):
    """Two kinds of channels, one a thousand times as large."""

    def forward(self, x):
        return torch.cat([x * 1e3, self.small(x)], dim=1)

    def small(self, x):
        return x.cumsum(-1) / 10


class Rough(Boxes):
    def small(self, x):
        return super().small(x).half().float()


def test_small_channels_are_judged_by_their_own_size(check, net):
    found = check(net(mode="forward", make=Boxes))
    assert found.ok, found.headline
    found = check(net(mode="forward", make=Boxes), lambda program: replace(program, forward=Rough()))
    assert found.worst.tensor == "output (small channels)"
    assert found.worst.element.index[1] >= 3


def test_parameters_too_coarse_to_show_that_they_move_leave_equivalence_undecided(check):
    with pytest.raises(NoReference, match="an optimizer that moves no parameter passes them"):
        check(Slow(mode="train", make=lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 10))), dtype=torch.bfloat16)


class Slow(Net):
    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-4)


class Pruner(torch.nn.Module):
    """Deterministic, though its ratio is called like a rate of dropout."""

    def __init__(self):
        super().__init__()
        self.drop_ratio = 0.25

    def forward(self, x):
        return x.flatten(1)[:, : int(x[0].numel() * (1 - self.drop_ratio))].cumsum(-1)


def test_a_deterministic_model_keeps_its_rates(check, net):
    found = check(net(mode="forward", make=Pruner))
    assert found.ok, found.headline


class Constant(torch.nn.Module):
    """A kernel that is no buffer: nobody converts it."""

    def __init__(self):
        super().__init__()
        self.kernel = torch.ones(3, 1, 3, 3) / 9

    def forward(self, x):
        return torch.nn.functional.conv2d(x, self.kernel, groups=3)


def test_constants_of_a_model_are_widened_where_they_must_be(check, net):
    found = check(net(mode="forward", make=Constant))
    assert found.ok, found.headline


def test_no_gradient_and_one_of_zeros_are_the_same_where_nothing_is_updated(check, net):
    def dense(inner, program, batch):
        outputs = inner(program, batch)
        for parameter in program.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return outputs

    found = check(net(mode="forward_backward", make=Routed), with_step(dense))
    assert found.ok, found.headline
    found = check(net(mode="train", make=Routed), with_step(dense))
    assert not found.ok


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_a_gradient_of_zeros_may_be_left_out_beside_a_wrong_one(check, net, factor):
    class Idle(Routed):
        def forward(self, x):
            return super().forward(x) + 0 * self.experts[1](x.flatten(1))

    def sparing(inner, program, batch):
        outputs = inner(program, batch)
        asked, idle = program.model.experts
        asked.weight.grad *= factor
        idle.weight.grad = idle.bias.grad = None
        return outputs

    found = check(net(mode="forward_backward", make=Idle), with_step(sparing))
    assert found.ok is (factor == 1.0), found.headline


class Routed(torch.nn.Module):
    """One of two experts is asked."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.LazyLinear(10) for _ in range(2))
        for expert in self.experts:
            expert(torch.zeros(1, 3 * 8 * 8))

    def forward(self, x):
        return self.experts[0](x.flatten(1))


@pytest.mark.parametrize(
    ("name", "value"), [("size", 0.0), ("size", None), ("top", -1), ("kind", "sun"), ("kind", "summary"), ("top", 0.5)]
)
def test_a_number_that_is_made_up_is_seen(check, net, name, value):
    def change(program):
        program.model.edit = lambda found: found | {name: value}
        return program

    found = check(net(mode="forward", make=Told), change)
    assert not found.ok
    assert f"output.{name} fails" in found.headline


def test_a_result_whose_size_depends_on_rounding_has_no_reference(check, net):
    class Rounded(torch.nn.Module):
        def forward(self, x):
            return x.flatten()[: 8 if x.element_size() == 8 else 9]

    with pytest.raises(NoReference, match=r"output has the shape \[8\] in float64"):
        check(net(mode="forward", make=Rounded))


class SmallNowAndThen(torch.nn.Module):
    """A column that is small beside the others in some batches, and in others is not."""

    def forward(self, x):
        rows = x.flatten(1).softmax(-1)
        scale = torch.where(x.flatten()[0] > 0, 1e-3, 1.0)
        return torch.cat([rows[:, :8], scale * rows[:, 8:9]], 1)


def test_columns_that_are_small_in_some_batches_are_no_error(check, net):
    def halved(program):
        return replace(program, forward=lambda x: (program.model(x) * 3) / 3)

    for first in range(0, 12, 3):
        found = check(net(mode="forward", make=SmallNowAndThen, batch_size=64), halved, seeds=3, first=first)
        assert found.ok, found.headline
        assert found.distribution.tensor == "output"
