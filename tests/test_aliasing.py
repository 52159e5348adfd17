"""Parameters of a strategy's model are the baseline's, whatever module it puts them into; or its author is told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from optexp.errors import ConfigError, Unsupported
from optexp.program import Program, gradients
from optexp.strategies.fused_optimizer import FusedOptimizer
from optexp.strategies.replace import Replace
from optexp.strategy import Counters, Evidence, Notes, Stage, Strategy
from optexp.workers.arm import Arm
from optexp.workers.spec import Spec
from optexp.workload import Workload
from optexp.workloads.lenet5 import LeNet5
from optexp.workloads.mlp import Mlp

MLP = {"dim": 8, "layers": 2, "batch_size": 4, "in_features": 5}
HERE = "tests.test_aliasing"


class Around(nn.Module):
    """One more module, as DDP's `module.` and torch.compile's `_orig_mod.`, with a table of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("table", torch.ones(3))

    def forward(self, *args: Tensor) -> Tensor:
        result: Tensor = self.inner(*args)
        return result


class Adapted(nn.Module):
    """A layer with an adapter of rank 1 beside it, which adds nothing as long as `b` is zero."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.a = nn.Parameter(torch.randn(1, layer.in_features), requires_grad=False)
        self.b = nn.Parameter(torch.zeros(layer.out_features, 1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + x @ self.a.t() @ self.b.t()


class Renamed(nn.Module):
    """Other objects, in another order, under names in which the old ones are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"late": nn.Module(), "body": nn.Sequential(*copy.deepcopy(model))})

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net["body"](x)
        return result


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


class Fused(nn.Module):
    """All parameters as views of one new tensor: no module has any of the old ones."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        self.shapes = [p.shape for p in model.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        parts = self.flat.split([shape.numel() for shape in self.shapes])
        w, b, v, c = (part.view(shape) for part, shape in zip(parts, self.shapes, strict=True))
        return nn.functional.gelu(nn.functional.linear(nn.functional.gelu(nn.functional.linear(x, w, b)), v, c))


def wrapped(program: Program) -> Program:
    return replace(program, model=Around(program.model))


def compiled(program: Program) -> Program:
    return replace(program, model=torch.compile(program.model, backend="eager"))


def parametrized(program: Program) -> Program:
    parametrize.register_parametrization(program.model[0], "weight", Doubled())
    return program


def adapted(program: Program) -> Program:
    layers = [Adapted(layer) if isinstance(layer, nn.Linear) else layer for layer in program.model]  # type: ignore[attr-defined]
    return replace(program, model=nn.Sequential(*layers))


def same_memory(program: Program) -> Program:
    """New parameters over the old ones' memory."""
    model = copy.copy(program.model)
    made = {name: nn.Parameter(p.data) for name, p in program.model.named_parameters()}
    model = copy.deepcopy(program.model)
    for name, parameter in made.items():
        owner, _, short = name.rpartition(".")
        setattr(model.get_submodule(owner), short, parameter)
    return into_optimizer(replace(program, model=Around(model)), program)


def renamed(program: Program) -> Program:
    return into_optimizer(replace(program, model=Renamed(program.model)), program)


def into_optimizer(after: Program, before: Program) -> Program:
    if after.optimizer is not None:
        pairs = dict(zip(before.model.parameters(), after.model.parameters(), strict=True))
        for group in after.optimizer.param_groups:
            group["params"] = [pairs[p] for p in group["params"]]
        for p in list(after.optimizer.state):
            after.optimizer.state[pairs[p]] = after.optimizer.state.pop(p)
    return after


def fused(program: Program) -> Program:
    return replace(program, model=Fused(program.model))


def forgotten(program: Program) -> Program:
    """Copies, while the optimizer goes on updating what was copied."""
    return replace(program, model=copy.deepcopy(program.model))


@dataclass
class Changes(Strategy):
    """Whatever a function makes of the program."""

    stage = Stage.REWRITE

    change: str = "wrapped"

    @property
    def name(self) -> str:
        return "mine"

    def apply(self, program: Program) -> tuple[Program, Notes]:
        change: Callable[[Program], Program] = globals()[self.change]
        return change(program), {}

    def evidence(self, before: object, after: object, notes: Notes, counters: Counters) -> Evidence:
        return Evidence(True, "asked for")


