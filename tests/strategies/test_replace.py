"""Another implementation in the model's place: the same parameters under the baseline's names, or what does not fit."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from optexp.errors import ConfigError, UserFailure
from optexp.program import gradients
from optexp.strategies.channels_last import ChannelsLast
from optexp.strategies.fused_optimizer import FusedOptimizer
from optexp.strategies.replace import Replace, hand_over, pair
from optexp.trace import Op, Span, Trace
from optexp.user_code.of_model import takes_model
from optexp.user_code.same_start import matched
from optexp.workers.arm import Arm
from optexp.workers.serving import describe
from optexp.workers.spec import Spec
from optexp.workloads.gelu import Gelu
from optexp.workloads.lenet5 import LeNet5
from optexp.workloads.mlp import Mlp
from optexp.workloads.module import Module
from optexp.workloads.script import Script
from tests.export.test_repro import assert_same, executed, written

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


class Renamed(nn.Module):
    """LeNet's like in other words: values are drawn in the same order, two biases begin alike."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, width), nn.Linear(width, width)
        for bias in (self.first.bias, self.second.bias):
            nn.init.zeros_(bias)
        self.register_buffer("scale", torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()) * self.scale


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


def test_the_optimizer_keeps_what_lies_outside_the_model():
    weight, centres = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(4))
    second = nn.Parameter(weight.detach().t().contiguous())
    optimizer = torch.optim.SGD([{"params": [weight]}, {"params": [centres], "lr": 0.5}], lr=0.1, momentum=0.9)
    (weight.sum() + 2 * centres.sum()).backward()
    optimizer.step()
    velocity = optimizer.state[centres]["momentum_buffer"]
    hand_over(optimizer, {weight: (second, True)})
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert list(map(id, held)) == [id(second), id(centres)]
    assert set(optimizer.state) == {second, centres}
    assert optimizer.state[centres]["momentum_buffer"] is velocity
    assert optimizer.state[second]["momentum_buffer"].shape == (3, 2)


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


OTHER_NAMES = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, width), nn.Linear(width, width)])
        for layer in self.layers:
            nn.init.zeros_(layer.bias)
        self.register_buffer("factor", torch.rand(width))

    def forward(self, x):
        return self.layers[1](self.layers[0](x).relu()) * self.factor

def get_inputs():
    return [torch.randn(4, 3)]

def get_init_inputs():
    return [5]
