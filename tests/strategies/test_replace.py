"""Another implementation in the model's place: the same parameters under the baseline's names, or what does not fit."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from optexp.config import ConfigError
from optexp.program import gradients
from optexp.strategies.channels_last import ChannelsLast
from optexp.strategies.fused_optimizer import FusedOptimizer
from optexp.strategies.replace import Replace, pair
from optexp.workloads.gelu import Gelu
from optexp.workloads.lenet5 import LeNet5
from optexp.workloads.mlp import Mlp
from optexp.workloads.module import Module

HERE = "tests.strategies.test_replace"
ROOT = Path(__file__).parents[2]
TURNED = {"*.weight": "w.*.T", "*.bias": "b.*"}
MLP = Mlp(mode="train", dim=8, layers=2, batch_size=4, in_features=5)


class ByHand(nn.Module):
    """The MLP with weights stored the other way round, under names of its own."""

    def __init__(self, first: int = 5, dim: int = 8) -> None:
        super().__init__()
        sizes = {"0": (first, dim), "2": (dim, dim)}
        self.w = nn.ParameterDict({name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()})
        self.b = nn.ParameterDict({name: nn.Parameter(torch.zeros(dim)) for name in ("0", "2")})
        self.register_buffer("table", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        for name in ("0", "2"):
            x = nn.functional.gelu(x @ self.w[name] + self.b[name])
        return x


class Wider(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 9))


def gelu(x: Tensor, approximate: str) -> Tensor:
    return nn.functional.gelu(x, approximate=approximate)


def in_place_of(**names: str) -> Replace:
    return Replace(f"{HERE}:ByHand", names=names or TURNED)


@pytest.mark.parametrize("stack", [(), (FusedOptimizer(),)], ids=["alone", "stacked"])
@pytest.mark.parametrize("optim", ["adamw", "sgd"])
def test_state_and_gradients_have_the_baselines_names_and_shapes(build, optim: str, stack):
    workload = Mlp(**{**vars(MLP), "optim": optim})
    plain, other = build(workload), build(workload, in_place_of(), *stack)
    for _ in range(3):
        torch.testing.assert_close(other.run(), plain.run())
        torch.testing.assert_close(gradients(other), gradients(plain), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(other.state(), plain.state(), atol=1e-5, rtol=1e-4, check_dtype=False)
    assert other.model is not plain.model
    assert other.model.w["0"].shape == (5, 8)


def test_a_formula_becomes_the_librarys_function(build):
    plain = build(Gelu(size=8))
    for target in ("torch.nn.functional:gelu", f"{HERE}:gelu", "tests/strategies/test_replace.py:gelu"):
        target = str(ROOT / target) if target.endswith("py:gelu") else target
        program = build(Gelu(size=8), Replace(target, kwargs={"approximate": "tanh"}))
        batch = program.feed.batches[0]
        torch.testing.assert_close(program.predict(batch), plain.predict(batch))


def test_evidence_names_what_was_called(build):
    strategy = in_place_of()
    _, notes = strategy.apply(build(MLP))
    evidence = strategy.evidence(None, None, notes, {})
    assert evidence.engaged
    assert evidence.text == f"{HERE}:ByHand called in place of Sequential, 4 parameters and buffers taken over"
    assert strategy.label.startswith("replace[target=")
    assert "args" not in strategy.label


def test_it_is_made_as_the_baseline_was(tmp_path):
    (tmp_path / "before.py").write_text(SOURCE)
    (tmp_path / "after.py").write_text(SOURCE.replace("self.linear(x) * 1", "self.linear(x)"))
    workload = Module(path=str(tmp_path / "before.py"))
    program = workload.build(torch.device("cpu"), torch.float32, 0)
    program.feed.reset(workload.batches(torch.Generator().manual_seed(0), 1))
    replaced, notes = Replace(f"{tmp_path}/after.py:Model").apply(program)
    assert notes["args"] == (7,)
    assert torch.equal(replaced.run()["output"], program.run()["output"])


SOURCE = """
import torch
class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(3, width)
    def forward(self, x):
        return self.linear(x) * 1
def get_init_inputs():
    return [7]
def get_inputs():
    return [torch.randn(2, 3)]
"""


@pytest.mark.parametrize(
    ("target", "names", "words"),
    [
        ("ByHand", {}, r"nothing for the baseline's 0.weight, .* and w.0, .* beside: .*names=\{0.weight: w.0\}'"),
        ("ByHand", {**TURNED, "2.bias": "b.7"}, None),
        ("ByHand", {"2.bias": "b.7", **TURNED}, r"baseline's 2.bias \(as b.7\), and b.2 beside"),
        ("ByHand", {**TURNED, "1.bias": "b.7"}, r"the baseline has no 1.bias \(did you mean 2.bias\?"),
        ("ByHand", {"*.weight": "w.*", "*.bias": "b.*"}, r"w.0 has shape \[5, 8\], .*0.weight has \[8, 5\].*w.0.T\}'"),
        ("Wider", {}, r"2.weight has shape \[9, 8\], and the baseline's 2.weight has \[8, 8\]$"),
        ("ByHandd", {}, r"did you mean ByHand\?"),
    ],
)
def test_what_does_not_fit_is_named(build, target: str, names: dict[str, str], words: str | None):
    strategy, program = Replace(f"{HERE}:{target}", names=names), build(MLP)
    if words is None:  # the first pattern that matches counts
        strategy.apply(program)
        return
    with pytest.raises(ConfigError, match=words):
        strategy.apply(program)


def test_parameters_of_its_own_are_refused_and_buffers_are_its_own_affair():
    plain, more = nn.Linear(2, 2), nn.Linear(2, 2)
    more.register_buffer("table", torch.ones(3))
    assert pair(plain, more, {}) == {"weight": ("weight", False), "bias": ("bias", False)}
    more.register_parameter("scale", nn.Parameter(torch.ones(1)))
    with pytest.raises(ConfigError, match="has scale, which the baseline has not"):
        pair(plain, more, {})


def test_others_work_on_what_was_put_in(build):
    target = "optexp.workloads.lenet5:lenet5"
    program = build(LeNet5(batch_size=2), ChannelsLast(), Replace(target))
    assert program.model[3].weight.is_contiguous(memory_format=torch.channels_last)


def test_without_a_target_it_says_what_to_give(build):
    assert "strategy.replace.target=file.py:ModelNew" in Replace().unsupported(build(MLP), torch.device("cpu"))
