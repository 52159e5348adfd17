"""The file to take home runs without optexp, and computes what the optimized program computes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import optexp
from optexp.config import search_path
from optexp.export.repro import Script
from optexp.export.vendoring import CARRIED
from optexp.program import Program, tensors_of
from optexp.strategies.amp import Amp
from optexp.strategies.channels_last import ChannelsLast
from optexp.strategies.cuda_graph import CudaGraph
from optexp.strategies.fused_optimizer import FusedOptimizer
from optexp.strategies.fusion import Fusion
from optexp.strategies.inference_mode import InferenceMode
from optexp.strategies.inplace import Inplace
from optexp.strategies.replace import Replace
from optexp.strategy import Strategy, captures, compose
from optexp.workload import Workload
from optexp.workloads.gelu import Gelu
from optexp.workloads.lenet5 import LeNet5
from optexp.workloads.mlp import Mlp
from optexp.workloads.module import Module
from tests.test_every_choice import TINY
from tests.workloads.test_vision import torchvision  # noqa: F401  # a fixture

WORKLOADS = sorted(path.stem for path in (search_path.CONF / "workload").glob("*.yaml"))
NOT_COVERED = {"sleep", "script"}  # batches that wait are no part of a program; a script is its own source
STACKS: list[tuple[Strategy, ...]] = [
    (),
    (Amp("float16"), FusedOptimizer()),
    (Inplace(),),
    (ChannelsLast(), Amp(), FusedOptimizer("foreach")),
    (InferenceMode(),),
]
ALONE = "import sys; sys.modules['optexp'] = None; import runpy; sys.argv = ['repro.py', '0.001']\n"


def optimized(
    workload: Workload, stack: Sequence[Strategy], device: str, dtype: torch.dtype
) -> tuple[Program, Program, Any, Any]:
    """The plain and the optimized program, each of its own, a batch, and the notes."""
    plain, program = (workload.build(torch.device(device), dtype, 0) for _ in range(2))
    batches = workload.batches(torch.Generator(device).manual_seed(1), 4)
    for one in (plain, program):
        one.feed.reset(batches)
    notes = {}
    program = replace(program, captured=captures(stack))
    for strategy in compose(stack):
        if reason := strategy.unsupported(program, torch.device(device)):
            pytest.skip(reason)
        feed = program.feed
        program, notes[strategy.name] = strategy.apply(program)
        if program.feed is not feed:
            program.feed.reset(batches)
    return plain, program, batches[0], notes


def written(
    folder: Path, workload: Workload, stack: Sequence[Strategy], device: str = "cpu", dtype: str = "float32"
) -> Program:
    """repro.py in `folder`; returns the program that it should be."""
    plain, program, batch, notes = optimized(workload, stack, device, getattr(torch, dtype))
    for name, content in Script(workload, plain, batch, dtype, 0, stack, notes).files().items():
        (folder / name).write_bytes(content)
    for one in (plain, program):
        one.feed.pause()
    return program


def executed(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The file's names, made where neither optexp can be imported nor what another file took along."""
    for name in [name for name in sys.modules if name.partition(".")[0] == CARRIED]:
        del sys.modules[name]
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "optexp", None)
        module = ModuleType("repro")
        patched.setitem(sys.modules, "repro", module)  # where a dataclass looks its names up
        names = vars(module)
        names["__file__"] = str(path)
        exec(compile(path.read_text(), path, "exec"), names)
    return names


def assert_same(names: dict[str, Any], program: Program) -> None:
    """From the same parameters, a step on the same batch gives the same result, gradients and parameters."""
    batch = names["bring"](next(iter(names["loader"]))) if "loader" in names else next(names["batches"])
    keys = tensors_of(program.feed.next())
    given = batch if all(key.isdigit() for key in keys) else dict(zip(keys, batch, strict=True))
    result = names["step"](batch)
    expected = program.step(program, given)
    if isinstance(result, Tensor):
        torch.testing.assert_close(result, next(iter(expected.values())))
    for ours, theirs in zip(names["model"].parameters(), program.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None and theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: "+".join(s.name for s in stack) or "plain")
