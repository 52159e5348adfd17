"""The user's own model, in every form that it may be given in, and what is said where something is missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optexp.errors import ConfigError
from optexp.program import Program, Snapshot, tensors_of
from optexp.program.feeds import LoaderFeed
from optexp.schema import build
from optexp.strategies.inplace import Inplace
from optexp.strategies.replace import Replace
from optexp.user_code.train_step import TrainStep
from optexp.workloads.module import Module, Names

CPU = torch.device("cpu")
LINEAR = {"target": "torch.nn:Linear", "args": [8, 4], "inputs": [{"shape": [16, 8]}]}
LABELLED = LINEAR | {"inputs": [{"shape": [16, 8]}, {"shape": [16], "dtype": "int64", "high": 4}]}


def ready(workload: Module, count: int = 2, dtype: torch.dtype = torch.float32) -> Program:
    """Its program, with batches in the feed."""
    program = workload.build(CPU, dtype, seed=0)
    program.feed.reset(workload.batches(torch.Generator().manual_seed(1), count))
    return program


def written(folder: Path, text: str, **settings: Any) -> Module:
    path = folder / "mine.py"
    path.write_text("import torch\nfrom torch import nn\n" + text)
    return Module(path=str(path), **settings)


# --- by import path ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "settings", "shape"),
    [
        ("torch.nn:Linear", {"args": [8, 4]}, (16, 4)),
        ("torch.nn:Linear", {"kwargs": {"in_features": 8, "out_features": 3}}, (16, 3)),
        ("torch.nn.Tanh", {}, (16, 8)),
        ("torch.nn.functional:gelu", {}, (16, 8)),
        ("torch.nn.functional:softmax", {"kwargs": {"dim": 0}}, (16, 8)),
        ("tests.workloads.test_module:factory", {}, (16, 2)),
        ("tests.workloads.test_module:factory", {"args": [5]}, (16, 5)),
        ("tests.workloads.test_module:INSTANCE", {}, (16, 7)),
    ],
)
def test_a_class_a_factory_a_function_or_an_instance(target: str, settings: Any, shape: tuple[int, ...]) -> None:
    workload = Module(target=target, inputs=[{"shape": [16, 8]}], **settings)
    assert ready(workload).run()["output"].shape == shape
    assert workload.samples == 16


def factory(width: int = 2) -> nn.Module:
    return nn.Linear(8, width)


INSTANCE = nn.Linear(8, 7)


def test_an_instance_is_never_shared() -> None:
    workload = Module(target="tests.workloads.test_module:INSTANCE", inputs=[{"shape": [16, 8]}])
    first, second = (workload.build(CPU, torch.float64, 0).model for _ in range(2))
    assert first is not second
    assert INSTANCE.weight.dtype is torch.float32
    assert torch.equal(next(first.parameters()), INSTANCE.weight.double())


def test_equal_seeds_give_equal_models_and_batches() -> None:
    one, other = ready(Module(**LABELLED)), ready(Module(**LABELLED))
    assert all(map(torch.equal, one.state().values(), other.state().values()))
    assert all(map(torch.equal, tensors_of(one.feed.next()).values(), tensors_of(other.feed.next()).values()))


def test_inputs_as_described() -> None:
    described = [
        {"shape": [64], "low": 2.0, "high": 3.0},
        {"shape": [64], "dtype": "int32", "low": -1, "high": 2},
        {"shape": [64], "dtype": "bool", "name": "mask"},
    ]
    workload = Module(target="tests.workloads.test_module:mixed", inputs=described)
    batch = ready(workload).feed.next()
    assert isinstance(batch, dict)
    assert list(batch) == ["0", "1", "mask"]
    assert batch["0"].min() >= 2
    assert batch["0"].max() <= 3
    assert batch["1"].unique().tolist() == [-1, 0, 1]
    assert batch["mask"].dtype is torch.bool


def mixed(x: torch.Tensor, index: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
    return (x + index) * mask


def test_both_ends_of_integers_are_among_them() -> None:
    tokens = {"shape": [2, 3], "dtype": "int64", "low": 5, "high": 10**6}
    few = [{"shape": [1], "dtype": "int64", "high": 1}, {"shape": [0], "dtype": "int64", "high": 3}]
    workload = Module(target="torch:stack", inputs=[tokens, *few])
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        drawn, one, none = tensors_of(workload.batches(generator, 1)[0]).values()
        assert (drawn.min(), drawn.max()) == (5, 10**6 - 1)
        assert (one.tolist(), none.tolist()) == ([0], [])


def test_named_sizes_take_turns() -> None:
    workload = Module(target="torch.nn:Tanh", inputs=[{"shape": ["B", 4]}], shapes=[{"B": 2}, {"B": 6}])
    program = ready(workload, count=4)
    assert workload.variety == 2
    assert [program.run()["output"].shape[0] for _ in range(4)] == [2, 6, 2, 6]
    assert workload.samples == 4


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "workload.target="),
        ({"target": "torch.nn:Tanh", "path": "net.py"}, "or workload.path="),
        ({"target": "torch.nn:Tanh"}, r"workload.inputs=\["),
        (LINEAR | {"inputs": [{"shape": ["B", 8]}]}, r"shapes=\[\{B: 32\}\]"),
        (LINEAR | {"inputs": [{"shape": [8], "dtype": "int64"}]}, "needs high"),
        (LINEAR | {"inputs": [{"shape": [8], "dtype": "float16"}]}, "allowed: float32, int64"),
        (LINEAR | {"inputs": [{"shap": [8]}]}, "did you mean shape"),
        (LINEAR | {"loss": "crossentropy"}, "did you mean cross_entropy"),
        (LINEAR | {"optimizer": "adamv"}, "did you mean Adam"),
        (LINEAR | {"mode": "trian"}, "did you mean train"),
        ({"inputs": [{"shape": [8, -3]}]}, r"workload\.inputs\[0\]\.shape=\[8, -3\]: -3 must not be negative"),
    ],
)
def test_a_mistake_is_one_sentence(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build({"_target_": "optexp.workloads.module.Module", **settings}, "workload").resolve("cpu")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no_such_package.net:Net", "there is no module 'no_such_package'"),
        ("torch.nn:Lineer", "did you mean Linear"),
        ("torch:float32", "a dtype: it must be an nn.Module"),
        ("net", "workload.target=net names nothing in it: write package.module:Name"),
        ("net.py", "workload.target=net.py names nothing in it"),
    ],
)
def test_what_is_not_there_is_named(target: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ready(Module(target=target, inputs=[{"shape": [2]}]))


def test_arguments_that_a_class_does_not_take_are_named() -> None:
    with pytest.raises(ConfigError, match=r"takes \(in_features: int.*\): missing .* 'in_features'"):
        ready(Module(target="torch.nn:Linear", kwargs={"in_feature": 8}, inputs=[{"shape": [2]}]))


# --- learning ----------------------------------------------------------------------------------------------------


def test_trains_with_a_loss_and_an_optimizer_by_name() -> None:
    smooth = {"loss": "cross_entropy", "loss_args": {"label_smoothing": 0.1}}
    program = ready(Module(**LABELLED, **smooth, mode="train", optimizer="sgd", lr=0.5))
    before = program.model.weight.clone()  # type: ignore[operator]
    images, labels = tensors_of(program.feed.next()).values()
    program.feed.reset([(images, labels)])
    expected = nn.functional.cross_entropy(program.model(images), labels, label_smoothing=0.1)
    assert torch.allclose(program.run()["loss"], expected)
    assert torch.allclose(program.model.weight, before - 0.5 * program.model.weight.grad)  # type: ignore[arg-type, operator]


def test_what_was_taken_by_default_is_reported() -> None:
    workload = Module(**LABELLED, mode="train", labels=1)
    ready(workload)
    assert workload.notes() == [
        "loss: cross_entropy, because none was given",
        "optimizer: AdamW with lr=0.001, because none was given",
    ]
    workload = Module(**LINEAR, mode="forward_backward")
    loss = ready(workload).run()["loss"]
    assert loss > 0
    assert workload.notes() == ["loss: the output's own, else a weighted mean of its squares, because none was given"]


def test_entries_that_the_model_does_not_take_are_labels() -> None:
    workload = Module(**LABELLED)
    assert ready(workload).targets == 1
    assert workload.notes() == ["labels: entry 1 of a batch, which the model does not see"]


@pytest.mark.parametrize(
    ("taken", "labels"),
    [
        ("x, noise", 0),  # an autoencoder, whose loss compares with the input
        ("x, noise=None", 1),
        ("x", 1),
        ("*entries", 1),
    ],
)
def test_what_a_model_cannot_do_without_is_no_label(tmp_path: Path, taken: str, labels: int) -> None:
    first = "entries[0]" if taken == "*entries" else "x"
    text = f"""