"""


def test_other_names_are_found_by_first_values(build, tmp_path):
    (tmp_path / "before.py").write_text(OTHER_NAMES)
    plain = build(Module(path=str(tmp_path / "before.py")))
    strategy = Replace(f"{HERE}:Renamed")
    optimized, notes = strategy.apply(build(Module(path=str(tmp_path / "before.py"))))
    assert notes["pairs"]["layers.0.bias"] == ("first.bias", False)
    batch = plain.feed.batches[0]
    torch.testing.assert_close(optimized.predict(batch), plain.predict(batch))
    assert "told by the values" in strategy.evidence(None, None, notes, {}).text


def parameter(*names: str) -> dict[str, Tensor]:
    return {name: torch.zeros(2) for name in names}


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (("a.bias", "b.bias"), ("x", "y"), {"a.bias": "x", "b.bias": "y"}),
        (("a.bias", "b.bias"), ("b.bias", "a.bias"), {"a.bias": "a.bias", "b.bias": "b.bias"}),
        (("a.bias", "b.bias"), ("x", "a.bias"), {"a.bias": "a.bias", "b.bias": "x"}),
        (
            ("first.bias", "second.bias"),
            ("bias_second", "bias_first"),
            {"first.bias": "bias_first", "second.bias": "bias_second"},
        ),
        (("layers.0.bias", "layers.1.bias"), ("b1", "b2"), {"layers.0.bias": "b1", "layers.1.bias": "b2"}),
    ],
)
def test_equal_values_are_told_by_names_then_by_order(ours, theirs, expected):
    assert matched(parameter(*ours), parameter(*theirs)) == expected


def test_values_are_compared_across_dtypes_and_shapes():
    assert matched(parameter("a"), {"b": torch.zeros(3), "c": torch.zeros(2, dtype=torch.float64)}) == {}


def test_other_names_with_other_values_are_not_guessed(build, tmp_path):
    (tmp_path / "before.py").write_text(OTHER_NAMES.replace("torch.rand(width)", "torch.rand(width).neg()"))
    with pytest.raises(ConfigError, match=r"has nothing for the baseline's layers\.0\.weight"):
        Replace(f"{HERE}:Renamed").apply(build(Module(path=str(tmp_path / "before.py"))))


def with_buffers(**buffers: Tensor) -> nn.Module:
    model = nn.Linear(4, 4)
    for name, value in buffers.items():
        model.register_buffer(name, value)
    return model


@pytest.mark.parametrize("learns", [False, True])
def test_a_mask_may_be_left_out(learns):
    masked, other = with_buffers(mask=torch.ones(4, 4).tril()), with_buffers(table=torch.ones(3))
    complex_table = with_buffers(table=torch.ones(4, 4, dtype=torch.complex64))
    for without in (nn.Linear(4, 4), other, complex_table, with_buffers(table=torch.ones(4, 4).bool())):
        assert pair(masked, without, {}, learns) == {"weight": ("weight", False), "bias": ("bias", False)}


def test_a_buffer_that_may_be_called_otherwise_is_asked_for():
    stats = with_buffers(mean=torch.zeros(2, 4))
    for called in ({"average": torch.zeros(2, 4)}, {"turned": torch.zeros(4, 2)}):
        with pytest.raises(ConfigError, match=f"has nothing for the baseline's mean, and {next(iter(called))} beside"):
            pair(stats, with_buffers(**called), {})
    with pytest.raises(ConfigError, match=r"mean \(as average\)"):
        pair(stats, nn.Linear(4, 4), {"mean": "average"})


def test_it_is_made_as_the_baseline_was(tmp_path):
    (tmp_path / "before.py").write_text(SOURCE)
    (tmp_path / "after.py").write_text(SOURCE.replace("self.linear(x) * 1", "self.linear(x)"))
    workload = Module(path=str(tmp_path / "before.py"))
    program = workload.build(torch.device("cpu"), torch.float32, 0)
    program.feed.reset(workload.batches(torch.Generator().manual_seed(0), 1))
    replaced, notes = Replace(f"{tmp_path}/after.py:Model").apply(program)
    assert notes["args"] == (7,)
    assert torch.equal(replaced.run()["output"], program.run()["output"])


def test_a_model_of_buffers_alone_has_their_precision(build, tmp_path):
    (tmp_path / "before.py").write_text(SOURCE_OF_BUFFERS)
    replaced, _ = Replace(f"{tmp_path}/before.py:Model").apply(build(Module(path=str(tmp_path / "before.py"))))
    assert replaced.model.scale.dtype is torch.float32


SOURCE_OF_BUFFERS = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(3, dtype=torch.float16))
    def forward(self, x):
        return x * self.scale
def get_inputs():
    return [torch.randn(2, 3)]
"""
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


LOOP = """\
import optexp
import torch
model = torch.nn.Linear(2, 1)
for (x,) in optexp.steps([(torch.ones(3, 2),)], model=model):
    model(x)
"""


def test_a_whole_script_takes_the_place_of_another(tmp_path):
    for name in ("one.py", "other.py"):
        (tmp_path / name).write_text(LOOP)
    first = Script(path=str(tmp_path / "one.py"))
    rebuilt = Replace(str(tmp_path / "other.py")).rebuild(first)
    assert isinstance(rebuilt, Script)
    assert rebuilt.path == str(tmp_path / "other.py")


def test_a_whole_file_that_is_not_there_is_named_as_it_was_asked_for():
    with pytest.raises(ConfigError, match=r"^strategy\.replace\.target=missing\.py: there is no such file below "):
        Replace("missing.py").rebuild(MLP)


# --- made of the baseline's model --------------------------------------------------------------------------------