@pytest.mark.parametrize("name", [name for name in WORKLOADS if name not in NOT_COVERED])
def test_it_computes_what_the_program_computes(
    name: str,
    stack: tuple[Strategy, ...],
    experiment: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if name == "vision":
        request.getfixturevalue("torchvision")  # a stand-in
    architecture = ["workload.architecture=resnet50"] if name == "vision" else []
    workload = experiment(f"workload={name}", *TINY.get(name, []), *architecture).workload.resolve("cpu")
    try:
        program = written(tmp_path, workload, stack)
    except optexp.errors.Unsupported as reason:
        pytest.skip(str(reason))
    assert_same(executed(tmp_path / "repro.py", monkeypatch), program)


@pytest.mark.parametrize("source", ["device", "host"])
def test_other_precisions_and_batches_that_travel(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Mlp(mode="train", dim=8, batch_size=4, source=source)
    program = written(tmp_path, workload, [FusedOptimizer()], dtype="bfloat16")
    names = executed(tmp_path / "repro.py", monkeypatch)
    assert names["model"][0].weight.dtype is torch.bfloat16
    assert ("bring" in names) == (source == "host")
    batch = names["bring"](names["loader"][0]) if source == "host" else next(names["batches"])
    torch.testing.assert_close(names["step"](batch), program.step(program, batch)["loss"])


@pytest.mark.slow
def test_every_workloads_file_runs_in_a_process_without_optexp(experiment: Any, tmp_path: Path) -> None:
    files = []
    for name in WORKLOADS:
        if name in ("vision", *NOT_COVERED):
            continue
        workload = experiment(f"workload={name}", *TINY.get(name, [])).workload.resolve("cpu")
        (folder := tmp_path / name).mkdir()
        written(folder, workload, [Amp()])
        files.append(folder / "repro.py")
    run = "".join(f"runpy.run_path({str(file)!r}, run_name='__main__')\n" for file in files)
    assert alone(run, tmp_path).count("µs a step") == len(files)


def alone(code: str, folder: Path) -> str:
    """What a process prints in which `import optexp` fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", ALONE + code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_not_covered_says_so(experiment: Any, tmp_path: Path) -> None:
    written(tmp_path, experiment("workload=sleep", "workload.ms=1").workload, [])
    with pytest.raises(SystemExit, match=r"sleep · baseline cannot be written .*: sleep brings batches its own way"):
        exec((tmp_path / "repro.py").read_text(), {})


def test_every_strategy_says_what_it_does(experiment: Any) -> None:
    names = [name for name in search_path.options("strategy") if name != "baseline"]
    strategies = [s for name in names for s in experiment(f"strategy={name}").strategies]
    assert len(strategies) == len(names)
    assert [s.name for s in strategies if type(s).recipe is Strategy.recipe] == []


class Silent(Inplace):
    def recipe(self, notes: dict[str, Any]) -> str:
        return ""


def test_a_strategy_without_a_recipe_is_named_as_missing(tmp_path: Path) -> None:
    written(tmp_path, Gelu(size=8), [Silent()])
    assert "runs and times it. Missing: test_repro." in (tmp_path / "repro.py").read_text().splitlines()[0]


# --- the user's own code -----------------------------------------------------------------------------------------

OWN = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self, width, scale=1.0):
        super().__init__()
        self.linear, self.scale = nn.Linear(3, width), scale
    def forward(self, x, factor=1.0):
        return self.linear(x) * factor * self.scale
"""
LOSS = "def loss(outputs, batch):\n    return (outputs - batch[1]).square().mean()\n"
OPTIMIZER = "def get_optimizer(params):\n    return torch.optim.SGD(params, lr=0.1)\n"
INPUTS = "def get_init_inputs():\n    return [[5], {'scale': 2.0}]\ndef get_inputs(rows=4):\n"
MIXED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4).bfloat16(), nn.LayerNorm(4)
    def forward(self, x):
        return self.norm(self.linear(x.bfloat16()).float())
def get_inputs():
    return [torch.randn(2, 3)]
"""
PAIR = INPUTS + "    return [torch.ones(rows, 3), torch.ones(rows, 5, dtype=torch.float64)]\n"
LOADER = """
from torch.utils.data import DataLoader
def get_init_inputs():
    return {"width": 2}
def get_loader():
    return DataLoader([{"x": torch.ones(3), "y": index % 2, "name": "a"} for index in range(8)], batch_size=4)
def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1)
"""
STEP = OPTIMIZER + (
    "def train_step(model, batch, optimizer):\n    x, y = batch\n    loss = (model(x) - y).square().mean()\n"
    "    loss.backward()\n    optimizer.step()\n    model.linear.weight.data.mul_(1.0)\n    return loss\n"
)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (INPUTS + "    return torch.ones(rows, 3)\n", {}),
        (INPUTS + "    return torch.ones(rows, 3), 2.5\n", {}),
        (INPUTS + "    return {'x': torch.ones(rows, 3), 'factor': 2.5}\n", {"mode": "train"}),
        (PAIR + LOSS + OPTIMIZER, {"mode": "train"}),
        (PAIR, {"mode": "train", "loss": "huber_loss", "loss_args": {"delta": 0.5}, "optimizer": "Adam"}),
        (PAIR, {"mode": "forward_backward", "loss": "MSELoss", "labels": 1, "shapes": [{"rows": 2}, {"rows": 6}]}),
        (PAIR + "loss = nn.MSELoss()\n", {"mode": "train"}),
        (PAIR + STEP, {"mode": "train"}),
        (LOADER, {"mode": "train", "loss": "cross_entropy"}),
        ("def get_loader():\n    yield torch.ones(4, 3)\n", {"args": [2]}),
        ("", {"args": [2], "inputs": [{"shape": ["B", 3]}, {"name": "factor", "shape": [], "low": 2.0, "high": 3.0}],
              "shapes": [{"B": 4}]}),
        ("", {"args": [2], "labels": 1, "mode": "train",
              "inputs": [{"shape": [4, 3]}, {"shape": [4], "dtype": "int64", "high": 2}]}),
        (MIXED, {}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stack", [(), (Amp(),)], ids=["plain", "amp"])
def test_a_file_of_the_users(
    text: str, settings: dict[str, Any], stack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"own_{abs(hash((text, str(settings), bool(stack))))}"
    (tmp_path / f"{name}.py").write_text(OWN + text)
    program = written(tmp_path, Module(path=str(tmp_path / f"{name}.py"), **settings), stack)
    names = executed(tmp_path / "repro.py", monkeypatch)
    assert_same(names, program)
    assert "class Model" not in (tmp_path / "repro.py").read_text()


@pytest.mark.parametrize(
    ("target", "settings"),
    [
        ("torch.nn:Linear", {"args": [8, 3]}),
        ("torch.nn.functional:softmax", {"kwargs": {"dim": 0}}),
        ("torch.nn.functional:gelu", {}),
        ("tests.workloads.test_module:factory", {"args": [5]}),
        ("tests.workloads.test_module:INSTANCE", {}),
    ],
)
def test_a_target_of_the_users(
    target: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = written(tmp_path, Module(target=target, inputs=[{"shape": [4, 8]}], **settings), [])
    assert_same(executed(tmp_path / "repro.py", monkeypatch), program)


def test_a_second_implementation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = Replace("tests.strategies.test_replace:ByHand", names={"*.weight": "w.*.T", "*.bias": "b.*"})
    workload = Mlp(mode="train", dim=8, layers=2, batch_size=4, in_features=5)
    program = written(tmp_path, workload, [second, FusedOptimizer()])
    assert_same(executed(tmp_path / "repro.py", monkeypatch), program)
    formula = Replace("torch.nn.functional:gelu", kwargs={"approximate": "tanh"})
    program = written(tmp_path, Gelu(size=8), [formula])
    assert_same(executed(tmp_path / "repro.py", monkeypatch), program)


IN_A_SCRIPT = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)
    def forward(self, x):
        return self.linear(x)
net = Net()
def double(x):
    return x * 2
examples = torch.ones(3, 4)
def make():
    return torch.ones(3, 4)
"""