class Model(nn.Linear):
    def __init__(self):
        super().__init__(8, 4)

    def forward(self, {taken}):
        return super().forward({first})

def get_inputs():
    return [torch.randn(16, 8), torch.randn(16, 4)]

def loss(outputs, batch):
    return (outputs - batch[1]).square().mean()
"""
    workload = written(tmp_path, text, mode="train")
    assert ready(workload).targets == labels
    assert ready(workload).run()["loss"] > 0


@pytest.mark.parametrize("mode", ["forward_backward", "train"])
def test_without_parameters_nothing_learns(mode: str) -> None:
    with pytest.raises(ConfigError, match="no parameters"):
        ready(Module(target="torch.nn:Tanh", inputs=[{"shape": [2]}], mode=mode))


def test_a_loss_needs_something_to_compare_with() -> None:
    with pytest.raises(ConfigError, match="a batch has none"):
        ready(Module(**LINEAR, mode="train", loss="mse_loss"))


# --- a file ------------------------------------------------------------------------------------------------------

PROBLEM = """
batch_size = 4
class Model(nn.Module):
    def __init__(self, width, scale=1.0):
        super().__init__()
        self.linear, self.scale = nn.Linear(3, width), scale
    def forward(self, x, factor):
        return self.linear(x) * factor * self.scale