def arm(workload: Workload, *stack: Strategy) -> Arm:
    """Set up, in this process."""
    made = Arm()
    made.setup(Spec(workload, stack, "cpu", "float32", 0, generic=True).pack())
    return made


@pytest.mark.parametrize("mode", ["forward_backward", "train"])
@pytest.mark.parametrize("change", ["wrapped", "compiled", "parametrized", "adapted", "same_memory", "renamed"])
def test_a_model_behind_another_module_has_the_baselines_names(mode: str, change: str) -> None:
    workload = partial(Mlp, mode=mode, **MLP)
    plain, other = arm(workload()), arm(workload(), Changes(change))
    for _ in range(3):
        torch.testing.assert_close(other.program.run(), plain.program.run())
        torch.testing.assert_close(gradients(other.program), gradients(plain.program))
        torch.testing.assert_close(other.program.state(), plain.program.state())
    other.turn_parameters()
    plain.turn_parameters()
    torch.testing.assert_close(other.program.run(), plain.program.run())


def test_buffers_too() -> None:
    plain, other = arm(LeNet5(mode="train", batch_size=4)), arm(LeNet5(mode="train", batch_size=4), Changes("wrapped"))
    assert other.program.state().keys() == plain.program.state().keys()
    assert other.program.buffers().keys() == plain.program.buffers().keys()


def test_around_a_second_implementation_and_under_another_strategy() -> None:
    names = {"*.weight": "body.*.weight", "*.bias": "body.*.bias"}
    stack = Replace(f"{HERE}:Second", names=names), Changes("wrapped"), FusedOptimizer()
    plain, other = arm(Mlp(mode="train", **MLP)), arm(Mlp(mode="train", **MLP), *stack)
    for _ in range(2):
        torch.testing.assert_close(other.program.run(), plain.program.run())
        torch.testing.assert_close(gradients(other.program), gradients(plain.program))
    assert {name for name in other.program.state() if name.startswith("param/")} == {
        name for name in plain.program.state() if name.startswith("param/")
    }


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        return result


@pytest.mark.parametrize("mode", ["forward_backward", "train"])
def test_fused_parameters_are_told_in_one_sentence(mode: str) -> None:
    told = (
        r"mine: the model that apply\(\) returns holds nothing that is the baseline's 0.weight, 0.bias, 2.weight, ..."
        r" \(4\) \(it has flat beside the others\), and training is compared tensor by tensor: keep .*nn.Parameter.*"
        r"replace\(program, aliases=\{'flat': Alias\('0.weight'\)\}\)"
    )
    with pytest.raises(ConfigError, match=told):
        arm(Mlp(mode=mode, **MLP), Changes("fused"))


def test_what_only_infers_may_fuse_them() -> None:
    plain, other = arm(Mlp(mode="forward", **MLP)), arm(Mlp(mode="forward", **MLP), Changes("fused"))
    torch.testing.assert_close(other.program.run(), plain.program.run())


def test_an_optimizer_that_updates_what_was_copied() -> None:
    with pytest.raises(
        ConfigError, match=r"mine: the optimizer that apply\(\) returns updates 4 tensors that are none"
    ):
        arm(Mlp(mode="train", **MLP), Changes("forgotten"))
    assert arm(Mlp(mode="forward_backward", **MLP), Changes("forgotten")).program.run()


def test_ambiguous_names_are_not_guessed() -> None:
    with pytest.raises((ConfigError, Unsupported), match=r"holds nothing that is the baseline's 0\.weight"):
        arm(Mlp(mode="forward_backward", **MLP), Changes("twice"))


def twice(program: Program) -> Program:
    """Two copies under names that both end in the old ones."""
    pair = nn.ModuleDict({"one": copy.deepcopy(program.model), "two": copy.deepcopy(program.model)})
    model = nn.Module()
    model.add_module("pair", pair)
    model.forward = lambda x: pair["one"](x)  # type: ignore[method-assign]
    return replace(program, model=model)