class Packed(nn.Module):
    """Linear layers with weights rounded to 8 bits and packed: no parameter is left."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = [(lin.weight.detach() * 128).round() / 128 for lin in layers if isinstance(lin, nn.Linear)]
        self.biases = [lin.bias.detach().clone() for lin in layers if isinstance(lin, nn.Linear)]

    def forward(self, x: Tensor) -> Tensor:
        for weight, bias in zip(self.layers, self.biases, strict=True):
            x = nn.functional.gelu(nn.functional.linear(x, weight, bias))
        return x


def packed(model, bits=8):
    return Packed(model)


def annotated(net: nn.Module) -> nn.Module:
    return Packed(net)


def quantized(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def function(model):
    return lambda x: model(x)


def plain_factory(width: int = 3) -> nn.Module:
    return nn.Linear(width, width)


class Config(str):
    pass


def of_a_config(model: Config) -> nn.Module:
    return nn.Linear(3, 3)


@pytest.mark.parametrize(
    ("found", "args", "kwargs", "expected"),
    [
        (packed, (), {}, True),
        (packed, (), {"bits": 4}, True),
        (annotated, (), {}, True),
        (Packed, (), {}, True),
        (plain_factory, (), {}, False),
        (of_a_config, (), {}, False),
        (packed, (), {"model": "small"}, False),
        (lambda model, x: x, (), {}, False),
        (nn.functional.gelu, (), {}, False),
        (nn.Linear(2, 2), (), {}, False),
    ],
)
def test_what_takes_a_model(found, args, kwargs, expected: bool):
    assert takes_model(found, args, kwargs) is expected


def arm(mode: str, target: str, **options: object) -> Arm:
    made = Arm()
    stack = (Replace(f"{HERE}:{target}", **options),) if target else ()
    workload = Mlp(mode=mode, dim=8, layers=2, batch_size=4, in_features=5)
    made.setup(Spec(workload, stack, "cpu", "float32", 0, generic=True).pack())
    made.restore()
    return made


@pytest.mark.parametrize("target", ["packed", "annotated", "quantized", "copied", "function", "Packed"])
def test_what_only_infers_may_be_made_of_the_baselines_model(target: str):
    plain, other = arm("forward", ""), arm("forward", target)
    expected, found = plain.program.run()["output"], other.program.run()["output"]
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)
    assert torch.equal(found, expected) == (target in ("copied", "function"))
    assert other.program.state().keys() <= plain.program.state().keys()


def test_values_that_were_folded_into_others_stay():
    plain, other = arm("forward", ""), arm("forward", "folded")
    torch.testing.assert_close(other.program.run(), plain.program.run())


def folded(model: nn.Module) -> nn.Module:
    """The first layer's weight doubled, and what comes out of it halved."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        made[0].weight.mul_(2)
        made[0].bias.mul_(2)
    made[0].register_forward_hook(lambda layer, args, output: output / 2)
    return made


@pytest.mark.parametrize("mode", ["forward_backward", "train"])
def test_training_goes_on_with_its_parameters(mode: str):
    plain, other = arm(mode, ""), arm(mode, "copied", of_model=True)
    for _ in range(3):
        torch.testing.assert_close(other.program.run(), plain.program.run())
    torch.testing.assert_close(other.program.state(), plain.program.state())


@pytest.mark.parametrize("mode", ["forward_backward", "train"])
def test_training_has_nothing_to_compare_packed_parameters_with(mode: str):
    told = r"packed makes a model that holds nothing for the baseline's 0.weight, 0.bias, 2.weight, ... \(4\): training"
    with pytest.raises(ConfigError, match=told):
        arm(mode, "packed")


def test_it_is_said_where_it_would_help():
    with pytest.raises(ConfigError, match="or name a function of one argument, model, that makes it of the baseline's"):
        arm("forward", "Other")