def get_inputs():
    return [torch.randn(batch_size, 3), 2.5]
"""


@pytest.mark.parametrize("made", ["[5]", "{'width': 5}", "[[5], {'scale': 2.0}]"])
def test_a_problem_file_of_a_kernel_benchmark_runs_as_it_is(made: str, tmp_path: Path) -> None:
    workload = written(tmp_path, f"{PROBLEM}\ndef get_init_inputs():\n    return {made}\n")
    program = ready(workload)
    assert program.constants == {"1": 2.5}  # a number is an argument, and no tensor
    batch = program.feed.next()
    x = tensors_of(batch)["0"]
    scale = 2.0 if "scale" in made else 1.0
    assert torch.equal(program.predict(batch), program.model.linear(x) * 2.5 * scale)  # type: ignore[operator]


def test_other_names_and_sizes(tmp_path: Path) -> None:
    text = PROBLEM.replace("class Model", "class Net").replace("get_inputs", "examples")
    workload = written(
        tmp_path,
        text,
        names=build_names(model="Net", inputs="examples"),
        args=[5],
        shapes=[{"batch_size": 2}, {"batch_size": 6}],
    )
    program = ready(workload)
    assert [program.run()["output"].shape for _ in range(2)] == [(2, 5), (6, 5)]


def build_names(**names: str) -> Any:
    from optexp.workloads.module import Names

    return Names(**names)


LOADED = """
from torch.utils.data import DataLoader
class Model(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
    def forward(self, x):
        return super().forward(x)
def get_loader():
    data = [{"x": torch.randn(3), "y": index % 2, "name": "a"} for index in range(8)]
    return DataLoader(data, batch_size=4, num_workers=1)
def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch["y"])
def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1)
"""


def test_a_loader_is_part_of_the_work(tmp_path: Path) -> None:
    workload = written(tmp_path, LOADED, mode="train")
    program = ready(workload, dtype=torch.float64)
    assert isinstance(program.feed, LoaderFeed)
    assert program.feed.workers == 1
    batch = program.feed.next()
    assert isinstance(batch, dict)
    assert list(batch) == ["x", "y"]
    assert batch["x"].dtype is torch.float64
    assert isinstance(program.optimizer, torch.optim.SGD)
    assert program.run()["loss"] > 0
    assert workload.samples == 4
    assert workload.notes() == [
        "left out of the batches, because it is no tensor: name",
        "labels: y of a batch, which the model does not see",
    ]
    program.feed.pause()


NAMED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.call, self.begin, self.own = nn.Linear(3, 2), 2.0, nn.Parameter(torch.ones(())), "a name"
        self.factor = 1.0
    def forward(self, x): return self.model(x) * self.begin * self.factor
    def penalty(self): return self.model.weight.square().sum()
def get_inputs(): return [torch.randn(4, 3)]
def get_optimizer(params): return torch.optim.SGD(params, lr=0.1)
def train_step(model, batch, optimizer):
    model.factor = 3.0
    optimizer.zero_grad()
    loss = model(batch[0]).sum() + model.call * model.penalty() + model.model.bias.sum() + 0.0 * len(model.own)
    loss.backward()
    optimizer.step()
    return loss
"""


