"""Objects by `_target_` in a model's arguments: made anew for each model, in lists and in each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optexp.errors import ConfigError
from optexp.program import Program
from optexp.strategies.replace import Replace
from optexp.user_code.objects import Described, made, with_objects
from optexp.workloads.module import Module
from tests.export.test_repro import assert_same, executed, written

HERE = "tests.user_code.test_objects"
CPU = torch.device("cpu")
INPUTS = [{"shape": [8, 4]}]


@dataclass
class Config:
    width: int = 4
    activation: Any = None
    inner: Any = None

    def __post_init__(self) -> None:
        if self.width % 2:
            raise ValueError(f"width={self.width} is odd")


class Net(nn.Module):
    def __init__(self, config: Config, layers: list[nn.Module] | None = None, scale: float = 1.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, config.width), *(layers or []))
        self.activation, self.scale = config.activation or torch.tanh, scale

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.activation(self.body(x)) * self.scale
        return result


def config(**options: Any) -> dict[str, Any]:
    return {"_target_": f"{HERE}.Config", **options}


def ready(kwargs: dict[str, Any], **settings: Any) -> Program:
    workload = Module(target=f"{HERE}:Net", kwargs=kwargs, inputs=INPUTS, **settings)
    program = workload.build(CPU, torch.float32, 0)
    program.feed.reset(workload.batches(torch.Generator().manual_seed(0), 2))
    return program


def test_objects_in_objects_and_in_lists() -> None:
    layer = {"_target_": "torch.nn.Linear", "_args_": [6, 3]}
    gelu = {"_target_": "torch.nn.functional.gelu", "_partial_": True, "approximate": "tanh"}
    program = ready({"config": config(width=6, activation=gelu), "layers": [{"_target_": "torch.nn.ReLU"}, layer]})
    assert program.run()["output"].shape == (8, 3)
    assert program.model.activation.keywords == {"approximate": "tanh"}
    value = made(with_objects({"a": [config(inner=config(width=2)), 1]}, "workload.kwargs"))
    assert value == {"a": [Config(inner=Config(width=2)), 1]}


def test_a_constant_is_itself() -> None:
    assert made(with_objects({"dtype": {"_target_": "torch.float16"}}, "workload.kwargs")) == {"dtype": torch.float16}


def test_each_model_has_its_own() -> None:
    workload = Module(
        target=f"{HERE}:Net",
        kwargs={"config": config(), "layers": [{"_target_": "torch.nn.Linear", "_args_": [4, 4]}]},
        inputs=INPUTS,
    )
    one, other = (workload.build(CPU, dtype, 0).model for dtype in (torch.float32, torch.float64))
    assert one.body[1] is not other.body[1]
    torch.testing.assert_close(one.body[1].weight.double(), other.body[1].weight)


def test_what_a_users_file_gives_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\nfrom torch import nn\nclass Model(nn.Linear):\n    def __init__(self, settings):\n"
        "        assert settings == {'_target_': 'mine.Own'}\n        super().__init__(4, 4)\n"
        "def get_init_inputs():\n    return [{'_target_': 'mine.Own'}]\n"
        "def get_inputs():\n    return [torch.ones(2, 4)]\n"
    )
    assert Module(path=str(path)).build(CPU, torch.float32, 0).model


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"_target_": 3}, r"workload.kwargs.config._target_=3 names nothing: write package.module.Name"),
        ({"_target_": "Config"}, r"workload.kwargs.config._target_=Config names nothing in it"),
        ({"_target_": f"{HERE}.Confg"}, r"workload.kwargs.config._target_=.*Confg: .* has no 'Confg'"),
        ({"_target_": "math.sqr"}, r"math has no 'sqr' \(did you mean sqrt\? "),
        ({"_target_": "not_there.Config"}, r"there is no module 'not_there' here"),
        (config(widht=2), r"workload.kwargs.config: .*Config takes other arguments: .*unexpected.* 'widht'"),
        (config(width=3), r"workload.kwargs.config: .*Config refuses its arguments \(ValueError: width=3 is odd\)"),
        (config(inner=config(width=3)), r"workload.kwargs.config.inner: .*refuses its arguments"),
        (config(_args_=3), r"workload.kwargs.config._args_=3 is no list"),
        ({"_target_": "torch.float16", "a": 1}, r"_target_=torch.float16 is dtype, which takes nothing"),
    ],
)
def test_mistakes_are_told_in_one_sentence(value: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        ready({"config": value})
    assert "\n" not in str(caught.value)


def test_a_second_implementation_is_made_with_them_too() -> None:
    kwargs = {"config": config(), "scale": 2.0}
    for strategy in (Replace(f"{HERE}:Net"), Replace(f"{HERE}:Net", kwargs={"config": config(), "scale": 2.0})):
        program = ready(kwargs)
        optimized, notes = strategy.apply(program)
        batch = torch.ones(8, 4)
        torch.testing.assert_close(optimized.predict((batch,)), program.predict((batch,)))
        assert isinstance(notes["kwargs"]["config"], Described)
    with pytest.raises(ConfigError, match=r"strategy.replace.kwargs.config: .* refuses"):
        Replace(f"{HERE}:Net", kwargs={"config": config(width=3)}).apply(ready(kwargs))


def test_the_file_to_take_home_makes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kwargs = {"config": config(width=6), "layers": [{"_target_": "torch.nn.Linear", "_args_": [6, 3]}]}
    workload = Module(target=f"{HERE}:Net", kwargs=kwargs, inputs=INPUTS)
    for stack in ((), (Replace(f"{HERE}:Net"),)):
        program = written(tmp_path, workload, stack)
        text = (tmp_path / "repro.py").read_text()
        assert "importlib.import_module('torch.nn').Linear(6, 3)" in text
        assert_same(executed(tmp_path / "repro.py", monkeypatch), program)


def test_a_hugging_face_class_by_its_import_path() -> None:
    pytest.importorskip("transformers")
    sizes = {"n_layers": 1, "dim": 16, "hidden_dim": 32, "n_heads": 2, "vocab_size": 50}
    workload = Module(
        target="transformers:DistilBertModel",
        kwargs={"config": {"_target_": "transformers.DistilBertConfig", **sizes, "num_labels": 3}},
        inputs=[{"shape": [2, 8], "dtype": "int64", "high": 50}],
    )
    program = workload.build(CPU, torch.float32, 0)
    program.feed.reset(workload.batches(torch.Generator().manual_seed(0), 2))
    assert program.run()["output.last_hidden_state"].shape == (2, 8, 16)
    assert program.model.config.num_labels == 3  # of which the config's signature says nothing