class Other(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_the_recipe_makes_it_again(build):
    strategy = Replace(f"{HERE}:packed", kwargs={"bits": 4})
    _, notes = strategy.apply(build(Mlp(mode="forward", dim=8, layers=2, batch_size=4, in_features=5)))
    recipe = strategy.recipe(notes)
    assert "replacement = second.packed(model, bits=4)\nmodel = forward = replacement" in recipe
    assert "made of it, 0 parameters" in strategy.evidence(None, None, notes, {}).text


# --- a function that edits the baseline's model ------------------------------------------------------------------


def edits_modules(model: nn.Sequential) -> None:
    linear, gelu = model[0], model[1]
    model[0] = nn.Sequential(linear, copy.deepcopy(gelu))
    model[1] = nn.Identity()


def patches_forward(model: nn.Sequential) -> None:
    plain = model.forward
    model.forward = lambda x: plain(x)


def patches_class(model: nn.Sequential) -> None:
    type(model).forward = lambda self, x: self[3](self[2](self[1](self[0](x))))


def rounds_values(model: nn.Sequential) -> nn.Module:
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    return model


def forgets_its_result(model: nn.Sequential) -> None:
    quantized(model)


def trace(*names: str) -> Trace:
    return Trace((Span("step", 0, 1),), ops=tuple(Op(name, 0, 1) for name in names))


@pytest.mark.parametrize("edit", ["edits_modules", "patches_forward", "patches_class", "rounds_values"])
def test_a_model_may_be_edited(build, monkeypatch: pytest.MonkeyPatch, edit: str):
    monkeypatch.setattr(nn.Sequential, "forward", nn.Sequential.forward)  # put back what patches_class leaves
    strategy, program = Replace(f"{HERE}:{edit}"), build(INFERS)
    batch = program.feed.next()
    expected = program.predict(batch)
    optimized, notes = strategy.apply(program)
    assert optimized.model is program.model
    torch.testing.assert_close(optimized.predict(batch), expected, atol=1e-3, rtol=1e-3)
    evidence = strategy.evidence(trace("a"), trace("a"), notes, {})
    assert evidence.engaged
    assert evidence.text == f"{HERE}:{edit} edited Sequential"
    assert f"second.{edit}(model)\nforward = model" in strategy.recipe(notes)


INFERS = Mlp(mode="forward", dim=8, layers=2, batch_size=4, in_features=5)


def test_an_edit_of_nothing_did_not_engage_unless_steps_run_other_operators(build):
    strategy = Replace(f"{HERE}:forgets_its_result")
    _, notes = strategy.apply(build(INFERS))
    found = strategy.evidence(trace("a", "b"), trace("b", "a"), notes, {})
    assert not found.engaged
    assert found.text == (
        f"{HERE}:forgets_its_result left the baseline's model as it was: it must return a model, or edit the one given"
    )
    assert strategy.evidence(trace("a", "b"), trace("a"), notes, {}).engaged  # a function of a module was patched


def test_training_goes_on_with_an_edited_model():
    plain, other = arm("train", ""), arm("train", "patches_forward")
    for _ in range(3):
        torch.testing.assert_close(other.program.run(), plain.program.run())
    torch.testing.assert_close(other.program.state(), plain.program.state())


def returns_a_number(model):
    return 3


def raises(model):
    return model.nothing


def takes_other_inputs(model):
    return nn.Linear(99, 3)


def test_a_number_is_no_model(build):
    with pytest.raises(ConfigError, match=r"returns_a_number returned an int: a function of a model must return"):
        Replace(f"{HERE}:returns_a_number").apply(build(INFERS))


@pytest.mark.parametrize(
    ("target", "told", "frame"),
    [
        (
            "raises",
            rf"^strategy.replace.target={HERE}:raises failed on the baseline's model \(AttributeError: ",
            "raises",
        ),
        ("takes_other_inputs", r"takes_other_inputs makes failed on a batch \(RuntimeError: mat1 and mat2 ", "forward"),
    ],
)
def test_a_failure_is_a_sentence_with_the_users_frames(build, target: str, told: str, frame: str):
    with pytest.raises(UserFailure, match=told) as caught:
        Replace(f"{HERE}:{target}").apply(build(INFERS))
    shown = describe(caught.value)
    assert shown.message == str(caught.value)
    assert f", in {frame}\n" in shown.traceback
    assert "of_model.py" not in shown.traceback


def test_int8_promises_least():
    assert Replace("x:y", precision="int8").contract > Replace("x:y", precision="bfloat16").contract


@pytest.mark.parametrize("edit", ["edits_modules", "quantized"])
def test_the_file_to_take_home_calls_the_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: str):
    program = written(tmp_path, INFERS, (Replace(f"{HERE}:{edit}"),))
    assert_same(executed(tmp_path / "repro.py", monkeypatch), program)