@pytest.mark.parametrize(("model", "inputs"), [("Net", "examples"), ("net", "make"), ("double", "examples")])
def test_objects_given_from_python_lie_beside_it(model: str, inputs: str, tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(IN_A_SCRIPT, names)
    quick = ["isolation=none", "measurement.warmup_s=0.01", "measurement.pairs=10", "measurement.process_s=0.1"]
    quick += ["measurement.verification_seeds=1", "tracking.enabled=false"]
    given = names[model], names[inputs]
    optexp.compare(*given, "inference_mode", measurement="quick", device="cpu", overrides=quick, output=tmp_path)
    run = f"runpy.run_path({str(tmp_path / 'repro.py')!r}, run_name='__main__')"
    assert re.fullmatch(r"[\d.]+ µs a step\n", alone(run, tmp_path))


# --- on a GPU ----------------------------------------------------------------------------------------------------

ON_GPU: list[tuple[Callable[[], Workload], tuple[Strategy, ...]]] = [
    (lambda: Mlp(mode="train", dim=32), (Amp("float16"), FusedOptimizer(), CudaGraph())),
    (lambda: Mlp(mode="train", dim=32, layers=2), (Amp(), Fusion(), CudaGraph())),
    (lambda: Mlp(mode="forward_backward", dim=32, layers=2), (Fusion(mode="reduce-overhead"),)),
    (lambda: LeNet5(batch_size=16), (ChannelsLast(), Amp(), CudaGraph())),
    (lambda: Gelu(size=64, mode="forward_backward"), (Inplace(), CudaGraph())),
    (lambda: Gelu(size=64), (InferenceMode(), CudaGraph())),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("workload", "stack"), ON_GPU, ids=range(len(ON_GPU)))
def test_it_runs_on_a_gpu(workload: Callable[[], Workload], stack: tuple[Strategy, ...], tmp_path: Path) -> None:
    written(tmp_path, workload(), stack, device="cuda")
    run = f"runpy.run_path({str(tmp_path / 'repro.py')!r}, run_name='__main__')"
    assert re.fullmatch(r"[\d.]+ µs a step\n", alone(run, tmp_path))