class Behind(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_a_train_step_sees_its_own_model_whatever_its_attributes_are_called(tmp_path: Path) -> None:
    program = ready(written(tmp_path, NAMED, mode="train"))
    model, (x,) = program.model, program.feed.next()
    with torch.no_grad():
        expected = 3 * model.model(x).sum() + 2 * model.model.weight.square().sum() + model.model.bias.sum()
    wrapped = replace(program, model=Behind(model))
    start = Snapshot(program)
    for one in (program, wrapped):
        start.restore(program)
        torch.testing.assert_close(one.step(one, (x,))["loss"], expected)
        assert model.factor == 3.0


POINTS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
    def forward(self, x): return self.layer(x).sin()
def get_inputs(): return [torch.rand(8, 1, requires_grad=True), torch.zeros(8, 1)]
def get_optimizer(params): return torch.optim.SGD(params, lr=0.1)
def train_step(model, batch, optimizer):
    x, expected = batch
    u = model(x)
    slope, = torch.autograd.grad(u.sum(), x, create_graph=True)
    loss = (slope + u - expected).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
"""


def test_inputs_that_require_gradients_do_so_in_a_step(tmp_path: Path) -> None:
    program = ready(written(tmp_path, POINTS, mode="train"))
    batch = program.feed.next()
    assert program.step(program, batch)["loss"] > 0
    assert not any(tensor.requires_grad for tensor in tensors_of(batch).values())


PATHS = """
from torch.utils.data import DataLoader
Model = lambda: nn.Linear(3, 2)
def get_loader(): return DataLoader([(torch.randn(3), i % 2, f"{i}.png") for i in range(8)], batch_size=4)
def get_optimizer(params): return torch.optim.SGD(params, lr=0.1)
"""
LOSS_OF_PATHS = """
def loss(outputs, batch):
    images, labels, paths = batch
    return nn.functional.cross_entropy(outputs, labels) * len(paths[0])
"""
STEP_OF_PATHS = """
def train_step(model, batch, optimizer):
    found = loss(model(batch[0]), batch)
    found.backward()
    optimizer.step()
    optimizer.zero_grad()
    return found
"""


@pytest.mark.parametrize("text", [LOSS_OF_PATHS, LOSS_OF_PATHS + STEP_OF_PATHS], ids=["loss", "step"])
def test_texts_beside_tensors_stay_in_a_loaders_batch(text: str, tmp_path: Path) -> None:
    program = ready(written(tmp_path, PATHS + text, mode="train"))
    assert program.run()["loss"] > 0
    assert program.feed.next().keys() == {"0", "1"}


def test_batches_of_anything_that_can_be_iterated(tmp_path: Path) -> None:
    text = "Model = nn.Linear(3, 2)\ndef get_loader():\n    yield torch.randn(4, 3), torch.randint(2, (4,))\n"
    program = ready(written(tmp_path, text, mode="train", loss="CrossEntropyLoss"))
    assert program.targets == 1
    assert program.run()["loss"] > 0
    assert program.run()["loss"] > 0


def test_batches_to_verify_on_differ_from_seed_to_seed(tmp_path: Path) -> None:
    text = (
        "from torch.utils.data import DataLoader\ndef Model(): return torch.square\n"
        "def get_loader(): return DataLoader([(torch.tensor([float(i)]), i) for i in range(64)], batch_size=4)\n"
    )
    workload = written(tmp_path, text)
    ready(workload)
    first, again, other = (workload.batch(torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert isinstance(first, tuple)
    assert torch.equal(first[0], again[0])  # type: ignore[index]
    assert not torch.equal(first[0], other[0])  # type: ignore[index]


def test_a_training_step_of_ones_own(tmp_path: Path) -> None:
    text = PROBLEM + (
        "def train_step(model, batch, optimizer):\n"
        "    x, factor = batch\n"
        "    assert factor == 2.5\n"
        "    loss = model(x, factor).square().mean()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    return {'loss': loss}\n"
    )
    workload = written(tmp_path, text, args=[5], mode="train")
    program = ready(workload)
    assert isinstance(program.step, TrainStep)
    assert program.trains
    assert set(program.run()) == {"loss.loss"}
    forward = written(tmp_path, text, args=[5])
    ready(forward)
    assert forward.notes() == ["train_step is not run in mode=forward: workload.mode=train judges it"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("class Net(nn.Module): pass\ndef get_inputs(): return 1", "workload.names.model=Net$"),
        ("class A(nn.Module): pass\nclass B(A): pass", r"workload.names.model=A \(allowed: A, B\)"),
        ("def get_inputs(): return 1\ndef get_loader(): return 1", "workload.names.model=MyModel$"),
        ("Model = nn.Tanh", r"neither get_inputs\(\) nor get_loader\(\)"),
        ("Model = nn.Tanh\ndef get_inputs(): return ['a']", "a list of str: there is no tensor"),
        ("Model = nn.Tanh\ndef get_loader(): return []", "no batch"),
        ("Model = nn.Tanh\ndef get_loader(): return 3", "the loader is an? int"),
    ],
)
def test_what_a_file_lacks_is_named(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        ready(written(tmp_path, text))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("outputs.sum().item()", r"the loss is a float: .* \(without .item\(\)\)"),
        ("outputs.detach().sum()", "the loss depends on no parameter"),
        ("outputs.square()", r"the loss has shape \[4, 2\]: .*\.mean\(\)"),
    ],
)
def test_a_loss_that_is_no_scalar_is_named(loss: str, words: str, tmp_path: Path) -> None:
    text = "Model = nn.Linear(2, 2)\ndef get_inputs(): return torch.ones(4, 2)\n"
    workload = written(tmp_path, f"{text}def loss(outputs, batch): return {loss}", mode="forward_backward")
    with pytest.raises(ConfigError, match=words):
        ready(workload).run()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Model = lambda: nn.Linear(4, 2, device='meta')", "the meta device"),
        ("class Model(nn.Linear):\n  def forward(self, x): return super().forward(x).argmax(-1)", "no real numbers"),
        ("Model = lambda: nn.Sequential(nn.Linear(4, 2), nn.Embedding(3, 4, sparse=True))", "AdamW does not take.*SGD"),
    ],
)
def test_what_cannot_learn_says_why(text: str, words: str, tmp_path: Path) -> None:
    if "Model(nn.Linear)" in text:
        text = text.replace("  def", "  def __init__(self): super().__init__(4, 2)\n  def")
    workload = written(tmp_path, f"{text}\ndef get_inputs(): return torch.ones(3, 4)\n", mode="train")
    with pytest.raises(ConfigError, match=words):
        ready(workload).run()


def test_lazy_layers_have_their_sizes_before_a_step(tmp_path: Path) -> None:
    text = "Model = lambda: nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())\n"
    text += "def get_inputs(): return torch.randn(8, 4)"
    for dtype in (torch.float32, torch.float64):
        program = ready(written(tmp_path, text, mode="train"), dtype=dtype)
        assert program.model[0].weight.shape == (2, 4)
        assert program.model[0].weight.dtype is dtype
        assert program.model[1].num_batches_tracked == 0
        assert program.optimizer is not None
        assert len(program.optimizer.param_groups[0]["params"]) == 4
        assert program.model.training


@pytest.mark.parametrize("seen", [True, False])
def test_a_model_that_may_take_labels_gets_them_if_it_computes_the_loss(seen: bool, tmp_path: Path) -> None:
    text = """
class Model(nn.Linear):
    def __init__(self): super().__init__(4, 3)
    def forward(self, x, labels=None):
        logits = super().forward(x)
        return logits, None if labels is None else nn.functional.cross_entropy(logits, labels)

def get_inputs(): return torch.randn(8, 4), torch.randint(3, (8,))
"""
    found = "outputs[1]" if seen else "nn.functional.cross_entropy(outputs[0], batch[1])"
    workload = written(tmp_path, f"{text}def loss(outputs, batch): return {found}", mode="train")
    program = ready(workload)
    assert program.targets == (0 if seen else 1)
    assert program.run()["loss"] > 0
    assert any("labels" in note for note in workload.notes()) is not seen


def test_a_model_that_returns_its_loss_gets_labels_that_it_may_take(tmp_path: Path) -> None:
    text = """
class Model(nn.Linear):
    def __init__(self): super().__init__(4, 3)
    def forward(self, x, tags=None):
        logits = super().forward(x)
        return logits if tags is None else nn.functional.cross_entropy(logits, tags)

def get_inputs(): return torch.randn(8, 4), torch.randint(3, (8,))
def loss(outputs, batch): return outputs
"""
    program = ready(written(tmp_path, text, mode="train"))
    assert program.targets == 0
    assert program.run()["loss"] > 0


@pytest.mark.parametrize(
    "made", ["torch.jit.script(Net())", "torch.export.export(Net(), (torch.ones(2, 3),)).module()"]
)
def test_scripted_and_exported_models_are_put_back(made: str, tmp_path: Path) -> None:
    text = "class Net(nn.Linear):\n    def __init__(self): super().__init__(3, 2)\n"
    text += f"def Model(): return {made}\ndef get_inputs(): return torch.randn(2, 3)"
    program = ready(written(tmp_path, text))
    start = Snapshot(program)
    with torch.no_grad():
        for parameter in program.model.parameters():
            parameter.zero_()
    start.restore(program)
    assert all(bool(parameter.any()) for parameter in program.model.parameters())
    second, _ = Replace(target=f"{tmp_path}/mine.py:Model").apply(program)
    batch = program.feed.next()
    assert torch.equal(second.step(second, batch)["output"], program.step(program, batch)["output"])


def test_a_frozen_model_has_neither_parameters_nor_a_mode(tmp_path: Path) -> None:
    text = "Model = lambda: nn.Linear(3, 2)\ndef get_inputs(): return torch.randn(2, 3)\n"
    text += "def frozen(model): return torch.jit.freeze(torch.jit.script(model.eval()))"
    program = ready(written(tmp_path, text))
    batch = program.feed.next()
    second, _ = Replace(target=f"{tmp_path}/mine.py:frozen").apply(program)
    assert not list(second.model.parameters())
    torch.testing.assert_close(second.step(second, batch)["output"], program.step(program, batch)["output"])


NESTED = """
class Graph:
    def __init__(self): self.x, self.edges, self.name = torch.randn(6, 4), torch.randint(6, (2, 9)), "a"

class OfDict(nn.Linear):
    def __init__(self): super().__init__(4, 3)
    def forward(self, batch): return super().forward(batch["x"]) * batch["scale"] + batch["more"][1]

class OfObject(OfDict):
    def forward(self, graph): return nn.Linear.forward(self, graph.x)[graph.edges[0]]

def entry(): return {"x": torch.randn(8, 4), "scale": 0.5, "more": [None, torch.randn(8, 3)]}
def of_dict(): return entry(), torch.randint(3, (8,))
def of_object(): return Graph()
def loss(outputs, batch): return nn.functional.cross_entropy(outputs, batch[1])
def step(model, batch, optimizer):
    loss = sum(model({**entry, "scale": 2}).square().mean() for entry in batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
def of_step(): return [entry(), entry()]
"""


def test_batches_hold_lists_dicts_and_objects(tmp_path: Path) -> None:
    def made(model: str, inputs: str, mode: str, **names: str) -> tuple[Module, Program]:
        named = Names(model=model, inputs=inputs, **names)
        workload = written(tmp_path, NESTED, mode=mode, names=named)
        return workload, ready(workload)

    torch.manual_seed(0)
    workload, program = made("OfDict", "of_dict", "train", train_step="none")
    assert (program.targets, workload.samples) == (1, 8)
    assert list(program.feed.next()) == ["0.x", "0.scale", "0.more.1", "1"]  # type: ignore[call-overload]
    assert program.run()["loss"] > 0
    assert "labels: entry 1 of a batch, which the model does not see" in workload.notes()
    _, program = made("OfObject", "of_object", "forward")
    assert program.run()["output"].shape == (9, 3)
    _, program = made("OfDict", "of_step", "train", train_step="step")
    program.run()
    (given,), _ = program.arguments({})
    assert given["scale"] == 2  # as the step calls the model, and not as the batch is
    assert Inplace().apply(program)[1]["rewritten"] >= 1


def test_lazy_layers_of_a_second_implementation_have_theirs(tmp_path: Path) -> None:
    text = "Model = lambda: nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())\n"
    text += "def get_inputs(): return torch.randn(8, 4)"
    program = ready(written(tmp_path, text, mode="train"))
    [path] = tmp_path.glob("*.py")
    second, _ = Replace(target=f"{path}:Model").apply(program)
    assert second.model is not program.model
    assert torch.equal(second.model[0].weight, program.model[0].weight)
    assert second.model[1].num_batches_tracked == 0
    assert second.model.training


def test_a_model_that_mixes_precisions_keeps_them(tmp_path: Path) -> None:
    text = (
        "Model = nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.LayerNorm(2))\ndef get_inputs(): return torch.ones(1, 2)"
    )
    workload = written(tmp_path, text)
    for dtype in (torch.float32, torch.bfloat16):
        model = workload.build(CPU, dtype, 0).model
        assert [p.dtype for p in model.parameters()] == [*[torch.bfloat16] * 2, *[torch.float32] * 2]
        assert workload.notes() == ["parameters and buffers keep their precisions, as some are narrower than float32"]
    assert {p.dtype for p in workload.build(CPU, torch.float64, 0).model.parameters()} == {torch.float64}


def test_a_precision_that_is_overridden_is_reported(tmp_path: Path) -> None:
    text = "Model = nn.Linear(2, 2).bfloat16()\ndef get_inputs(): return torch.ones(1, 2, dtype=torch.bfloat16)"
    workload = written(tmp_path, text)
    ready(workload)
    assert workload.notes() == [f"{what} in bfloat16 became float32 (dtype=)" for what in ("parameters", "inputs")]
    narrow = written(tmp_path, text)
    ready(narrow, dtype=torch.bfloat16)
    assert narrow.notes() == []
